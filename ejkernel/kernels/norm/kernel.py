"""Normalisation as a kernel: its config, its implementations, its gradient.

`RmsNorm` and `LayerNorm` are this kernel, without and with the mean subtracted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel.ops import (
    BwdParams,
    Dimension,
    FwdParams,
    Invocation,
    Kernel,
    Limit,
    Limits,
    NearShapes,
    Partitioning,
    Supports,
    device_kind,
)

from ..limits import COUNT, SUBLANES, WARPS
from . import xla

Output = jax.Array | tuple[jax.Array, jax.Array]

_MOST_FEATURES = 16384


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Rows that are worked on at a time (`blocksize_m`) and warps, forward and backward.

    None leaves one to the heuristic. The XLA implementation has blocks in its backward pass only;
    there a block as large as the input means no blocks.
    """

    fwd: FwdParams = dataclasses.field(default_factory=FwdParams)
    bwd: BwdParams = dataclasses.field(default_factory=BwdParams)


def _rows_fit(inv: Invocation[Any, Any]) -> str | None:
    """At most 16,384 features."""
    features = inv.args[0].shape[-1]
    if features > _MOST_FEATURES:
        return f"x has {features} features; rows of at most {_MOST_FEATURES} fit on the chip"
    return None


LIMITS = {
    "xla": Limits({"bwd.blocksize_m": COUNT}),
    "pallas": Limits({"fwd.blocksize_m": SUBLANES, "bwd.blocksize_m": SUBLANES}),
    "triton": Limits(
        {
            "fwd.blocksize_m": Limit(least=1, most=4096, power_of_two=True),  # rows of a tile
            "bwd.blocksize_m": COUNT,  # walked over one by one
            "fwd.num_warps": WARPS,
            "bwd.num_warps": WARPS,
        }
    ),
}


