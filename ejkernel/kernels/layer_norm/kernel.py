"""Layer norm as a kernel; the implementations are in `kernels/norm`."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from ejkernel.kernels.norm import NormKernel

from .reference import layer_norm_reference


class LayerNorm(NormKernel):
    """`(x - mean) / sqrt(var + eps) · weight + bias`. Use `ejkernel.modules.layer_norm`.

    Arguments are `x` and optionally `weight`; keywords `eps`, `bias`, `residual` and
    `weight_offset`.
    """

    centered: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(name="layer_norm")

    def reference(self, x: jax.Array, weight: jax.Array | None = None, **options: Any) -> Any:
        return layer_norm_reference(x, weight=weight, **options)
