"""Gated linear attention in plain JAX, for any device: step by step, or chunk by chunk.

``chunk_size`` decides: 1 takes the recurrence of :mod:`.steps`, which is the fastest on a CPU; more
takes the products of :mod:`.chunks`, for devices with matrix units. The directions may choose
differently, since the backward pass needs nothing but the inputs: it makes the states again.
Arithmetic is in float32, or in float64 for float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Limit, device_kind

from ..dtypes import accumulation_dtype
from ..limits import COUNT
from . import chunks, steps
from .arguments import Arguments, Gradients, implementation, like_given, with_features
from .chunks import MOST_TOKENS, Arrays, Chunk, Step

_SIZE = Limit(minimum=1, maximum=MOST_TOKENS, power_of_two=True)

# States of the rows that are worked on together: with more of them, every step fetches them from
# beyond the second-level cache; with less, the loop itself takes longer than its work.
_BYTES_OF_STATES = 128 * 1024


@dataclasses.dataclass(frozen=True)
class GatedLinearAttentionXlaConfig:
    """How the recurrence is cut.

    Args:
      chunk_size: tokens that are worked on together, a power of two; 1: step by step.
      block_m: step by step, at most so many rows (pairs of a batch entry and a head) at a time.
      backward_chunk_size: `chunk_size` of the backward pass.
      backward_block_m: `block_m` of the backward pass.
    """

    chunk_size: Annotated[int, _SIZE] = 1
    block_m: Annotated[int, COUNT] = 8
    backward_chunk_size: Annotated[int, _SIZE] = 1
    backward_block_m: Annotated[int, COUNT] = 8

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> GatedLinearAttentionXlaConfig:
        """Chunks, but on a CPU steps of as many rows as `_rows_at_a_time` says."""
        if device_kind() != "cpu":
            return cls(chunk_size=64, backward_chunk_size=64)
        forward, backward = (_rows_at_a_time(inv, backward=flag) for flag in (False, True))
        return cls(block_m=forward, backward_block_m=backward)

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[GatedLinearAttentionXlaConfig]:
        """Half of the rows that are good, twice that, and so on; and chunks.

        The passes do not share anything, so each is varied while the other stays as it is.
        """
        (total, _), good = _sizes(inv), _rows_at_a_time(inv, backward=True)
        sizes = sorted({min(max(1, good * factor // 2), total) for factor in (1, 2, 4, 8)})
        vary = partial(dataclasses.replace, cls.heuristic(inv))
        return [
            *(vary(chunk_size=1, block_m=rows) for rows in sizes),
            *(vary(backward_chunk_size=1, backward_block_m=rows) for rows in sizes),
            *(vary(chunk_size=size, backward_chunk_size=size) for size in (32, 64, 128)),
        ]


def _rows_at_a_time(inv: Invocation[Any, Any], *, backward: bool) -> int:
    """How many rows to work on at a time on a CPU.

    From interleaved timings on two Zen 3 cores (512 KiB of second-level cache each; 4 to 64 rows of
    32 x 32 to 128 x 128): groups of 128 KiB of states were within 1.13 of the best everywhere, all
    rows at once up to 1.5 times slower forward and 1.8 times backward, and groups of 256 KiB and
    more up to 2.2 times. Only if one forward group of 256 KiB is all there is, it is better not to
    cut it: that saved up to a fifth.
    """
    total, bytes_of_state = _sizes(inv)
    whole = _BYTES_OF_STATES if backward else 2 * _BYTES_OF_STATES
    if total * bytes_of_state <= whole:
        return total
    return max(1, min(total, _BYTES_OF_STATES // bytes_of_state))


def _sizes(inv: Invocation[Any, Any]) -> tuple[int, int]:
    """Rows, and the bytes of the state of one."""
    batch, _, heads, key_dim = inv.args[0].shape
    return batch * heads, 4 * key_dim * inv.args[2].shape[3]


def run(call: Arguments, cfg: GatedLinearAttentionXlaConfig) -> tuple[jax.Array, jax.Array, None]:
    """The outputs, and the last state in the dtype of the arithmetic."""
    if cfg.chunk_size > 1:
        return *chunks.forward(call, _chunk(call, cfg.chunk_size), _walk)[:2], None
    state = call.state_rows(call.initial_state)
    q, *rest = _in_steps(call.tokens, state)
    forward = partial(steps.forward, segments=call.segments)
    out, state = _in_groups(forward, (call.scale * q, *rest), (state,), cfg.block_m)
    return _from_steps(out, call.q), call.state_by_batch(state), None


def run_backward(
    call: Arguments,
    cfg: GatedLinearAttentionXlaConfig,
    residuals: None,
    dout: jax.Array,
    dstate: jax.Array | None,
) -> Gradients:
    """The gradients, from the inputs and the gradients of the results."""
    if cfg.backward_chunk_size > 1:
        chunk = _chunk(call, cfg.backward_chunk_size)
        states = chunks.forward(call, chunk, _walk)[2]
        return chunks.backward(call, chunk, _walk, states, dout, dstate)
    state = call.state_rows(call.initial_state)
    *tokens, dout = _in_steps((*call.tokens, dout), state)
    arrays = (*tokens, call.scale * dout)
    backward = partial(steps.backward, segments=call.segments)
    rows = (state, call.state_rows(dstate))
    *found, state = _in_groups(backward, arrays, rows, cfg.backward_block_m)
    return *jax.tree.map(_from_steps, tuple(found), call.tokens), call.state_by_batch(state)


def _in_steps(tokens: Any, state: jax.Array) -> Any:
    """Each array as `(length, rows, features)`, in the dtype of the state."""

    def in_steps(x: jax.Array) -> jax.Array:
        steps = with_features(x).astype(state.dtype).swapaxes(0, 1)
        return steps.reshape(steps.shape[0], -1, steps.shape[3])

    return jax.tree.map(in_steps, tokens)


def _from_steps(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse, in the shape (but for features) and dtype of `like`."""
    batch, length, heads = like.shape[:3]
    return like_given(x.reshape(length, batch, heads, x.shape[2]).swapaxes(0, 1), like)


