"""How arrays are cut into blocks and laid out as rows of a tile.

Everything here and in the passes is written with `jax.lax`, not `jax.numpy`: an operator of
`jax.numpy` is a jitted function of its own, and dozens of them made tracing an attention three
times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax

from ...slicing import put_in_dim, take_in_dim
from ..scalars import Index, int32, times

State = TypeVar("State")


def to_rows(x: jax.Array, group: int) -> jax.Array:
    """`(batch, length, heads, d)` to `(batch, heads / group, length * group, d)`.

    The query heads that share a key head become extra rows, so keys are never repeated: row `r` is
    query `r // group` of the `r % group`-th of those heads. It is its own inverse: `from_rows`.
    """
    batch, length, heads, features = x.shape
    if group == 1:
        return lax.transpose(x, (0, 2, 1, 3))
    x = lax.reshape(x, (batch, length, heads // group, group, features))
    x = lax.transpose(x, (0, 2, 1, 3, 4))
    return lax.reshape(x, (batch, heads // group, length * group, features))


from_rows = to_rows


def as_row(x: jax.Array, group: int) -> jax.Array:
    """`(batch, heads, length)`, a number for every row of a tile, to `(batch, heads / group, 1,
    length * group)`."""
    if group == 1:
        return lax.expand_dims(x, (2,))
    batch, heads, length = x.shape
    x = lax.reshape(x, (batch, heads // group, group, length))
    return lax.reshape(lax.transpose(x, (0, 1, 3, 2)), (batch, heads // group, 1, length * group))


def from_row(x: jax.Array, group: int, length: int) -> jax.Array:
    """The inverse of `as_row`, of which only the first `length` positions are wanted."""
    batch, kv_heads, _, rows = x.shape
    if group == 1:
        x = lax.squeeze(x, (2,))
    else:
        x = lax.reshape(x, (batch, kv_heads, rows // group, group))
        x = lax.reshape(lax.transpose(x, (0, 1, 3, 2)), (batch, kv_heads * group, rows // group))
    return x if x.shape[2] == length else lax.slice_in_dim(x, 0, length, axis=2)


def block(x: jax.Array, index: Index, size: int, axis: int) -> jax.Array:
    """The `index`-th block of `size` along an axis; the array itself if it is all of it."""
    return x if size == x.shape[axis] else span(x, times(index, size), size, axis)


def span(x: jax.Array, start: Index, size: int, axis: int) -> jax.Array:
    """`size` entries along an axis; the array itself if it is all of it."""
    if size == x.shape[axis]:
        return x
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=axis)
    return take_in_dim(x, start, size, axis)


def set_span(x: jax.Array, start: Index, new: jax.Array, axis: int) -> jax.Array:
    """The array with other entries along an axis from `start` on."""
    new = lax.convert_element_type(new, x.dtype)
    return new if new.shape == x.shape else put_in_dim(x, new, start, axis)


def pad(x: jax.Array, length: int, axis: int, value: float = 0.0) -> jax.Array:
    """The array with `value` appended along an axis up to a length."""
    missing = length - x.shape[axis]
    if not missing:
        return x
    config = [(0, missing if i == axis % x.ndim else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, lax.convert_element_type(value, x.dtype), config)


def filled(like: jax.Array, features: int, value: float, dtype: Any) -> jax.Array:
    """A constant array with another last dimension; made of `like` to be sharded as it is."""
    if features == like.shape[-1]:
        return lax.full_like(like, value, dtype)
    one = lax.full_like(lax.slice_in_dim(like, 0, 1, axis=like.ndim - 1), value, dtype)
    return (
        one
        if features == 1
        else lax.broadcast_in_dim(one, (*like.shape[:-1], features), tuple(range(like.ndim)))
    )


def product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """The matrix products of two `(batch, heads, ., .)` arrays, summed over one axis of each."""
    dimensions = (((a_axis,), (b_axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dimensions, preferred_element_type=a.dtype)


def loop(begin: Index, end: Index, body: Callable[[Index, State], State], state: State) -> State:
    """`fori_loop`, except that a loop known to be empty leaves no trace in the program.

    When a loop has at most one step, XLA recognises its work as independent of the loop counter and
    moves it in front of the loop, where it is done even if the loop turns out to be empty. So
    bounds are kept static where there is a single block, and a single step needs no loop.
    """
    if isinstance(begin, int) and isinstance(end, int):
        if begin >= end:
            return state
        if begin + 1 == end:
            return body(begin, state)

    def step(carry: tuple[jax.Array, jax.Array, State]) -> tuple[jax.Array, jax.Array, State]:
        index, end, state = carry
        return lax.add(index, np.int32(1)), end, body(index, state)

    start = (int32(begin), int32(end), state)
    return lax.while_loop(lambda carry: lax.lt(carry[0], carry[1]), step, start)[2]


def counting(size: int) -> jax.Array:
    """`0 … size - 1` as int32, whatever JAX's default is."""
    return lax.iota(np.int32, size)
