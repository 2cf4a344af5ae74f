"""Lengths, page tables and ids of any integer dtype, as the int32 that kernels compute with.

A constant that is compared with an array of 8 or 16 bits would take the array's dtype and wrap, and
so would a large number that becomes an int32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def to_int32(x: Any, low: int, high: int) -> Any:
    """The numbers as int32; those below `low` or above `high` become that, unless they are int32.

    >>> import numpy as np
    >>> to_int32(np.array([3, 200], np.uint8), 0, 1000).tolist()
    [3, 200]
    >>> to_int32(np.array([-1, 2**40]), 0, 1000).tolist()
    [0, 1000]
    """
    if isinstance(x, np.ndarray):
        return x if x.dtype == np.int32 else np.clip(x, low, high).astype(np.int32)
    if x.dtype == jnp.int32:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.int32)
    limits = jnp.iinfo(x.dtype)  # type: ignore[no-untyped-call]
    bounds = [np.asarray(min(max(b, limits.min), limits.max), x.dtype) for b in (low, high)]
    return lax.convert_element_type(lax.clamp(bounds[0], x, bounds[1]), np.int32)


def ids_to_int32(ids: Any, others: Any = None) -> tuple[Any, Any]:
    """Ids of two `(batch, length)` arrays as int32: equal where they were, in the same order.

    `others` may be None. Ids that may not fit become their rank among all of an example.

    >>> import numpy as np
    >>> ids_to_int32(np.array([[0, 2**32, 7]]))[0].tolist()
    [[0, 2, 1]]
    """
    given = [x for x in (ids, others) if x is not None]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in given):
        found: list[Any] = [x.update(dtype=jnp.int32) for x in given]
        return found[0], None if others is None else found[1]
    if all(_fits(x) for x in given):
        found = [x if x.dtype == np.int32 else x.astype(np.int32) for x in given]
    elif all(isinstance(x, np.ndarray) for x in given):
        ranks = np.unique(np.concatenate(given, axis=1), return_inverse=True)[1]
        ranks = ranks.reshape(len(given[0]), -1).astype(np.int32)
        found = np.split(ranks, [given[0].shape[1]], axis=1)
    else:
        found = _ranks([jnp.asarray(x) for x in given])
    return found[0], None if others is None else found[1]


def _fits(x: Any) -> bool:
    limits = jnp.iinfo(x.dtype)  # type: ignore[no-untyped-call]
    return bool(limits.min >= -(2**31) and limits.max < 2**31)


def _ranks(arrays: list[jax.Array]) -> list[jax.Array]:
    words = [_words(x) for x in arrays]
    high, low = (jnp.concatenate(parts, axis=1) for parts in zip(*words, strict=True))
    place = lax.broadcasted_iota(np.int32, high.shape, 1)
    high, low, place = lax.sort((high, low, place), dimension=1, num_keys=2)
    differs = (high[:, 1:] != high[:, :-1]) | (low[:, 1:] != low[:, :-1])
    rank = jnp.pad(jnp.cumsum(differs, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    _, rank = lax.sort((place, rank), dimension=1, num_keys=1)
    return jnp.split(rank, [arrays[0].shape[1]], axis=1)


def _words(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper 32 bits of each number, and the lower ones."""
    if x.dtype.itemsize == 8:
        high = lax.shift_right_arithmetic(x, np.asarray(32, x.dtype)).astype(jnp.int32)
    else:
        high = lax.neg(lax.lt(x, lax.full_like(x, 0)).astype(jnp.int32))
    return high, x.astype(jnp.uint32)
