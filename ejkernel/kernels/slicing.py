"""Blocks of arrays in loops: taken out, and put back.

XLA's CPU compiler of JAX 0.10 and 0.11 has no slices of bfloat16: inside a loop it converts the
whole array to float32 for every block that is taken, and back for every block that is put, which
made a loop over 64 blocks ten times slower than the same loop over float32. So blocks of bfloat16
are moved as the bits that they are. Nothing is computed with bits, and derivatives pass as through
any other slice.

Example:
    >>> import jax.numpy as jnp
    >>> x = jnp.arange(6, dtype=jnp.bfloat16)
    >>> put_in_dim(x, 10 * take_in_dim(x, 2, 2), 4).tolist()
    [0.0, 1.0, 2.0, 3.0, 20.0, 30.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_Start = int | jax.Array


def take_in_dim(x: jax.Array, start: _Start, size: int, axis: int = 0) -> jax.Array:
    """`size` entries along an axis, from `start` on."""
    starts = [_zero(start)] * x.ndim
    starts[axis] = start
    sizes = list(x.shape)
    sizes[axis] = size
    if x.dtype == jnp.bfloat16:
        return _take_bits(tuple(sizes), x, *starts)
    return _take(x, starts, sizes)


def take_rows(x: jax.Array, indices: jax.Array) -> jax.Array:
    """The entries of the first axis with these indices, which the caller has made sure exist."""
    return _rows_by_bits(x, indices) if x.dtype == jnp.bfloat16 else _rows(x, indices)


def put_in_dim(x: jax.Array, part: jax.Array, start: _Start, axis: int = 0) -> jax.Array:
    """The array with another part along an axis, from `start` on."""
    starts = [_zero(start)] * x.ndim
    starts[axis] = start
    return put(x, part, starts)


def put(x: jax.Array, part: jax.Array, starts: Sequence[_Start]) -> jax.Array:
    """The array with another part that begins at `starts`."""
    starts = _of_one_dtype(starts)
    if x.dtype == jnp.bfloat16:
        return _put_bits(x, part, *starts)
    return _put(x, part, starts)


def _take(x: jax.Array, starts: Sequence[_Start], sizes: Sequence[int]) -> jax.Array:
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def _put(x: jax.Array, part: jax.Array, starts: Sequence[_Start]) -> jax.Array:
    return lax.dynamic_update_slice(x, part, starts, allow_negative_indices=False)


def _rows(x: jax.Array, indices: jax.Array) -> jax.Array:
    return x.at[indices].get(mode="promise_in_bounds")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _take_bits(sizes: tuple[int, ...], x: jax.Array, *starts: _Start) -> jax.Array:
    return _from_bits(_take(_to_bits(x), starts, sizes), x.dtype)


@_take_bits.defjvp
def _(sizes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _take_bits(sizes, *primals), _take(tangents[0], primals[1:], sizes)


@jax.custom_jvp
def _rows_by_bits(x: jax.Array, indices: jax.Array) -> jax.Array:
    return _from_bits(_rows(_to_bits(x), indices), x.dtype)


@_rows_by_bits.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _rows_by_bits(*primals), _rows(tangents[0], primals[1])


@jax.custom_jvp
def _put_bits(x: jax.Array, part: jax.Array, *starts: _Start) -> jax.Array:
    return _from_bits(_put(_to_bits(x), _to_bits(part), starts), x.dtype)


@_put_bits.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _put_bits(*primals), _put(tangents[0], tangents[1], primals[2:])


def _to_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16)


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)


def _zero(like: _Start) -> Any:
    """All starts have to be of one dtype."""
    return 0 if isinstance(like, int) else np.zeros((), like.dtype)


def _of_one_dtype(starts: Sequence[_Start]) -> list[Any]:
    """The starts with Python's integers in the dtype of the others: JAX's own may be wider."""
    dtype = next((start.dtype for start in starts if not isinstance(start, int)), np.int32)
    return [np.asarray(start, dtype) if isinstance(start, int) else start for start in starts]
