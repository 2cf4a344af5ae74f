"""Gated linear attention in plain JAX, for any device: step by step, or chunk by chunk.

``chunk_size`` decides: 1 takes the recurrence of :mod:`.steps`, which is the fastest on a CPU; more
takes the products of :mod:`.chunk`, for devices with matrix units. The directions may choose
differently, since the backward pass needs nothing but the inputs: it makes the states again.
Arithmetic is in float32, or in float64 for float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Implementation, Invocation, Limit, Limits, device_kind

from ..dtypes import accumulation_dtype
from ..limits import COUNT
from . import chunks, layout, steps
from .arguments import Arguments, Gradients, passes_of
from .chunk import MOST_TOKENS, Chunk
from .chunks import Arrays, Step


@dataclasses.dataclass(frozen=True)
class GatedLinearAttentionXlaConfig:
    """How the recurrence is cut.

    Args:
      chunk_size: tokens that are worked on together, a power of two; 1: step by step.
      block_m: step by step, at most so many rows (pairs of a batch entry and a head) at a time.
      backward_chunk_size: `chunk_size` of the backward pass.
      backward_block_m: `block_m` of the backward pass.
    """

    chunk_size: int = 1
    block_m: int = 8
    backward_chunk_size: int = 1
    backward_block_m: int = 8


def run(call: Arguments, cfg: GatedLinearAttentionXlaConfig) -> tuple[jax.Array, jax.Array, None]:
    """The outputs, and the last state in the dtype of the arithmetic."""
    if cfg.chunk_size > 1:
        return *chunks.forward(call, _chunk(call, cfg.chunk_size), _walk)[:2], None
    state = layout.state_rows(call, call.initial_state)
    q, *rest = _in_steps(call.tokens, state)
    forward = partial(steps.forward, segments=call.segments)
    out, state = _in_groups(forward, (call.scale * q, *rest), (state,), cfg.block_m)
    return layout.from_steps(out, call.q), layout.state_by_batch(call, state), None


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
    state = layout.state_rows(call, call.initial_state)
    *tokens, dout = _in_steps((*call.tokens, dout), state)
    arrays = (*tokens, call.scale * dout)
    backward = partial(steps.backward, segments=call.segments)
    rows = (state, layout.state_rows(call, dstate))
    *found, state = _in_groups(backward, arrays, rows, cfg.backward_block_m)
    gradients = jax.tree.map(layout.from_steps, tuple(found), call.tokens)
    return Gradients._make([*gradients, layout.state_by_batch(call, state)])


def _in_steps(tokens: Any, state: jax.Array) -> Any:
    return jax.tree.map(lambda x: layout.in_steps(x, state.dtype), tokens)


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
    most = min(rows, total)
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


# States of the rows that are worked on together: with more of them, every step fetches them from
# beyond the second-level cache; with less, the loop itself takes longer than its work.
_BYTES_OF_STATES = 128 * 1024


def default_block_m(inv: Invocation[Any, Any], *, backward: bool) -> int:
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


def _heuristic(inv: Invocation[Any, Any]) -> GatedLinearAttentionXlaConfig:
    if device_kind() != "cpu":
        return GatedLinearAttentionXlaConfig(chunk_size=64, backward_chunk_size=64)
    return GatedLinearAttentionXlaConfig(
        block_m=default_block_m(inv, backward=False),
        backward_block_m=default_block_m(inv, backward=True),
    )


def _space(inv: Invocation[Any, Any]) -> list[GatedLinearAttentionXlaConfig]:
    """Half of the rows that are good, twice that, and so on; and chunks.

    The passes do not share anything, so each is varied while the other stays as it is.
    """
    (total, _), good = _sizes(inv), default_block_m(inv, backward=True)
    sizes = sorted({min(max(1, good * factor // 2), total) for factor in (1, 2, 4, 8)})
    vary = partial(dataclasses.replace, _heuristic(inv))
    return [
        *(vary(chunk_size=1, block_m=rows) for rows in sizes),
        *(vary(backward_chunk_size=1, backward_block_m=rows) for rows in sizes),
        *(vary(chunk_size=size, backward_chunk_size=size) for size in (32, 64, 128)),
    ]


_SIZE = Limit(minimum=1, maximum=MOST_TOKENS, power_of_two=True)
_ROWS = {"block_m": COUNT, "backward_block_m": COUNT}

XLA: Implementation[GatedLinearAttentionXlaConfig, Any] = Implementation(
    name="xla",
    config=GatedLinearAttentionXlaConfig,
    heuristic=_heuristic,
    space=_space,
    limits=Limits({"chunk_size": _SIZE, "backward_chunk_size": _SIZE, **_ROWS}),
    **passes_of(run, run_backward),
)
