"""Gated linear attention in plain JAX, for any device: step by step, or chunk by chunk.

``chunk_size`` decides: 1 takes the recurrence of :mod:`.steps`, which is the fastest on a CPU; more
takes the products of :mod:`.chunk`, for devices with matrix units. The directions may choose
differently, since the backward pass needs nothing but the inputs: it makes the states again.

Arrays are ``(batch, length, heads, features)``; ``g`` may be ``(batch, length, heads)``. Arithmetic
is in float32, or in float64 for float64.

Example:
    >>> import jax.numpy as jnp
    >>> q = k = jnp.ones((1, 100, 2, 8))
    >>> v, g = jnp.ones((1, 100, 2, 16)), jnp.full((1, 100, 2, 8), -0.1)
    >>> out, state = forward(q, k, v, g, None, scale=1.0, chunk_size=32, rows=2)
    >>> out.shape, state.shape
    ((1, 100, 2, 16), (1, 2, 8, 16))
    >>> gradients = backward(q, k, v, g, None, out, None, scale=1.0, chunk_size=1, rows=2)
    >>> gradients.g.shape == g.shape and gradients.state.shape == state.shape
    True
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import layout, steps
from .chunk import Chunk


class Gradients(NamedTuple):
    """Gradients of the inputs of :func:`forward`, each with the shape and dtype of its input."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array | None
    state: jax.Array


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    initial_state: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
    rows: int,
    segments: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The outputs, in the dtype of ``q``, and the last state, in that of the arithmetic.

    Args:
        q: Queries, ``(batch, length, heads, key_dim)``.
        k: Keys, of the same shape.
        v: Values, ``(batch, length, heads, value_dim)``.
        g: Logarithms of decays, of the shape of ``k`` or ``(batch, length, heads)``, or None.
        initial_state: ``(batch, heads, key_dim, value_dim)``, or None for zeros.
        scale: Factor on the outputs.
        chunk_size: Tokens in a chunk, a power of two; 1: step by step.
        rows: At most so many pairs of a batch entry and a head at a time, if step by step.
        segments: Whether ``g`` has starts of segments in it.
    """
    state = layout.state_rows(q, v, initial_state)
    dtype = state.dtype
    if chunk_size == 1:
        tokens = (
            scale * layout.time_first(q, dtype),
            *_each(layout.time_first, k, v, g, dtype=dtype),
        )
        out, state = _in_groups(partial(steps.forward, segments=segments), tokens, (state,), rows)
        return layout.from_time_first(out, q), layout.state_by_batch(state, q)

    chunk = Chunk(chunk_size, dtype=dtype)

    def step(state: jax.Array, tokens: Any) -> tuple[jax.Array, jax.Array]:
        after, out = jax.vmap(chunk.forward)(state, *tokens)
        return after, out

    tokens = (
        scale * layout.chunks_first(q, dtype, chunk_size),
        *_each(layout.chunks_first, k, v, g, dtype=dtype, size=chunk_size),
    )
    state, out = lax.scan(step, state.swapaxes(1, 2), tokens)
    return layout.from_chunks_first(out, q), layout.state_by_batch(state.swapaxes(1, 2), q)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    initial_state: jax.Array | None,
    dout: jax.Array,
    dstate: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
    rows: int,
    segments: bool = False,
) -> Gradients:
    """Gradients of the inputs of :func:`forward`, from those of its results.

    ``chunk_size`` and ``rows`` may differ from those used there.

    Args:
        dout: Gradient of the loss with respect to the outputs.
        dstate: Gradient with respect to the last state; None: it was not used.
    """
    state = layout.state_rows(q, v, initial_state)
    dstate = layout.state_rows(q, v, dstate)
    dtype = state.dtype
    if chunk_size == 1:
        # The scale may stand at the queries or at the gradient; there, dq needs it too.
        tokens = (
            *_each(layout.time_first, q, k, v, g, dtype=dtype),
            scale * layout.time_first(dout, dtype),
        )
        step_back = partial(steps.backward, segments=segments)
        found = steps.Gradients(*_in_groups(step_back, tokens, (state, dstate), rows))
        back = layout.from_time_first
    else:
        tokens = (
            *_each(layout.chunks_first, q, k, v, g, dtype=dtype, size=chunk_size),
            scale * layout.chunks_first(dout, dtype, chunk_size),
        )
        found = _backward_in_chunks(Chunk(chunk_size, dtype=dtype), tokens, state, dstate)
        back = layout.from_chunks_first
    return Gradients(
        back(found.q, q),
        back(found.k, k),
        back(found.v, v),
        None if g is None or found.g is None else back(found.g, g),
        layout.state_by_batch(found.state, q),
    )


# States of the rows that are worked on together: with more of them, every step fetches them from
# beyond the second-level cache; with less, the loop itself takes longer than its work.
_BYTES_OF_STATES = 128 * 1024


def default_rows(total: int, key_dim: int, value_dim: int, *, backward: bool) -> int:
    """How many of `total` rows to work on at a time on a CPU.

    From interleaved timings on two Zen 3 cores (512 KiB of second-level cache each; 4 to 64 rows of
    32 x 32 to 128 x 128): groups of 128 KiB of states were within 1.13 of the best everywhere, all
    rows at once up to 1.5 times slower forward and 1.8 times backward, and groups of 256 KiB and
    more up to 2.2 times. Only if one forward group of 256 KiB is all there is, it is better not to
    cut it: that saved up to a fifth.
    """
    whole = _BYTES_OF_STATES if backward else 2 * _BYTES_OF_STATES
    if total * key_dim * value_dim * 4 <= whole:
        return total
    return max(1, min(total, _BYTES_OF_STATES // (4 * key_dim * value_dim)))


def _backward_in_chunks(
    chunk: Chunk, tokens: tuple[Any, ...], state: jax.Array, dstate: jax.Array
) -> steps.Gradients:
    _, k, v, g, _ = tokens

    def advance(state: jax.Array, tokens: Any) -> tuple[jax.Array, jax.Array]:
        return jax.vmap(chunk.advance)(state, *tokens), state

    _, states = lax.scan(advance, state.swapaxes(1, 2), (k, v, g))

    def step(dstate: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        state, *tokens = inputs
        found = jax.vmap(chunk.backward)(state, dstate, *tokens)
        return found.state, found[1:]

    dstate, (dq, dk, dv, dg) = lax.scan(
        step, dstate.swapaxes(1, 2), (states, *tokens), reverse=True
    )
    return steps.Gradients(dq, dk, dv, dg, dstate.swapaxes(1, 2))


def _each(function: Callable[..., jax.Array], *arrays: jax.Array | None, **options: Any) -> Any:
    return tuple(None if x is None else function(x, **options) for x in arrays)


def _in_groups(
    function: Callable[..., Any],
    tokens: tuple[jax.Array | None, ...],
    states: tuple[jax.Array, ...],
    rows: int,
) -> tuple[Any, ...]:
    """``function(*tokens, *states)`` for at most `rows` rows at a time.

    Rows are axis 1 of tokens and axis 0 of states; the function's last result is a state, too.
    """
    total = states[0].shape[0]
    most = min(max(rows, 1), total)
    size = max(divisor for divisor in range(1, most + 1) if total % divisor == 0)
    if size == total:
        return tuple(function(*tokens, *states))

    def cut(x: jax.Array, axis: int) -> jax.Array:
        shape = (*x.shape[:axis], total // size, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def join(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], total, *x.shape[axis + 2 :])

    groups = (jax.tree.map(lambda x: cut(x, 1), tokens), jax.tree.map(lambda x: cut(x, 0), states))
    *results, state = lax.map(lambda group: tuple(function(*group[0], *group[1])), groups)
    return (*jax.tree.map(lambda x: join(x, 1), results), join(state, 0))
