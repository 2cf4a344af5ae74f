"""RMS norm and layer norm as kernels."""

from __future__ import annotations

from typing import Any

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning

from . import pallas_gpu, pallas_tpu, xla
from .reference import Output, layer_norm_reference, rms_norm_reference


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


class RmsNorm(_Norm):
    """`x / sqrt(mean(x²) + eps) · weight`. Use `ejkernel.modules.rms_norm`, which checks its input.

    Arguments are `x` and optionally `weight`; keywords `eps`, `residual` and `weight_offset`.
    """

    implementations = tuple(m.implementation(centered=False) for m in (pallas_tpu, pallas_gpu, xla))
    reference = staticmethod(rms_norm_reference)

    def default_keywords(self, *args: Any) -> dict[str, Any]:
        return {"eps": 1e-6}


class LayerNorm(_Norm):
    """`(x - mean) / sqrt(var + eps) · weight + bias`. Use `ejkernel.modules.layer_norm`.

    Arguments are `x` and optionally `weight`; keywords `eps`, `bias`, `residual` and
    `weight_offset`.
    """

    implementations = tuple(m.implementation(centered=True) for m in (pallas_tpu, pallas_gpu, xla))
    reference = staticmethod(layer_norm_reference)

    def default_keywords(self, *args: Any) -> dict[str, Any]:
        return {"eps": 1e-5}
