"""RMS norm and layer norm as kernels."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import ModuleType
from typing import Any

import jax

from ejkernel.ops import Dimension, Implementation, Invocation, Kernel, NearShapes, Partitioning
from ejkernel.ops.core.work import Work, traffic

from . import pallas_gpu, pallas_tpu, xla
from .arguments import Arguments, Output
from .pallas import SUPPORTS
from .pallas_gpu import NormGpuConfig
from .pallas_tpu import NormTpuConfig
from .reference import layer_norm_reference, rms_norm_reference
from .xla import NormXlaConfig


def _implementation(
    rows: ModuleType, *, centered: bool, **declared: Any
) -> Implementation[Any, Output]:
    """One implementation, around what its module does with the rows of a call.

    `normalise(call, cfg)` gives the output, and the moments of the rows if the backward pass shall
    not compute them again. `differentiate(call, moments, cotangents, cfg)`, where `call.x` is what
    was normalised and `cotangents` are those of the output and of that sum, gives the gradients of
    `x`, weight and bias: None for what the call does not have.
    """

    def forward_with_residuals(*args: jax.Array, cfg: Any, **options: Any) -> tuple[Output, Any]:
        out, moments = rows.normalise(Arguments(*args, centered=centered, **options), cfg)
        return out, (out[1] if isinstance(out, tuple) else None, moments)

    def forward(*args: jax.Array, cfg: Any, **options: Any) -> Output:
        return forward_with_residuals(*args, cfg=cfg, **options)[0]

    def backward(
        saved: Any, out: None, dout: Any, *args: jax.Array, cfg: Any, **options: Any
    ) -> tuple[Any, ...]:
        summed, moments = saved
        call, cotangents = Arguments(*args, centered=centered, **options), (dout, None)
        if summed is not None:
            call, cotangents = dataclasses.replace(call, x=summed), dout
        dx, dweight, dbias = rows.differentiate(call, moments, cotangents, cfg)
        named = {"bias": dbias, "residual": dx}
        by_keyword = {name: g for name, g in named.items() if options.get(name) is not None}
        return (dx, *(dweight,) * (len(args) - 1), by_keyword)

    return Implementation(
        forward=forward,
        forward_with_residuals=forward_with_residuals,
        backward=backward,
        reads_out=False,
        **declared,
    )


def _implementations(*, centered: bool) -> tuple[Implementation[Any, Output], ...]:
    """Those of layer norm if the values are centered, else of RMS norm."""
    of = partial(_implementation, centered=centered)
    return (
        of(pallas_tpu, name="pallas", devices=("tpu",), config=NormTpuConfig, supports=SUPPORTS),
        of(pallas_gpu, name="triton", devices=("gpu",), config=NormGpuConfig, supports=SUPPORTS),
        of(xla, name="xla", config=NormXlaConfig),
    )


class _Norm(Kernel[Any, Output]):
    """What both kernels share."""

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

    def work(self, inv: Invocation[Any, Any]) -> Work:
        """Bytes alone: a norm waits for memory, not for its few operations per element."""
        x = inv.args[0]
        outputs = (x,) if inv.kwargs.get("residual") is None else (x, x)
        return Work(bytes=traffic(inv, *outputs))


class RmsNorm(_Norm):
    """`x / sqrt(mean(x²) + eps) · weight`. Use `ejkernel.modules.rms_norm`, which checks its input.

    Arguments are `x` and optionally `weight`; keywords `eps`, `residual` and `weight_offset`.
    """

    implementations = _implementations(centered=False)
    reference = staticmethod(rms_norm_reference)

    def default_keywords(self, *args: Any) -> dict[str, Any]:
        return {"eps": 1e-6}


class LayerNorm(_Norm):
    """`(x - mean) / sqrt(var + eps) · weight + bias`. Use `ejkernel.modules.layer_norm`.

    Arguments are `x` and optionally `weight`; keywords `eps`, `bias`, `residual` and
    `weight_offset`.
    """

    implementations = _implementations(centered=True)
    reference = staticmethod(layer_norm_reference)

    def default_keywords(self, *args: Any) -> dict[str, Any]:
        return {"eps": 1e-5}
