"""The gated linear unit written the obvious way."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype
from .activations import gated


def gated_linear_unit_reference(
    x: jax.Array,
    *weights: jax.Array,
    activation: str,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    recompute: bool = False,
) -> jax.Array:
    r"""Two projections, of which one gates the other.

    .. math::
        \mathrm{out} = f(x W_\mathrm{gate} + b_\mathrm{gate}) \odot
            (x W_\mathrm{up} + b_\mathrm{up})

    Arguments are those of :class:`.kernel.GatedLinearUnit`. ``precision`` and ``recompute`` are not
    used: this is as exact as float32 (or float64) is, and JAX differentiates it.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.array([[1.0]]), jnp.array([[2.0]])
        >>> gated_linear_unit_reference(x, w, 3 * w, activation="relu").tolist()
        [[12.0]]
    """
    del precision, recompute
    if len(weights) == 1:
        weights = tuple(jnp.split(weights[0].reshape(weights[0].shape[0], -1), 2, axis=1))
    w_gate, w_up = weights
    wide = accumulation_dtype(x.dtype)

    def project(w: jax.Array, bias: jax.Array | None) -> jax.Array:
        product = jnp.dot(x.astype(wide), w.astype(wide), precision=jax.lax.Precision.HIGHEST)
        if bias is None:
            return product
        return product + jnp.expand_dims(bias.astype(wide), tuple(range(product.ndim - 1)))

    return gated(activation, project(w_gate, b_gate), project(w_up, b_up)).astype(x.dtype)
