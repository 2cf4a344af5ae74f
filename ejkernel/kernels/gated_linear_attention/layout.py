"""Arrays of users, `(batch, length, heads, features)`, in the layouts of the implementations.

A *row* is one pair of a batch entry and a head: every row is a recurrence of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.ops.core.varying import vary_alike

from ..dtypes import accumulation_dtype


def rows_first(x: jax.Array, length: int) -> jax.Array:
    """``(rows, length, features)``, with zeros appended to `length`.

    A token of zeros adds nothing to the state, lets nothing decay, and reads nothing.
    """
    if x.ndim == 3:
        x = x[..., None]
    batch, given, heads, features = x.shape
    x = x.swapaxes(1, 2).reshape(batch * heads, given, features)
    return jnp.pad(x, ((0, 0), (0, length - given), (0, 0)))


def time_first(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``(length, rows, features)`` in another dtype."""
    if x.ndim == 3:
        x = x[..., None]
    batch, length, heads, features = x.shape
    return x.astype(dtype).swapaxes(0, 1).reshape(length, batch * heads, features)


def chunks_first(x: jax.Array, dtype: DTypeLike, size: int) -> jax.Array:
    """``(chunks, rows, size, features)`` likewise, with zeros appended to whole chunks."""
    chunks = -(-x.shape[1] // size)
    x = rows_first(x.astype(dtype), chunks * size)
    return x.reshape(x.shape[0], chunks, size, x.shape[2]).swapaxes(0, 1)


def from_rows_first(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of :func:`rows_first`, in the shape (but for features) and dtype of `like`."""
    batch, length, heads = like.shape[:3]
    x = x[:, :length].reshape(batch, heads, length, x.shape[2]).swapaxes(1, 2)
    return _as(x, like)


def from_time_first(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of :func:`time_first`, likewise."""
    batch, length, heads = like.shape[:3]
    return _as(x.reshape(length, batch, heads, x.shape[2]).swapaxes(0, 1), like)


def from_chunks_first(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of :func:`chunks_first`, likewise."""
    chunks, rows, size, features = x.shape
    return from_rows_first(x.swapaxes(0, 1).reshape(rows, chunks * size, features), like)


def state_rows(q: jax.Array, v: jax.Array, state: jax.Array | None) -> jax.Array:
    """A state ``(batch, heads, key_dim, value_dim)`` as ``(rows, …)``; zeros if there is none.

    In float32, or in float64 for float64.
    """
    batch, _, heads, key_dim = q.shape
    dtype = accumulation_dtype(q.dtype)
    if state is None:
        # Made from an input, to inherit how it is sharded.
        row = jnp.zeros_like(q[:, 0, :, :1, None], dtype)
        state = vary_alike(jnp.broadcast_to(row, (batch, heads, key_dim, v.shape[3])), q, v)
    return state.astype(dtype).reshape(batch * heads, key_dim, v.shape[3])


def state_by_batch(state: jax.Array, q: jax.Array) -> jax.Array:
    """The inverse of :func:`state_rows`."""
    return state.reshape(q.shape[0], q.shape[2], *state.shape[1:])


def _as(x: jax.Array, like: jax.Array) -> jax.Array:
    return (x[..., 0] if like.ndim == 3 else x).astype(like.dtype)
