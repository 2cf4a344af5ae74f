"""RMS norm as a kernel; the implementations are in `kernels/norm`."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from ejkernel.kernels.norm import NormKernel

from .reference import rms_norm_reference


class RmsNorm(NormKernel):
    """`x / sqrt(mean(x²) + eps) · weight`. Use `ejkernel.modules.rms_norm`, which checks its input.

    Arguments are `x` and optionally `weight`; keywords `eps`, `residual` and `weight_offset`.
    """

    centered: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__(name="rms_norm")

    def reference(self, x: jax.Array, weight: jax.Array | None = None, **options: Any) -> Any:
        return rms_norm_reference(x, weight=weight, **options)
