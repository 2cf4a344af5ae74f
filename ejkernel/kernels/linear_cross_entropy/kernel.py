"""The loss as a kernel: its implementations, its gradient, its configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.ops import (
    Dimension,
    Invocation,
    Kernel,
    Limits,
    NearShapes,
    Partitioning,
    Supports,
)

from ..dtypes import accumulation_dtype
from ..limits import COUNT, LANES, SUBLANES, TRITON_SIDE, launch
from . import xla
from .blocks import LinearCrossEntropyConfig, Sizes, config, tpu_tile, xla_blocks, xla_rows
from .options import LossOptions
from .reference import linear_cross_entropy_reference


class _Call(NamedTuple):
    """The arguments of a call with the rows in one axis, and what is to be made of their losses."""

    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    bias: jax.Array | None
    options: LossOptions
    reduction: str
    row_axes: tuple[str, ...]  # mesh axes over which the rows are sharded

    @staticmethod
    def of(
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        bias: jax.Array | None = None,
        reduction: str = "mean",
        row_axes: tuple[str, ...] = (),
        **options: Any,
    ) -> _Call:
        rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        chosen = LossOptions(**options)
        # Sums over rows are products, and there a factor of zero does not hide NaN.
        rows = jnp.where((flat == chosen.ignore_index)[:, None], jnp.zeros_like(rows), rows)
        return _Call(rows, weight, flat, bias, chosen, reduction, row_axes)

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.hidden, self.weight, vocab_first=self.options.vocab_first)

    def counts(self) -> jax.Array:
        """Which rows count."""
        return self.labels != self.options.ignore_index

    def share(self) -> jax.Array:
        """What the sum of all losses is multiplied with; in the dtype of the losses."""
        dtype = accumulation_dtype(self.hidden.dtype)
        if self.reduction != "mean":
            return jnp.ones((), dtype)
        counted = self._over_rows(jnp.sum(self.counts(), dtype=jnp.int32))
        return 1.0 / jnp.maximum(counted, 1).astype(dtype)

    def _over_rows(self, value: jax.Array) -> jax.Array:
        """The sum over the devices that have other rows."""
        return jax.lax.psum(value, self.row_axes) if self.row_axes else value

    def reduced(self, losses: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if self.reduction == "none":
            return losses.reshape(shape)
        # A row that is ignored has the loss 0; a loss that is NaN shows.
        return self._over_rows(jnp.sum(losses)) * self.share()

    def sum_gradients(self) -> jax.Array:
        """The gradient of each row's loss, if the losses are added up."""
        return self._checked(self.counts().astype(self.share().dtype))

    def row_gradients(self, dout: jax.Array) -> jax.Array:
        """The gradient of each row's loss."""
        if self.reduction == "none":
            return self._checked(dout.reshape(-1))
        return self.sum_gradients() * (dout * self.share())

    def _checked(self, factors: jax.Array) -> jax.Array:
        """The factors, NaN for rows whose loss is NaN because there is no such word."""
        known = (self.labels >= 0) & (self.labels < self.options.vocabulary(self.sizes.vocab))
        known |= ~self.counts() | (factors == 0.0)
        return jnp.where(known, factors, jnp.nan)


def _features_fit(inv: Invocation[Any, Any]) -> str | None:
    """A tile of 64 rows and 128 words that fits into VMEM."""
    from . import pallas_tpu

    hidden = inv.args[0]
    if pallas_tpu.fits(64, 128, hidden.shape[-1], hidden.dtype.itemsize, backward=True):
        return None
    return f"hidden has {hidden.shape[-1]} features; 64 rows and 128 words of them do not fit"


def _same_dtype(inv: Invocation[Any, Any]) -> str | None:
    """Hidden states and weights of one dtype."""
    hidden, weight, *_ = inv.args
    if hidden.dtype == weight.dtype:
        return None
    return f"hidden is {hidden.dtype} and weight is {weight.dtype}; they must be the same"


