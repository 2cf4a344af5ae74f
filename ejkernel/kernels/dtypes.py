"""The dtype of sums."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Float32, or float64 for float64.

    Unlike `jax.numpy.promote_types` it answers with `numpy_dtype_promotion="strict"` too.

    >>> accumulation_dtype(jnp.bfloat16)
    dtype('float32')
    """
    given = jnp.dtype(dtype)
    return given if given.itemsize > 4 else jnp.dtype(jnp.float32)
