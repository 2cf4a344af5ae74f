"""Gated linear attention for TPUs: one chunk of one row per grid step, the state in VMEM.

The grid runs over rows (pairs of a batch entry and a head) and, innermost and in order, over
chunks; a scratch buffer carries the transposed state from chunk to chunk, and its gradient the
other way in the backward pass. The forward pass writes down the state before every chunk for it.
What happens inside a chunk is :class:`.chunk.Chunk`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import layout
from .chunk import Chunk
from .xla import Gradients


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    initial_state: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs and last state as :func:`.xla.forward`, and the states before the chunks.

    The states are transposed, ``(rows, chunks, value_dim, key_dim)``.
    """
    call = _Call(q, v, g, chunk_size)
    with_g = g is not None

    def kernel(*refs: Any) -> None:
        tokens, (start, out, states, last, carried) = _take(refs, 3 + with_g)
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _() -> None:
            carried[...] = start[0]

        states[0, 0] = carried[...]
        q_, k_, v_, g_ = call.chunk_inputs(tokens, scale)
        carried[...], out_ = call.chunk.forward(carried[...], q_, k_, v_, g_)
        out[0] = out_.astype(out.dtype)

        @pl.when(step == call.chunks - 1)
        def _() -> None:
            last[0] = carried[...]

    state = layout.state_rows(q, v, initial_state).swapaxes(1, 2)
    out, states, last = pl.pallas_call(
        kernel,
        grid=(call.rows, call.chunks),
        in_specs=[*call.token_specs(q, k, v, g), call.state_spec],
        out_specs=[call.token_spec(v.shape[3]), call.states_spec(), call.state_spec],
        out_shape=[
            jax.ShapeDtypeStruct((call.rows, call.length, v.shape[3]), q.dtype),
            jax.ShapeDtypeStruct((call.rows, call.chunks, *call.state_shape), jnp.float32),
            jax.ShapeDtypeStruct((call.rows, *call.state_shape), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM(call.state_shape, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="gated_linear_attention_forward",
    )(*call.tokens(q, k, v, g), state)
    last = layout.state_by_batch(last.swapaxes(1, 2), q)
    return layout.from_rows_first(out, q), last, states


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    states: jax.Array,
    dout: jax.Array,
    dstate: jax.Array | None,
    *,
    scale: float,
    chunk_size: int,
    interpret: bool = False,
) -> Gradients:
    """Gradients of the inputs of :func:`forward`, from its states and its results' gradients."""
    call = _Call(q, v, g, chunk_size, backwards=True)
    with_g = g is not None

    def kernel(*refs: Any) -> None:
        tokens, (dout_, states_, dlast, dq, dk, dv, *rest) = _take(refs, 3 + with_g)
        *dg, dstart, carried = rest
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _() -> None:
            carried[...] = dlast[0]

        q_, k_, v_, g_ = call.chunk_inputs(tokens, 1.0)
        dout_chunk = scale * dout_[0].astype(jnp.float32)
        found = call.chunk.backward(states_[0, 0], carried[...], q_, k_, v_, g_, dout_chunk)
        carried[...] = found.state
        dq[0] = found.q.astype(dq.dtype)
        dk[0] = found.k.astype(dk.dtype)
        dv[0] = found.v.astype(dv.dtype)
        if dg and found.g is not None:
            dg[0][0] = found.g

        @pl.when(step == call.chunks - 1)
        def _() -> None:
            dstart[0] = carried[...]

    dlast = layout.state_rows(q, v, dstate).swapaxes(1, 2)
    inputs = call.tokens(q, k, v, g)
    *tokens, dstart = pl.pallas_call(
        kernel,
        grid=(call.rows, call.chunks),
        in_specs=[
            *call.token_specs(q, k, v, g),
            call.token_spec(v.shape[3]),
            call.states_spec(),
            call.state_spec,
        ],
        out_specs=[*call.token_specs(q, k, v, g), call.state_spec],
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs),
            jax.ShapeDtypeStruct((call.rows, *call.state_shape), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM(call.state_shape, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="gated_linear_attention_backward",
    )(*inputs, layout.rows_first(dout, call.length), states, dlast)
    gradients = [
        layout.from_rows_first(x, like)
        for x, like in zip(tokens, (q, k, v, *(() if g is None else (g,))), strict=True)
    ]
    dq, dk, dv, *dg = gradients
    return Gradients(
        dq, dk, dv, dg[0] if dg else None, layout.state_by_batch(dstart.swapaxes(1, 2), q)
    )


class _Call:
    """Sizes and block specifications of one call."""

    def __init__(
        self,
        q: jax.Array,
        v: jax.Array,
        g: jax.Array | None,
        chunk_size: int,
        backwards: bool = False,
    ) -> None:
        exact = q.dtype == jnp.float32
        precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
        self.chunk = Chunk(chunk_size, precision)
        self.rows = q.shape[0] * q.shape[2]
        self.chunks = -(-q.shape[1] // chunk_size)
        self.length = self.chunks * chunk_size
        self.state_shape = (v.shape[3], q.shape[3])
        self.state_spec = pl.BlockSpec((1, *self.state_shape), lambda row, step: (row, 0, 0))
        self._backwards = backwards

    def _position(self, step: Any) -> Any:
        return self.chunks - 1 - step if self._backwards else step

    def token_spec(self, features: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, self.chunk.size, features), lambda row, step: (row, self._position(step), 0)
        )

    def states_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, 1, *self.state_shape), lambda row, step: (row, self._position(step), 0, 0)
        )

    def token_specs(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None
    ) -> list[pl.BlockSpec]:
        specs = [self.token_spec(x.shape[3]) for x in (q, k, v)]
        return specs if g is None else [*specs, self.token_spec(g.shape[3] if g.ndim == 4 else 1)]

    def tokens(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None
    ) -> list[jax.Array]:
        arrays = [layout.rows_first(x, self.length) for x in (q, k, v)]
        return arrays if g is None else [*arrays, layout.rows_first(g, self.length)]

    def chunk_inputs(
        self, tokens: tuple[Any, ...], scale: float
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        q, k, v, *g = (ref[0].astype(jnp.float32) for ref in tokens)
        return scale * q, k, v, g[0] if g else None


def _take(refs: tuple[Any, ...], count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return refs[:count], refs[count:]
