"""Gated linear attention chunk by chunk: what XLA, TPU and GPU share.

They differ in how they walk from chunk to chunk. A walk takes a function of one chunk of one row,
`step(state, *inputs) -> (next state, outputs)`, and applies it in order, or in reverse, to arrays
`(rows, chunks, ...)`; states are transposed, `(rows, value_dim, key_dim)`. In order, the states
before the chunks are outputs too, the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from . import layout
from .arguments import Arguments, Gradients, passes_of
from .chunk import Chunk
from .segments import NotFinite

Step = Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]
Arrays = dict[str, Any]
Walk = Callable[..., tuple[jax.Array, ...]]
"""`walk(step, state, inputs, outputs, reverse=)`: the outputs, of the shapes and dtypes given under
their names, and the state after the last step."""


def forward(call: Arguments, chunk: Chunk, walk: Walk) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The outputs, the last state, and the states before the chunks as :func:`backward` reads them.

    With segments, nothing of one of them is in another.
    """

    def step(state: jax.Array, *tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        q, *rest = (x.astype(chunk.dtype) for x in tokens)
        after, out = chunk.forward(state, call.scale * q, *rest)
        return after, (out,)

    found = NotFinite(call) if call.segments else None
    call = found.call if found else call
    state = layout.state_rows(call, call.initial_state).swapaxes(1, 2)
    inputs = _named(call, chunk.size)
    rows, chunks, *_ = inputs["v"].shape
    outputs = {
        "states": jax.ShapeDtypeStruct((rows, chunks, *state.shape[1:]), state.dtype),
        "out": jax.ShapeDtypeStruct(inputs["v"].shape, call.q.dtype),
    }
    states, out, last = walk(step, state, inputs, outputs, reverse=False)
    out = layout.from_chunks(out, call.q)
    last = layout.state_by_batch(call, last.swapaxes(1, 2))
    return *(found.shown(out, last) if found else (out, last)), states


def backward(
    call: Arguments,
    chunk: Chunk,
    walk: Walk,
    states: jax.Array,
    dout: jax.Array,
    dstate: jax.Array | None,
) -> Gradients:
    """The gradients, from the states of :func:`forward` and the gradients of its results."""

    def step(dstate: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        *tokens, dout, state = (x.astype(chunk.dtype) for x in arrays)
        # The scale may stand at the queries or at the gradient; there, dq needs it too.
        *found, dstate = chunk.backward(state, dstate, call.scale * dout, *tokens)
        return dstate, tuple(x for x in found if x is not None)

    found = NotFinite(call, dout, dstate) if call.segments else None
    if found:
        call, dout, dstate = found.call, found.dout, found.dstate
    tokens = _named(call, chunk.size)
    inputs = {**tokens, "dout": layout.in_chunks(dout, chunk.size), "states": states}
    outputs = {f"d{n}": jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tokens.items()}
    dlast = layout.state_rows(call, dstate).swapaxes(1, 2)
    *made, dfirst = walk(step, dlast, inputs, outputs, reverse=True)
    by_token = (*made, None)[:4]  # None for the decay, if there is none
    by_token = jax.tree.map(layout.from_chunks, by_token, call.tokens)
    dfirst = layout.state_by_batch(call, dfirst.swapaxes(1, 2))
    gradients = Gradients._make([*by_token, dfirst])
    return found.shown_gradients(gradients) if found else gradients


def pallas_passes(prepare: Callable[[Arguments, Any], tuple[Chunk, Walk]]) -> dict[str, Any]:
    """The passes of an implementation that keeps the states between chunks for its gradient.

    `prepare(call, cfg)` gives its products and its walk.
    """
    return passes_of(
        lambda call, cfg: forward(call, *prepare(call, cfg)),
        lambda call, cfg, *rest: backward(call, *prepare(call, cfg), *rest),
    )


def _named(call: Arguments, size: int) -> Arrays:
    tokens = zip("qkvg", call.tokens, strict=True)
    return {name: layout.in_chunks(x, size) for name, x in tokens if x is not None}