_XLA_GRADIENTS = {"bwd.blocksize_m": COUNT, "bwd.blocksize_n": COUNT}

LIMITS = {
    "xla": Limits({"fwd.blocksize_m": COUNT} | _XLA_GRADIENTS),
    "pallas": Limits(
        {
            "fwd.blocksize_m": SUBLANES,
            "fwd.blocksize_n": LANES,
            "bwd.blocksize_m": SUBLANES,
            "bwd.blocksize_n": LANES,
        }
    ),
    "triton": Limits(
        {f"fwd.blocksize_{side}": TRITON_SIDE for side in "mnk"} | launch("fwd.") | _XLA_GRADIENTS
    ),
}


class LinearCrossEntropy(Kernel[LinearCrossEntropyConfig, jax.Array]):
    """Cross entropy of `softmax(hidden @ weight)` without the logits in memory.

    Arguments are `hidden, weight, labels`, keywords those of the reference. Use
    `ejkernel.modules.linear_cross_entropy`, which checks them.
    """

    version = "1"
    limits: ClassVar[Mapping[str, Limits]] = LIMITS
    supports: ClassVar[Mapping[str, Supports]] = {
        "pallas": Supports(
            dtypes=("float32", "bfloat16"),
            without=("vocab_axes",),
            rules=(_same_dtype, _features_fit),
        ),
        "triton": Supports(
            dtypes=("float32", "bfloat16", "float16"),
            without=("vocab_axes",),
            rules=(_same_dtype,),
        ),
    }
    near_shapes = NearShapes(
        *(Dimension(argument=(0, 2), axis=axis, rounding="nearest") for axis in (0, -2)),
        Dimension(argument=1, rounding="nearest"),
        within=2.0,
    )

    def __init__(self) -> None:
        super().__init__(name="linear_cross_entropy")

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        weight = "v d" if inv.kwargs.get("vocab_first") else "d v"
        whole = inv.kwargs.get("reduction", "mean") != "none"
        return Partitioning(
            f"... d, {weight}, ... -> {'' if whole else '...'}",
            keywords={"bias": "v"},
            across={"v": "vocab_axes", **({"...": "row_axes"} if whole else {})},
        )

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return bool(options["reduction"] == "none")

    def reference(self, *args: Any, **options: Any) -> jax.Array:
        return linear_cross_entropy_reference(*args, **options)

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Logits of ordinary size, and labels from the whole vocabulary."""
        hidden, weight, labels = inv.args
        keys = jax.random.split(key, 4)
        vocab = weight.shape[0 if inv.kwargs.get("vocab_first") else 1]
        made = (
            jax.random.normal(keys[0], hidden.shape, hidden.dtype),
            jax.random.normal(keys[1], weight.shape, weight.dtype) * hidden.shape[-1] ** -0.5,
            jax.random.randint(keys[2], labels.shape, 0, vocab, labels.dtype),
        )
        options = dict(inv.kwargs)
        if options.get("bias") is not None:
            bias = options["bias"]
            options["bias"] = jax.random.normal(keys[3], bias.shape, bias.dtype)
        return made, options

    # --- any XLA device --------------------------------------------------------------------------

    def run_xla(
        self,
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        cfg: LinearCrossEntropyConfig,
        **options: Any,
    ) -> jax.Array:
        call = _Call.of(hidden, weight, labels, **options)
        rows = cfg.fwd.blocksize_m or xla_rows(call.sizes)
        return call.reduced(xla.losses(*call[:5], rows=rows), labels.shape)

    def fwd_with_residuals_xla(
        self,
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        cfg: LinearCrossEntropyConfig,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        call = _Call.of(hidden, weight, labels, **options)
        if call.reduction == "none":
            # The gradients of the rows are not known yet: the logits have to be computed again.
            return self.run_xla(hidden, weight, labels, cfg=cfg, **options), None
        losses, *gradients = _xla_gradients(call, call.sum_gradients(), cfg)
        return call.reduced(losses, labels.shape), gradients

    def vjp_xla(
        self,
        gradients: list[jax.Array | None] | None,
        out: jax.Array,
        dout: jax.Array,
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        cfg: LinearCrossEntropyConfig,
        **options: Any,
    ) -> tuple[Any, ...]:
        call = _Call.of(hidden, weight, labels, **options)
        if gradients is None:
            found = _xla_gradients(call, call.row_gradients(dout), cfg)
            return _gradients(call, *found[1:], hidden.shape)
        # In float16 the gradient of a mean is so small that it would be rounded to zero; kept is
        # that of the sum.
        factor = dout * call.share()
        dhidden, dweight, dbias = jax.tree.map(
            lambda a: (a.astype(factor.dtype) * factor).astype(a.dtype), gradients
        )
        return _gradients(call, dhidden, dweight, dbias, hidden.shape)

    # --- TPU -------------------------------------------------------------------------------------

    def run_pallas(self, *args: Any, cfg: LinearCrossEntropyConfig, **options: Any) -> jax.Array:
        return self.fwd_with_residuals_pallas(*args, cfg=cfg, **options)[0]

    def fwd_with_residuals_pallas(
        self,
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        cfg: LinearCrossEntropyConfig,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array]:
        from . import pallas_tpu

        call = _Call.of(hidden, weight, labels, **options)
        rows, vocab = tpu_tile(call.sizes, backward=False)
        losses, lse = pallas_tpu.losses(
            *call[:5], rows=cfg.fwd.blocksize_m or rows, vocab=cfg.fwd.blocksize_n or vocab
        )
        return call.reduced(losses, labels.shape), lse

    def vjp_pallas(
        self,
        lse: jax.Array,
        out: jax.Array,
        dout: jax.Array,
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        cfg: LinearCrossEntropyConfig,
        **options: Any,
    ) -> tuple[Any, ...]:
        from . import pallas_tpu

        call = _Call.of(hidden, weight, labels, **options)
        rows, vocab = tpu_tile(call.sizes, backward=True)
        found = pallas_tpu.gradients(
            *call[:3],
            lse,
            call.row_gradients(dout),
            *call[3:5],
            rows=cfg.bwd.blocksize_m or rows,
            vocab=cfg.bwd.blocksize_n or vocab,
        )
        return _gradients(call, *found, hidden.shape)

    # --- GPU -------------------------------------------------------------------------------------

    def run_triton(
        self,
        hidden: jax.Array,
        weight: jax.Array,
        labels: jax.Array,
        *,
        cfg: LinearCrossEntropyConfig,
        **options: Any,
    ) -> jax.Array:
        from . import pallas_gpu

        call = _Call.of(hidden, weight, labels, **options)
        rows, vocab, depth = pallas_gpu.default_tile(hidden.dtype.itemsize)
        losses = pallas_gpu.losses(
            *call[:5],
            rows=cfg.fwd.blocksize_m or rows,
            vocab=cfg.fwd.blocksize_n or vocab,
            depth=cfg.fwd.blocksize_k or depth,
            num_warps=cfg.fwd.num_warps or 8,
            num_stages=cfg.fwd.num_stages or 3,
        )
        return call.reduced(losses, labels.shape)

    def fwd_with_residuals_triton(
        self, *args: Any, cfg: LinearCrossEntropyConfig, **options: Any
    ) -> tuple[jax.Array, Any]:
        # Differentiated, the loss comes with its gradients from cuBLAS; see `pallas_gpu.py`.
        if options.get("reduction", "mean") == "none":
            return self.run_triton(*args, cfg=cfg, **options), None
        return self.fwd_with_residuals_xla(*args, cfg=cfg, **options)

    def vjp_triton(self, *args: Any, cfg: LinearCrossEntropyConfig, **options: Any) -> Any:
        return self.vjp_xla(*args, cfg=cfg, **options)

    # --- configs ---------------------------------------------------------------------------------

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> LinearCrossEntropyConfig:
        sizes = Sizes.of(*inv.args[:2], **inv.kwargs)
        return config((xla_rows(sizes),), xla_blocks(sizes))

    def heuristic_cfg_pallas(self, inv: Invocation[Any, Any]) -> LinearCrossEntropyConfig:
        sizes = Sizes.of(*inv.args[:2], **inv.kwargs)
        return config(tpu_tile(sizes, backward=False), tpu_tile(sizes, backward=True))

    def heuristic_cfg_triton(self, inv: Invocation[Any, Any]) -> LinearCrossEntropyConfig:
        from . import pallas_gpu

        sizes = Sizes.of(*inv.args[:2], **inv.kwargs)
        tile = pallas_gpu.default_tile(sizes.itemsize)
        return config(tile, xla_blocks(sizes), num_warps=8, num_stages=3)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> list[LinearCrossEntropyConfig]:
        # The passes do not share anything, so each is varied while the other stays as it is.
        default = self.heuristic_cfg(inv)
        sizes = Sizes.of(*inv.args[:2], **inv.kwargs)
        chunks = [rows for rows in (128, 256, 512, 1024) if rows < 2 * sizes.rows]
        words = dict.fromkeys(min(words, sizes.vocab) for words in (1024, 8192, sizes.vocab))
        blocks = [(rows, some) for rows in chunks for some in words]
        return [
            *(dataclasses.replace(default, fwd=config((rows,), ()).fwd) for rows in chunks),
            *(dataclasses.replace(default, bwd=config((), block).bwd) for block in blocks),
        ]

    def candidate_cfgs_pallas(self, inv: Invocation[Any, Any]) -> list[LinearCrossEntropyConfig]:
        from . import pallas_tpu

        sizes = Sizes.of(*inv.args[:2], **inv.kwargs)
        default = self.heuristic_cfg_pallas(inv)
        tiles = [(rows, words) for rows in (128, 256, 512, 1024) for words in (256, 512, 1024)]
        forward, backward = (
            [
                (rows, words)
                for rows, words in tiles
                if pallas_tpu.fits(rows, words, sizes.features, sizes.itemsize, backward=b)
                and rows * words * sizes.features <= 2**29  # else they compile for minutes
            ]
            for b in (False, True)
        )
        return [
            *(dataclasses.replace(default, fwd=config(tile, ()).fwd) for tile in forward),
            *(dataclasses.replace(default, bwd=config((), tile).bwd) for tile in backward),
        ]

    def candidate_cfgs_triton(self, inv: Invocation[Any, Any]) -> list[LinearCrossEntropyConfig]:
        blocks = xla_blocks(Sizes.of(*inv.args[:2], **inv.kwargs))
        return [
            config(tile, blocks, num_warps=warps, num_stages=stages)
            for tile in ((128, 128, 32), (128, 128, 64), (128, 256, 32), (64, 128, 64))
            for warps in (4, 8)
            for stages in (2, 3)
        ]


def _xla_gradients(
    call: _Call, factors: jax.Array, cfg: LinearCrossEntropyConfig
) -> xla.LossAndGradients:
    rows, vocab = xla_blocks(call.sizes)
    return xla.losses_and_gradients(
        *call[:3],
        factors,
        *call[3:5],
        rows=cfg.bwd.blocksize_m or rows,
        vocab=cfg.bwd.blocksize_n or vocab,
    )


def _gradients(
    call: _Call,
    dhidden: jax.Array,
    dweight: jax.Array,
    dbias: jax.Array | None,
    shape: tuple[int, ...],
) -> tuple[Any, ...]:
    """In the order that the framework asks for; labels have none."""
    by_keyword = {} if call.bias is None else {"bias": dbias}
    return dhidden.reshape(shape), dweight, None, by_keyword
