"""`layer_norm`: normalisation to mean 0 and variance 1 with a fused gradient."""

from __future__ import annotations

from typing import Unpack, overload

from jax import Array

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.norm import LayerNorm, NormConfig
from ejkernel.kernels.norm.arguments import Options, checked

_kernel = LayerNorm()


@overload
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: None = None,
    **options: Unpack[Options],
) -> Array: ...


@overload
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array,
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    implementation: str | None = None,
    cfg: NormConfig | None = None,
) -> Array | tuple[Array, Array]:
    r"""`(x - mean(x)) / sqrt(var(x) + eps) · (weight + weight_offset) + bias`, over the last axis.

    Differentiable in `x`, `weight`, `bias` and `residual`. Computed in float32 whatever the input's
    dtype (in float64 for float64), and rounded once.

    Args:
      x: `(..., features)`.
      weight: `(features,)`, of any floating dtype; without it nothing is multiplied.
      bias: `(features,)`, of any floating dtype; without it nothing is added.
      eps: added to the variance.
      weight_offset: added to the weight; 1.0 for weights stored around zero.
      residual: like `x`. Then `x + residual` is normalised, and that sum is returned too.
      implementation: `"xla"`, `"pallas"` (TPU) or `"triton"` (GPU); by default the first that
        supports the call on this device.
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

    Returns:
      The output, like `x`; with `residual` the pair of it and `x + residual`.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, 3.0], [5.0, 9.0]])
    >>> layer_norm(x, eps=0.0).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    >>> layer_norm(x, jnp.ones(2), jnp.ones(2), eps=0.0).tolist()
    [[0.0, 2.0], [0.0, 2.0]]
    """
    arrays, options = checked(
        "layer_norm", x, weight, bias=bias, eps=eps, weight_offset=weight_offset, residual=residual
    )
    return _kernel(*arrays, **options, **given_options("layer_norm", implementation, cfg))
