"""Flash attention as a kernel: its configs, its implementations, its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import (
    BwdParams,
    Dimension,
    FwdParams,
    Invocation,
    Kernel,
    Limits,
    NearShapes,
    Partitioning,
    Shards,
    Supports,
)

from ..limits import COUNT
from . import accelerators
from .cpu import CPU, CPU_LIMITS, FlashAttentionOnCPU
from .inputs import make_inputs
from .options import BY_EXAMPLE
from .reference import attention_reference_by_rows
from .xla.backward import backward
from .xla.blocks import Blocks, candidate_blocks, default_blocks
from .xla.diagonal import UNCUT
from .xla.forward import forward
from .xla.ring import ring_backward, ring_forward

Out = jax.Array | tuple[jax.Array, jax.Array]

XLA_LIMITS = Limits(
    {
        f"{way}.{field}": COUNT  # longer blocks than sequences are cut
        for way in ("fwd", "bwd")
        for field in ("q_blocksize", "kv_blocksize", "blocksize_heads")
    }
)


@dataclasses.dataclass(frozen=True)
class FlashAttentionConfig:
    """Block sizes of the forward and of the backward pass; None leaves one to the heuristic.

    `q_blocksize` and `kv_blocksize` are the sides of a tile, `blocksize_heads` is the number of key
    heads in it, those of all examples of the batch counted.
    """

    fwd: FwdParams = dataclasses.field(default_factory=FwdParams)
    bwd: BwdParams = dataclasses.field(default_factory=BwdParams)


class FlashAttention(
    FlashAttentionOnCPU, accelerators.Accelerators, Kernel[FlashAttentionConfig, Out]
):
    """`softmax(scale * q kᵀ) v`, block by block, with its own backward pass.

    Arguments are `q, k, v` as `(batch, sequence, heads, head_dim)`, keywords those of
    `attention_reference` and `sequence_axis`. Use `ejkernel.modules.flash_attention`, which checks
    them.
    """

    version = "1"
    supports: ClassVar[Mapping[str, Supports]] = {"cpu": CPU, **accelerators.SUPPORTS}
    limits: ClassVar[Mapping[str, Limits]] = {
        "xla": XLA_LIMITS,
        "cpu": CPU_LIMITS,
        **accelerators.LIMITS,
    }
    # Blocks are chosen for a length; the number of sequences hardly matters, and a block that is
    # longer than a sequence is cut to it.
    near_shapes = NearShapes(
        Dimension(argument=(0, 1, 2), axis=0, rounding="nearest"),
        Dimension(argument=(0, 1, 2), axis=1, rounding="nearest"),
        within=4.0,
    )

    def __init__(self) -> None:
        super().__init__(name="flash_attention")

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        lse = ", b (k g) s" if inv.kwargs.get("return_lse") else ""
        return Partitioning(
            "b s (k g) d, b t k d, b t k e -> b s (k g) e" + lse,
            keywords={
                "bias": "b (k g) s t",
                "mask": "b (k g) s t",
                "segment_ids": "b s",
                "kv_segment_ids": "b t",
                "sinks": "(k g)",
                "q_lengths": "b",
                "kv_lengths": "b",
            },
            independent="b k g",
            localize=_with_own_dropout,
        )

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        # What is dropped depends on the number of the entry.
        return options.get("dropout_key") is None

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> FlashAttentionConfig:
        return _config(_default_blocks(inv, backward=False), _default_blocks(inv, backward=True))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> list[FlashAttentionConfig]:
        heuristic = self.heuristic_cfg(inv)
        if "sequence_axis" in inv.kwargs:
            return [heuristic]  # a tuner measures outside of the mesh, where there is no ring
        q, k, _ = inv.args
        # The passes do not share anything, so each is varied while the other stays as it is.
        ahead = candidate_blocks(q.shape, k.shape, backward=False)
        back = candidate_blocks(q.shape, k.shape, backward=True)
        return [
            *(dataclasses.replace(heuristic, fwd=_config(b, b).fwd) for b in ahead),
            *(dataclasses.replace(heuristic, bwd=_config(b, b).bwd) for b in back),
        ]

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random arrays; sequences as long as they may be, with a few segments packed in order."""
        return make_inputs(inv, key)

    def reference(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Out:
        return attention_reference_by_rows(q, k, v, **options)

    # --- XLA, on any device ----------------------------------------------------------------------

    def run_xla(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: FlashAttentionConfig,
        causal: bool,
        softmax_scale: float,
        return_lse: bool = False,
        **options: Any,
    ) -> Out:
        options |= {"causal": causal, "softmax_scale": softmax_scale, "return_lse": return_lse}
        return self.fwd_with_residuals_xla(q, k, v, cfg=cfg, **options)[0]

    def fwd_with_residuals_xla(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: FlashAttentionConfig,
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Out, jax.Array]:
        blocks = _blocks_of(cfg.fwd, q, k, options, backward=False)
        run = ring_forward if "sequence_axis" in options else forward
        out, lse = run(q, k, v, **blocks, **options)
        return ((out, lse) if return_lse else out), lse

    def vjp_xla(
        self,
        lse: jax.Array,
        out: Any,
        dout: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: FlashAttentionConfig,
        return_lse: bool = False,
        differentiated: frozenset[str],
        **options: Any,
    ) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
        blocks = _blocks_of(cfg.bwd, q, k, options, backward=True)
        run = ring_backward if "sequence_axis" in options else backward
        dlse = None
        if return_lse:
            (out, _), (dout, dlse) = out, dout
        options["differentiate_bias"] = "bias" in differentiated
        return run(q, k, v, out, lse, dout, dlse=dlse, **blocks, **options)


def _with_own_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any], shards: Shards
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Weights are dropped by their place in the whole call: where the part at hand begins in it."""
    if kwargs.get("dropout_key") is None:
        return args, kwargs
    examples, _, heads, _ = args[0].shape
    # Query heads are cut between key heads, or where there is one key head, between themselves.
    head = shards.index("k") + shards.index("g")
    first = {"first_example": shards.index("b") * examples, "first_head": head * heads}
    return args, {**kwargs, **{n: jnp.asarray(x, np.int32) for n, x in first.items()}}


def _default_blocks(inv: Invocation[Any, Any], *, backward: bool) -> Blocks:
    q, k, _ = inv.args
    return _blocks_for(q, k, inv.kwargs, backward=backward)


def _blocks_for(q: Any, k: Any, options: Mapping[str, Any], *, backward: bool) -> Blocks:
    by_example = any(options.get(name) is not None for name in BY_EXAMPLE)
    return default_blocks(
        q.shape,
        k.shape,
        causal=bool(options.get("causal", False)),
        backward=backward,
        window=options.get("window"),
        by_example=by_example,
        cut=all(options.get(name) is None for name in UNCUT),
    )


def _blocks_of(
    params: FwdParams | BwdParams, q: Any, k: Any, options: Mapping[str, Any], *, backward: bool
) -> dict[str, Any]:
    """The blocks of a config; what it leaves open comes from the heuristic."""
    default = _blocks_for(q, k, options, backward=backward)
    return {
        "block_q": params.q_blocksize or default.q,
        "block_k": params.kv_blocksize or default.k,
        "block_heads": params.blocksize_heads or default.heads,
    }


def _config(forward: Blocks, backward: Blocks) -> FlashAttentionConfig:
    return FlashAttentionConfig(
        FwdParams(q_blocksize=forward.q, kv_blocksize=forward.k, blocksize_heads=forward.heads),
        BwdParams(q_blocksize=backward.q, kv_blocksize=backward.k, blocksize_heads=backward.heads),
    )
