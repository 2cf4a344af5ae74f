"""The gated linear unit as users of JAX write it: what the tuner shows the gain over."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .reference import ACTIVATIONS


def two_projections(
    x: jax.Array,
    *weights: jax.Array,
    activation: str,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    recompute: bool = False,
) -> jax.Array:
    """`activation(x @ w_gate + b_gate) * (x @ w_up + b_up)` in the dtype of `x`.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.array([[1.0]]), jnp.array([[2.0]])
    >>> two_projections(x, w, 3 * w, activation="relu").tolist()
    [[12.0]]
    """
    del recompute
    if len(weights) == 1:
        weights = tuple(jnp.split(weights[0].reshape(weights[0].shape[0], -1), 2, axis=1))
    gate, up = (jnp.dot(x, w, precision=precision) for w in weights)
    gate, up = (
        y if b is None else y + jnp.expand_dims(b, tuple(range(y.ndim - 1)))
        for y, b in ((gate, b_gate), (up, b_up))
    )
    return (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
