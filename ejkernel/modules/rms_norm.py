"""`rms_norm`: root-mean-square normalisation with a fused gradient."""

from __future__ import annotations

from typing import Unpack, overload

from jax import Array

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.norm import NormConfig, RmsNorm
from ejkernel.kernels.norm.arguments import Options, checked

_kernel = RmsNorm()


@overload
def rms_norm(
    x: Array, weight: Array | None = None, *, residual: None = None, **options: Unpack[Options]
) -> Array: ...


@overload
def rms_norm(
    x: Array, weight: Array | None = None, *, residual: Array, **options: Unpack[Options]
) -> tuple[Array, Array]: ...


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    implementation: str | None = None,
    cfg: NormConfig | None = None,
) -> Array | tuple[Array, Array]:
    r"""`x / sqrt(mean(x²) + eps) · (weight + weight_offset)`, over the last axis.

    Differentiable in `x`, `weight` and `residual`. Computed in float32 whatever the input's dtype
    (in float64 for float64), and rounded once.

    Args:
      x: `(..., features)`.
      weight: `(features,)`, of any floating dtype; without it nothing is multiplied.
      eps: added to the mean square.
      weight_offset: added to the weight; 1.0 for weights stored around zero, as Gemma's are.
      residual: like `x`. Then `x + residual` is normalised, and that sum is returned too: the
        residual stream of a transformer.
      implementation: `"xla"`, `"pallas"` (TPU) or `"triton"` (GPU); by default the first that
        supports the call on this device.
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

    Returns:
      The output, like `x`; with `residual` the pair of it and `x + residual`.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[3.0, 4.0], [0.0, 1.0]])
    >>> rms_norm(x, jnp.ones(2)).shape
    (2, 2)
    >>> out, stream = rms_norm(x, jnp.zeros(2), weight_offset=1.0, residual=x)
    >>> stream.tolist()
    [[6.0, 8.0], [0.0, 2.0]]
    """
    arrays, options = checked(
        "rms_norm", x, weight, eps=eps, weight_offset=weight_offset, residual=residual
    )
    return _kernel(*arrays, **options, **given_options("rms_norm", implementation, cfg))
