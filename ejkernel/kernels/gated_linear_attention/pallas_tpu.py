"""Gated linear attention for TPU: one chunk of one row per grid step, the state in VMEM.

The grid runs over rows (pairs of a batch entry and a head) and, innermost and in order, over
chunks; a scratch buffer carries the transposed state from chunk to chunk, and its gradient the
other way in the backward pass. The forward pass writes down the state before every chunk for it.
What happens inside a chunk is :class:`.chunks.Chunk`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Limit, Supports

from .arguments import Arguments
from .chunks import MOST_TOKENS, Arrays, Chunk, Step, Walk, pallas_implementation


@dataclasses.dataclass(frozen=True)
class GatedLinearAttentionTpuConfig:
    """How many tokens are worked on together in both passes: `chunk_size`, a power of two."""

    chunk_size: Annotated[int, Limit(minimum=8, maximum=MOST_TOKENS, power_of_two=True)] = 64

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> GatedLinearAttentionTpuConfig:
        """From the compiler's schedules for a v5e.

        With a decay per channel the levels of a larger chunk eat up what it saves; without them 128
        takes 0.83 times as long.
        """
        per_channel = len(inv.args) == 4 and len(inv.args[3].shape) == 4
        return cls(64 if per_channel else 128)

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[GatedLinearAttentionTpuConfig]:
        return [cls(size) for size in (16, 32, 64, 128)]


def prepare(call: Arguments, cfg: GatedLinearAttentionTpuConfig) -> tuple[Chunk, Walk]:
    """The products of a chunk, and the walk from chunk to chunk."""
    precise = call.q.dtype == jnp.float32
    return Chunk(cfg.chunk_size, lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT), _walk


def _walk(
    step: Step, state: jax.Array, inputs: Arrays, outputs: Arrays, *, reverse: bool
) -> tuple[jax.Array, ...]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, chunks = inputs["q"].shape[:2]

    def kernel(*refs: Any) -> None:
        first, *input_refs = refs[: 1 + len(inputs)]
        *output_refs, last, carried = refs[1 + len(inputs) :]

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            carried[...] = first[...]

        if not reverse:  # the first output: the states before the chunks
            output_refs.pop(0)[...] = carried[...]
        carried[...], found = step(carried[...], *(ref[...] for ref in input_refs))
        for ref, result in zip(output_refs, found, strict=True):
            ref[...] = result.astype(ref.dtype)

        @pl.when(pl.program_id(1) == chunks - 1)
        def _() -> None:
            last[...] = carried[...]

    def chunk_spec(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, *x.shape[2:]),
            lambda row, number: (row, chunks - 1 - number if reverse else number, 0, 0),
        )

    state_spec = pl.BlockSpec((None, *state.shape[1:]), lambda row, number: (row, 0, 0))
    return tuple(
        pl.pallas_call(
            kernel,
            grid=(rows, chunks),
            in_specs=[state_spec, *map(chunk_spec, inputs.values())],
            out_specs=[*map(chunk_spec, outputs.values()), state_spec],
            out_shape=[*outputs.values(), jax.ShapeDtypeStruct(state.shape, state.dtype)],
            scratch_shapes=[pltpu.VMEM(state.shape[1:], state.dtype)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            name=f"gated_linear_attention_{'backward' if reverse else 'forward'}",
        )(state, *inputs.values())
    )


def _dims_fit(inv: Invocation[Any, Any]) -> str | None:
    """key_dim and value_dim that are multiples of 8, at most 256."""
    for name, array in (("key_dim", inv.args[0]), ("value_dim", inv.args[2])):
        size = array.shape[3]
        if size % 8 or size > 256:
            return f"{name} is {size}; it must be a multiple of 8 and at most 256"
    return None


PALLAS_TPU = pallas_implementation(
    prepare,
    name="pallas",
    devices=("tpu",),
    config=GatedLinearAttentionTpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16"), rules=(_dims_fit,)),
)