class NormKernel(Kernel[NormConfig, Output]):
    """Normalisation of the last axis of `x`, with the arguments of `rms_norm` and `layer_norm`."""

    centered: ClassVar[bool]

    limits: ClassVar[Mapping[str, Limits]] = LIMITS
    supports: ClassVar[Mapping[str, Supports]] = {
        name: Supports(
            dtypes=("float32", "bfloat16", "float16"), without=("feature_axes",), rules=(_rows_fit,)
        )
        for name in ("pallas", "triton")
    }
    # Blocks are chosen for a row's length; how many rows there are hardly matters.
    near_shapes = NearShapes(
        *(Dimension(argument=0, axis=axis, rounding="nearest") for axis in (0, -2)), within=4.0
    )

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        outputs = "... d" if inv.kwargs.get("residual") is None else "... d, ... d"
        return Partitioning(
            f"... d, d -> {outputs}",
            keywords={"bias": "d", "residual": "... d"},
            across={"d": "feature_axes"},
        )

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return True

    # --- any XLA device --------------------------------------------------------------------------

    def run_xla(
        self,
        x: jax.Array,
        weight: jax.Array | None = None,
        *,
        cfg: NormConfig,
        eps: float,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
        weight_offset: float = 0.0,
        feature_axes: tuple[str, ...] = (),
    ) -> Output:
        return self.fwd_with_residuals_xla(
            x,
            weight,
            cfg=cfg,
            eps=eps,
            bias=bias,
            residual=residual,
            weight_offset=weight_offset,
            feature_axes=feature_axes,
        )[0]

    def fwd_with_residuals_xla(
        self,
        x: jax.Array,
        weight: jax.Array | None = None,
        *,
        cfg: NormConfig,
        eps: float,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
        weight_offset: float = 0.0,
        feature_axes: tuple[str, ...] = (),
    ) -> tuple[Output, xla.Moments]:
        summed = x if residual is None else x + residual
        out, moments = xla.forward(
            summed,
            weight=weight,
            bias=bias,
            eps=eps,
            weight_offset=weight_offset,
            centered=self.centered,
            feature_axes=feature_axes,
        )
        return (out if residual is None else (out, summed)), moments

    def vjp_xla(
        self,
        moments: xla.Moments,
        out: Any,
        dout: Any,
        x: jax.Array,
        *weight: jax.Array,
        cfg: NormConfig,
        eps: float,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
        weight_offset: float = 0.0,
        feature_axes: tuple[str, ...] = (),
    ) -> tuple[Any, ...]:
        del eps  # it is in the moments
        summed, gradient = (x, dout) if residual is None else (out[1], dout[0])
        found = xla.backward(
            summed,
            gradient,
            moments,
            weight=_one(weight),
            bias=bias,
            weight_offset=weight_offset,
            centered=self.centered,
            rows=cfg.bwd.blocksize_m or _default_rows(x),
            feature_axes=feature_axes,
        )
        dx = found.dx if residual is None else (found.dx + dout[1]).astype(x.dtype)
        return _gradients(found._replace(dx=dx), len(weight), bias, residual)

    # --- TPU -------------------------------------------------------------------------------------

    def run_pallas(
        self, x: jax.Array, weight: jax.Array | None = None, *, cfg: NormConfig, **options: Any
    ) -> Output:
        from . import pallas_tpu

        rows = cfg.fwd.blocksize_m or pallas_tpu.default_rows(*_rows_of(x), backward=False)
        out, summed = pallas_tpu.forward(
            x, weight=weight, centered=self.centered, rows=rows, **options
        )
        return out if summed is None else (out, summed)

    def fwd_with_residuals_pallas(self, *args: Any, **options: Any) -> tuple[Output, None]:
        return self.run_pallas(*args, **options), None

    def vjp_pallas(
        self, _: None, out: Any, dout: Any, x: jax.Array, *weight: jax.Array, **options: Any
    ) -> tuple[Any, ...]:
        from . import pallas_tpu

        cfg: NormConfig = options.pop("cfg")
        rows = cfg.bwd.blocksize_m or pallas_tpu.default_rows(*_rows_of(x), backward=True)
        return self._pallas_vjp(pallas_tpu.backward, out, dout, x, weight, options, rows=rows)

    # --- GPU -------------------------------------------------------------------------------------

    def run_triton(
        self, x: jax.Array, weight: jax.Array | None = None, *, cfg: NormConfig, **options: Any
    ) -> Output:
        from . import pallas_gpu

        out, summed = pallas_gpu.forward(
            x,
            weight=weight,
            centered=self.centered,
            rows=cfg.fwd.blocksize_m or pallas_gpu.default_rows(*_rows_of(x), backward=False),
            num_warps=cfg.fwd.num_warps or pallas_gpu.default_warps(x.shape[-1]),
            **options,
        )
        return out if summed is None else (out, summed)

    def fwd_with_residuals_triton(self, *args: Any, **options: Any) -> tuple[Output, None]:
        return self.run_triton(*args, **options), None

    def vjp_triton(
        self, _: None, out: Any, dout: Any, x: jax.Array, *weight: jax.Array, **options: Any
    ) -> tuple[Any, ...]:
        from . import pallas_gpu

        cfg: NormConfig = options.pop("cfg")
        launch = {
            "rows": cfg.bwd.blocksize_m or pallas_gpu.default_rows(*_rows_of(x), backward=True),
            "num_warps": cfg.bwd.num_warps or pallas_gpu.default_warps(x.shape[-1]),
        }
        return self._pallas_vjp(pallas_gpu.backward, out, dout, x, weight, options, **launch)

    def _pallas_vjp(
        self,
        backward: Any,
        out: Any,
        dout: Any,
        x: jax.Array,
        weight: tuple[jax.Array, ...],
        options: dict[str, Any],
        **launch: int,
    ) -> tuple[Any, ...]:
        residual = options.pop("residual", None)
        summed, gradient, dsummed = (x, dout, None) if residual is None else (out[1], *dout)
        found = backward(
            summed,
            gradient,
            dsummed=dsummed,
            weight=_one(weight),
            centered=self.centered,
            **options,
            **launch,
        )
        return _gradients(found, len(weight), options.get("bias"), residual)

    # --- configs ---------------------------------------------------------------------------------

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> NormConfig:
        x = inv.args[0]
        rows = _default_rows(x) or _rows_of(x)[0]
        return NormConfig(bwd=BwdParams(blocksize_m=rows))

    def heuristic_cfg_pallas(self, inv: Invocation[Any, Any]) -> NormConfig:
        from . import pallas_tpu

        size = _rows_of(inv.args[0])
        return _config(*(pallas_tpu.default_rows(*size, backward=b) for b in (False, True)))

    def heuristic_cfg_triton(self, inv: Invocation[Any, Any]) -> NormConfig:
        from . import pallas_gpu

        size = _rows_of(inv.args[0])
        return _config(
            pallas_gpu.default_rows(*size, backward=False),
            pallas_gpu.default_rows(*size, backward=True),
            num_warps=pallas_gpu.default_warps(size[1]),
        )

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> list[NormConfig]:
        rows, features = _rows_of(inv.args[0])
        blocks = (2**17 // features, 2**19 // features, rows)
        return [
            NormConfig(bwd=BwdParams(blocksize_m=block))
            for block in dict.fromkeys(min(rows, max(8, block)) for block in blocks)
        ]

    def candidate_cfgs_pallas(self, inv: Invocation[Any, Any]) -> list[NormConfig]:
        rows, features = _rows_of(inv.args[0])
        sizes = (max(8, 2**power // features // 8 * 8) for power in (15, 16, 17, 18))
        blocks = dict.fromkeys(min(-(-rows // 8) * 8, size) for size in sizes)
        return [_config(block, block) for block in blocks]

    def candidate_cfgs_triton(self, inv: Invocation[Any, Any]) -> list[NormConfig]:
        default = self.heuristic_cfg_triton(inv)
        forward, backward = default.fwd.blocksize_m or 1, default.bwd.blocksize_m or 1
        return [
            _config(rows, at_a_time, num_warps=warps)
            for rows, at_a_time in dict.fromkeys(
                [(forward, backward), (2 * forward, 2 * backward), (1, max(1, backward // 2))]
            )
            for warps in (1, 2, 4, 8, 16)
            if warps * 32 <= max(32, inv.args[0].shape[-1])  # no thread without an element
        ]


def _config(forward: int, backward: int, num_warps: int | None = None) -> NormConfig:
    return NormConfig(
        FwdParams(blocksize_m=forward, num_warps=num_warps),
        BwdParams(blocksize_m=backward, num_warps=num_warps),
    )


def _default_rows(x: jax.Array) -> int | None:
    # Blocks help a cache that the array does not fit into; other devices have none of that kind.
    return xla.default_rows(*_rows_of(x)) if device_kind() == "cpu" else None


def _rows_of(x: jax.Array) -> tuple[int, int]:
    """Rows and features."""
    features = x.shape[-1]
    return x.size // features, features


def _one(weight: tuple[jax.Array, ...]) -> jax.Array | None:
    return weight[0] if weight else None


def _gradients(
    found: xla.Gradients, weights: int, bias: jax.Array | None, residual: jax.Array | None
) -> tuple[Any, ...]:
    """In the order that the framework asks for; a residual's gradient is that of the input."""
    by_keyword: dict[str, jax.Array | None] = {}
    if bias is not None:
        by_keyword["bias"] = found.dbias
    if residual is not None:
        by_keyword["residual"] = found.dx.astype(jnp.result_type(residual))
    return (found.dx, *(found.dweight,) * weights, by_keyword)
