"""Gated linear attention for GPUs, through Pallas' Triton compiler.

One program walks over the chunks of one row (a pair of a batch entry and a head) with its state in
registers. Since every value channel is a recurrence of its own, a row may be shared by several
programs, each with a block of the value channels: there is more to do in parallel, the states
are smaller, and only the weights inside a chunk are made more than once. The gradients of `q`, `k`
and `g` are sums over value channels; each program writes its part, and they are added afterwards.
What happens inside a chunk is :class:`.chunk.Chunk`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

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
    value_block: int,
    num_warps: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs and last state as :func:`.xla.forward`, and the states before the chunks.

    The states are transposed, ``(rows, chunks, value_dim, key_dim)``.
    """
    call = _Call(q, v, g, chunk_size, value_block, interpret)

    def kernel(*refs: Any) -> None:
        count = 3 + (g is not None)
        tokens, (start, out, states, last) = refs[:count], refs[count:]

        def step(number: jax.Array, state: jax.Array) -> jax.Array:
            here = pl.ds(number * chunk_size, chunk_size)
            states[number] = state
            q_, k_, v_, g_ = call.chunk_inputs(tokens, here, scale)
            state, out_ = call.chunk.forward(state, q_, k_, v_, g_)
            out[here, :] = out_.astype(out.dtype)
            return state

        last[...] = lax.fori_loop(0, call.chunks, step, start[...])

    state = layout.state_rows(q, v, initial_state).swapaxes(1, 2)
    out, states, last = pl.pallas_call(
        kernel,
        grid=(call.rows, call.blocks),
        in_specs=[*call.token_specs(g), call.state_spec],
        out_specs=[call.value_spec, call.states_spec, call.state_spec],
        out_shape=[
            jax.ShapeDtypeStruct((call.rows, call.length, call.value_dim), q.dtype),
            jax.ShapeDtypeStruct(
                (call.rows, call.chunks, call.value_dim, call.key_dim), jnp.float32
            ),
            jax.ShapeDtypeStruct((call.rows, call.value_dim, call.key_dim), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
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
    value_block: int,
    num_warps: int,
    interpret: bool = False,
) -> Gradients:
    """Gradients of the inputs of :func:`forward`, from its states and its results' gradients."""
    call = _Call(q, v, g, chunk_size, value_block, interpret)

    def kernel(*refs: Any) -> None:
        count = 3 + (g is not None)
        tokens, (dout_, states_, dlast, dq, dk, dv, *rest) = refs[:count], refs[count:]
        *dg, dstart = rest

        def step(number: jax.Array, dstate: jax.Array) -> jax.Array:
            number = call.chunks - 1 - number
            here = pl.ds(number * chunk_size, chunk_size)
            q_, k_, v_, g_ = call.chunk_inputs(tokens, here, 1.0)
            dout_chunk = scale * dout_[here, :].astype(jnp.float32)
            found = call.chunk.backward(states_[number], dstate, q_, k_, v_, g_, dout_chunk)
            dq[here, :], dk[here, :] = found.q, found.k
            dv[here, :] = found.v.astype(dv.dtype)
            if dg:
                dg[0][here, :] = found.g
            return found.state

        dstart[...] = lax.fori_loop(0, call.chunks, step, dlast[...])

    def part(features: int) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
        """A gradient to which every block of value channels contributes."""
        spec = pl.BlockSpec((None, None, call.length, features), lambda row, b: (b, row, 0, 0))
        shape = (call.blocks, call.rows, call.length, features)
        return spec, jax.ShapeDtypeStruct(shape, jnp.float32)

    parts = [part(call.key_dim), part(call.key_dim)]
    outputs = [
        *parts,
        (call.value_spec, jax.ShapeDtypeStruct((call.rows, call.length, call.value_dim), v.dtype)),
        *([] if g is None else [part(call.g_features)]),
        (
            call.state_spec,
            jax.ShapeDtypeStruct((call.rows, call.value_dim, call.key_dim), jnp.float32),
        ),
    ]
    dlast = layout.state_rows(q, v, dstate).swapaxes(1, 2)
    dq, dk, dv, *dg, dstart = pl.pallas_call(
        kernel,
        grid=(call.rows, call.blocks),
        in_specs=[*call.token_specs(g), call.value_spec, call.states_spec, call.state_spec],
        out_specs=[spec for spec, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gated_linear_attention_backward",
    )(*call.tokens(q, k, v, g), layout.rows_first(dout, call.length), states, dlast)
    return Gradients(
        layout.from_rows_first(dq.sum(0), q),
        layout.from_rows_first(dk.sum(0), k),
        layout.from_rows_first(dv, v),
        None if g is None else layout.from_rows_first(dg[0].sum(0), g),
        layout.state_by_batch(dstart.swapaxes(1, 2), q),
    )


class _Call:
    """Sizes and block specifications of one call."""

    def __init__(
        self,
        q: jax.Array,
        v: jax.Array,
        g: jax.Array | None,
        chunk_size: int,
        value_block: int,
        interpret: bool,
    ) -> None:
        # In three parts of lower precision, tensor cores add up as well as float32 does. The
        # interpreter has no such thing.
        exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        half = q.dtype != jnp.float32
        # Written out, the levels need more registers than there are, and minutes to compile.
        self.chunk = Chunk(chunk_size, lax.Precision.DEFAULT if half else exact, exact, False)
        self.rows = q.shape[0] * q.shape[2]
        self.key_dim, self.value_dim = q.shape[3], v.shape[3]
        self.g_features = g.shape[3] if g is not None and g.ndim == 4 else 1
        self.chunks = -(-q.shape[1] // chunk_size)
        self.length = self.chunks * chunk_size
        self.blocks = self.value_dim // value_block
        self.value_spec = pl.BlockSpec((None, self.length, value_block), lambda row, b: (row, 0, b))
        self.state_spec = pl.BlockSpec(
            (None, value_block, self.key_dim), lambda row, b: (row, b, 0)
        )
        self.states_spec = pl.BlockSpec(
            (None, self.chunks, value_block, self.key_dim), lambda row, b: (row, 0, b, 0)
        )

    def _whole_spec(self, features: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.length, features), lambda row, b: (row, 0, 0))

    def token_specs(self, g: jax.Array | None) -> list[pl.BlockSpec]:
        specs = [self._whole_spec(self.key_dim), self._whole_spec(self.key_dim), self.value_spec]
        return specs if g is None else [*specs, self._whole_spec(self.g_features)]

    def tokens(
        self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None
    ) -> list[jax.Array]:
        arrays = [layout.rows_first(x, self.length) for x in (q, k, v)]
        return arrays if g is None else [*arrays, layout.rows_first(g, self.length)]

    def chunk_inputs(
        self, tokens: tuple[Any, ...], here: Any, scale: float
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        q, k, v, *g = (ref[here, :].astype(jnp.float32) for ref in tokens)
        return scale * q, k, v, g[0] if g else None
