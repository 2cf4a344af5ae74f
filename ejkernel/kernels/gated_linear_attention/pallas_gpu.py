"""Gated linear attention for GPU, through Pallas' Triton compiler.

One program walks over the chunks of one row (a pair of a batch entry and a head) with its state in
registers. Since every value channel is a recurrence of its own, a row may be shared by several
programs, each with a block of the value channels: there is more to do in parallel, the states
are smaller, and only the weights inside a chunk are made more than once. The gradients of `q`, `k`
and `g` are sums over value channels; each program writes its part, and they are added afterwards.
What happens inside a chunk is :class:`.chunks.Chunk`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Supports

from ..limits import TRITON_SIDE, WARPS
from .arguments import Arguments
from .chunks import Arrays, Chunk, Precision, Step, Walk, pallas_implementation


@dataclasses.dataclass(frozen=True)
class GatedLinearAttentionGpuConfig:
    """How the recurrence is cut, in both passes, and how the kernels are launched.

    Args:
      chunk_size: tokens that are worked on together, a power of two.
      block_v: value channels per program, a power of two; at most all that there are.
      num_warps: warps per program.
    """

    # The defaults are the least by the compiler's schedules for an A100 and an H100, of those that
    # compile in less than a minute; larger blocks spill.
    chunk_size: Annotated[int, TRITON_SIDE] = 32
    block_v: Annotated[int, TRITON_SIDE] = 32
    num_warps: Annotated[int, WARPS] = 8

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[GatedLinearAttentionGpuConfig]:
        return [
            cls(size, block_v, num_warps)
            for size in (16, 32, 64)
            for block_v in (16, 32, 64)
            if block_v <= inv.args[2].shape[3]
            for num_warps in (2, 4, 8)
        ]


EXACT: Precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
"""In three parts of lower precision, tensor cores add up as well as float32 does."""


def prepare(call: Arguments, cfg: GatedLinearAttentionGpuConfig) -> tuple[Chunk, Walk]:
    """The products of a chunk, and the walk from chunk to chunk."""
    precision = EXACT if call.q.dtype == jnp.float32 else lax.Precision.DEFAULT
    # Written out, the levels need more registers than there are, and minutes to compile.
    return Chunk(cfg.chunk_size, precision, EXACT, unrolled=False), partial(_walk, cfg=cfg)


# Of the arrays of a walk those with value channels, and on which axis these are.
_VALUE_AXIS = {"state": 1, "states": 2, "v": 3, "out": 3, "dv": 3, "dout": 3}


def _walk(
    step: Step,
    state: jax.Array,
    inputs: Arrays,
    outputs: Arrays,
    *,
    reverse: bool,
    cfg: GatedLinearAttentionGpuConfig,
) -> tuple[jax.Array, ...]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    rows, chunks, *_ = inputs["q"].shape
    block_v = min(cfg.block_v, state.shape[1])
    blocks = state.shape[1] // block_v

    def kernel(*refs: Any) -> None:
        first, *input_refs = refs[: len(inputs)]
        *output_refs, last = refs[len(inputs) :]

        def one_chunk(number: jax.Array, state: jax.Array) -> jax.Array:
            here = chunks - 1 - number if reverse else number
            results = list(output_refs)
            if not reverse:  # the first output: the states before the chunks
                results.pop(0)[here] = state
            state, found = step(state, *(ref[here] for ref in input_refs))
            for ref, result in zip(results, found, strict=True):
                ref[here] = result.astype(ref.dtype)
            return state

        last[...] = lax.fori_loop(0, chunks, one_chunk, first[...])

    def spec(name: str, x: Any) -> pl.BlockSpec:
        """All of a row, but of value channels one block."""
        shape: list[Any] = [None, *x.shape[1:]]
        place = [0] * len(shape)
        if name in _VALUE_AXIS:
            shape[_VALUE_AXIS[name]], place[_VALUE_AXIS[name]] = block_v, 1
        return pl.BlockSpec(shape, lambda row, block: (row, *(i * block for i in place[1:])))

    def output(name: str, x: Any) -> tuple[pl.BlockSpec, Any]:
        if name in _VALUE_AXIS:
            return spec(name, x), x
        # Every block of value channels contributes to it.
        part = pl.BlockSpec((None, None, *x.shape[1:]), lambda row, block: (block, row, 0, 0, 0))
        return part, jax.ShapeDtypeStruct((blocks, *x.shape), jnp.float32)

    inputs, outputs = {"state": state, **inputs}, {**outputs, "state": state}
    out_specs, out_shapes = zip(*(output(name, x) for name, x in outputs.items()), strict=True)
    found = pl.pallas_call(
        kernel,
        grid=(rows, blocks),
        in_specs=[spec(name, x) for name, x in inputs.items()],
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shapes],
        compiler_params=plgpu.CompilerParams(num_warps=cfg.num_warps, num_stages=1),
        name=f"gated_linear_attention_{'backward' if reverse else 'forward'}",
    )(*inputs.values())
    return tuple(x.sum(0) if x.ndim == 5 else x for x in found)


def _dims_fit(inv: Invocation[Any, Any]) -> str | None:
    """key_dim and value_dim that are powers of two, from 16 to 128 and to 1024."""
    for name, array, most in (("key_dim", inv.args[0], 128), ("value_dim", inv.args[2], 1024)):
        size = array.shape[3]
        if size < 16 or size & (size - 1) or size > most:
            return f"{name} is {size}; it must be a power of two from 16 to {most}"
    return None


PALLAS_GPU = pallas_implementation(
    prepare,
    name="triton",
    devices=("gpu",),
    config=GatedLinearAttentionGpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16", "float16"), rules=(_dims_fit,)),
)
