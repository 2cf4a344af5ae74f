"""The product of two matrices, whichever way round they are stored."""

from __future__ import annotations

import jax
from jax import lax

from .dtypes import accumulation_dtype


def dot(
    left: jax.Array,
    right: jax.Array,
    summed: tuple[int, int],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Summed over one axis of each side; nothing is transposed in memory for it.

    The result is of `dtype`, by default float32 (float64 for float64).

    >>> import jax.numpy as jnp
    >>> dot(jnp.ones((2, 3)), jnp.ones((4, 3)), (1, 1)).shape
    (2, 4)
    """
    dtype = accumulation_dtype(left.dtype) if dtype is None else dtype
    axes = (((summed[0],), (summed[1],)), ((), ()))
    return lax.dot_general(left, right, axes, precision=precision, preferred_element_type=dtype)
