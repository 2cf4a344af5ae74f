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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_Start = int | jax.Array


def take_in_dim(x: jax.Array, start: _Start, size: int, axis: int = 0) -> jax.Array:
    """`size` entries along an axis, from `start` on."""
    sizes = list(x.shape)
    sizes[axis] = size
    return _moved(partial(_take, tuple(sizes)), (x,), *_starts(x, start, axis))


def take_rows(x: jax.Array, indices: jax.Array) -> jax.Array:
    """The entries of the first axis with these indices, which the caller has made sure exist."""
    return _moved(_rows, (x,), indices)


def put_in_dim(x: jax.Array, part: jax.Array, start: _Start, axis: int = 0) -> jax.Array:
    """The array with another part along an axis, from `start` on."""
    return put(x, part, _starts(x, start, axis))


def put(x: jax.Array, part: jax.Array, starts: Sequence[_Start]) -> jax.Array:
    """The array with another part that begins at `starts`."""
    return _moved(_put, (x, part), *_of_one_dtype(starts))


def _take(sizes: tuple[int, ...], x: jax.Array, *starts: _Start) -> jax.Array:
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def _put(x: jax.Array, part: jax.Array, *starts: _Start) -> jax.Array:
    return lax.dynamic_update_slice(x, part, starts, allow_negative_indices=False)


def _rows(x: jax.Array, indices: jax.Array) -> jax.Array:
    return x.at[indices].get(mode="promise_in_bounds")


def _moved(move: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], *at: Any) -> jax.Array:
    """`move(*arrays, *at)`, of bfloat16 by its bits."""
    by_bits = arrays[0].dtype == jnp.bfloat16
    return _moved_by_bits(move, arrays, *at) if by_bits else move(*arrays, *at)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _moved_by_bits(
    move: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], *at: Any
) -> jax.Array:
    bits = [lax.bitcast_convert_type(array, jnp.uint16) for array in arrays]
    return lax.bitcast_convert_type(move(*bits, *at), arrays[0].dtype)


@_moved_by_bits.defjvp
def _(move: Callable[..., jax.Array], primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _moved_by_bits(move, *primals), move(*tangents[0], *primals[1:])


def _starts(x: jax.Array, start: _Start, axis: int) -> list[Any]:
    """Where a part begins; all starts have to be of one dtype."""
    zero = 0 if isinstance(start, int) else np.zeros((), start.dtype)
    return [start if i == axis % x.ndim else zero for i in range(x.ndim)]


def _of_one_dtype(starts: Sequence[_Start]) -> list[Any]:
    """The starts with Python's integers in the dtype of the others: JAX's own may be wider."""
    dtype = next((start.dtype for start in starts if not isinstance(start, int)), np.int32)
    return [np.asarray(start, dtype) if isinstance(start, int) else start for start in starts]
