"""Arrays of users, `(batch, length, heads, features)`, in the layouts of the implementations.

A *row* is one pair of a batch entry and a head: every row is a recurrence of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.ops.core.varying import vary_alike

from ..dtypes import accumulation_dtype
from .arguments import Arguments


def in_steps(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``(length, rows, features)`` in another dtype."""
    x = x if x.ndim == 4 else x[..., None]
    batch, length, heads, features = x.shape
    return x.astype(dtype).swapaxes(0, 1).reshape(length, batch * heads, features)


def from_steps(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of :func:`in_steps`, in the shape (but for features) and dtype of `like`."""
    batch, length, heads = like.shape[:3]
    return _like(x.reshape(length, batch, heads, x.shape[2]).swapaxes(0, 1), like)


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """``(rows, chunks, size, features)``, with zeros appended to whole chunks.

    A token of zeros adds nothing to the state, lets nothing decay, and reads nothing.
    """
    x = x if x.ndim == 4 else x[..., None]
    batch, length, heads, features = x.shape
    chunks = -(-length // size)
    x = x.swapaxes(1, 2).reshape(batch * heads, length, features)
    x = jnp.pad(x, ((0, 0), (0, chunks * size - length), (0, 0)))
    return x.reshape(batch * heads, chunks, size, features)


def from_chunks(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of :func:`in_chunks`, in the shape (but for features) and dtype of `like`."""
    batch, length, heads = like.shape[:3]
    x = x.reshape(x.shape[0], -1, x.shape[3])[:, :length]
    return _like(x.reshape(batch, heads, length, x.shape[2]).swapaxes(1, 2), like)


def state_rows(call: Arguments, state: jax.Array | None) -> jax.Array:
    """A state ``(batch, heads, key_dim, value_dim)`` as ``(rows, …)``; zeros if there is none.

    In float32, or in float64 for float64.
    """
    q, v = call.q, call.v
    batch, _, heads, key_dim = q.shape
    dtype = accumulation_dtype(q.dtype)
    if state is None:
        # Made from an input, to inherit how it is sharded.
        row = jnp.zeros_like(q[:, 0, :, :1, None], dtype)
        state = vary_alike(jnp.broadcast_to(row, (batch, heads, key_dim, v.shape[3])), q, v)
    return state.astype(dtype).reshape(batch * heads, key_dim, v.shape[3])


def state_by_batch(call: Arguments, state: jax.Array) -> jax.Array:
    """The inverse of :func:`state_rows`."""
    return state.reshape(call.q.shape[0], call.q.shape[2], *state.shape[1:])


def _like(x: jax.Array, like: jax.Array) -> jax.Array:
    return (x[..., 0] if like.ndim == 3 else x).astype(like.dtype)