def _in_groups(
    function: Callable[..., Any], tokens: steps.Tokens, states: tuple[jax.Array, ...], rows: int
) -> tuple[Any, ...]:
    """``function(tokens, states)`` for at most `rows` rows at a time.

    Rows are axis 1 of tokens and axis 0 of states; the function's last result is a state, too.
    """
    total = states[0].shape[0]
    size = max(n for n in range(1, min(rows, total) + 1) if total % n == 0)
    if size == total:
        return tuple(function(tokens, states))

    def cut(axis: int, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:axis], total // size, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def join(axis: int, x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], total, *x.shape[axis + 2 :])

    groups = jax.tree.map(partial(cut, 1), tokens), jax.tree.map(partial(cut, 0), states)
    *results, state = lax.map(lambda group: tuple(function(*group)), groups)
    return (*jax.tree.map(partial(join, 1), results), join(0, state))


def _chunk(call: Arguments, size: int) -> Chunk:
    return Chunk(size, dtype=accumulation_dtype(call.q.dtype))


def _walk(
    step: Step, state: jax.Array, inputs: Arrays, outputs: Arrays, *, reverse: bool
) -> tuple[jax.Array, ...]:
    """A loop over chunks, of all rows at once."""

    def all_rows(state: jax.Array, arrays: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        after, found = jax.vmap(step)(state, *arrays)
        return after, found if reverse else (state, *found)

    arrays = tuple(x.astype(state.dtype).swapaxes(0, 1) for x in inputs.values())
    last, found = lax.scan(all_rows, state, arrays, reverse=reverse)
    return *(x.swapaxes(0, 1) for x in found), last


XLA = implementation(run, run_backward, name="xla", config=GatedLinearAttentionXlaConfig)
