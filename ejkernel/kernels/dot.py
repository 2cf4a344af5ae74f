"""The product of two matrices, whichever way round they are stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def dot(
    left: jax.Array,
    right: jax.Array,
    summed: tuple[int, int],
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Summed over one axis of each side, in `dtype`; nothing is transposed in memory for it.

    >>> dot(jnp.ones((2, 3)), jnp.ones((4, 3)), (1, 1)).shape
    (2, 4)
    """
    axes = (((summed[0],), (summed[1],)), ((), ()))
    return lax.dot_general(left, right, axes, precision=precision, preferred_element_type=dtype)
