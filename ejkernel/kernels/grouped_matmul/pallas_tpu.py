"""Grouped matrix products for TPU: one grid over the blocks that the groups need.

Which group and which rows a grid step works on is computed beforehand (``groups.grid_steps``) and
prefetched into scalar memory, where the block index maps read it. A block of rows at the border of
two groups is visited once for each, one visit after the other, so it stays in vector memory between
them. Rows of no group are one more group, whose visits write zeros and multiply nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Supports

from ..dot import dot
from ..limits import TpuBlocks
from ..tpu_blocks import clear, keep, keep_inside
from .arguments import Arguments
from .groups import Steps, grid_steps, with_rows_of_no_group
from .products import implementation, no_float64_result, one_at_a_time, rows_for


@dataclasses.dataclass(frozen=True)
class GroupedMatmulTpuBlocks(TpuBlocks):
    """Blocks of a product `(m, k) @ (k, n)`: multiples of 128, cut to axes that are smaller.

    In the gradient of `rhs` the result has blocks of `k` and `n`, and `m` is summed over.
    """


@dataclasses.dataclass(frozen=True)
class GroupedMatmulTpuConfig:
    """Blocks of the result, of the gradient of `lhs`, and of the gradient of `rhs`."""

    forward: GroupedMatmulTpuBlocks = GroupedMatmulTpuBlocks()
    dlhs: GroupedMatmulTpuBlocks = GroupedMatmulTpuBlocks()
    drhs: GroupedMatmulTpuBlocks = GroupedMatmulTpuBlocks()

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        """Not measured: what fits twice into 16 MiB of vector memory, and rows as groups have."""
        wide = inv.args[0].dtype.itemsize > 2
        block_m = rows_for(inv, smallest=128, largest=256 if wide else 512)
        blocks = GroupedMatmulTpuBlocks(block_m, 512 if wide else 1024, 512)
        return cls(blocks, blocks, GroupedMatmulTpuBlocks(block_m, 512, 512))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        sides = ((256, 256), (512, 512), (1024, 512), (512, 1024), (1024, 1024))
        blocks = [GroupedMatmulTpuBlocks(m, n, k) for m in (128, 256, 512) for n, k in sides]
        return one_at_a_time(cls.heuristic(inv), blocks)


def times_matrices(
    call: Arguments, blocks: GroupedMatmulTpuBlocks, interpret: bool = False
) -> jax.Array:
    """The product of :func:`.xla.times_matrices`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, columns, depth = call.sizes
    block_m, block_n, block_k = blocks.within(rows, columns, depth)
    groups, depth_blocks = call.rhs.shape[0], pl.cdiv(depth, block_k)
    steps = grid_steps(
        with_rows_of_no_group(call.spans, rows), rows, block_m, aligned=True, visit_empty=False
    )

    def body(*refs: Any) -> None:
        steps, (lhs_ref, rhs_ref, out_ref, total_ref) = Steps(*refs[:4]), refs[4:]
        step, k = pl.program_id(1), pl.program_id(2)
        group = steps.group[step]
        clear(k == 0, total_ref)

        @pl.when((group > 0) & (group <= groups) & (steps.end[step] > steps.start[step]))
        def _() -> None:
            left = keep_inside(lhs_ref[...], 1, k, depth)
            right = keep_inside(rhs_ref[...], call.summed[1], k, depth)
            total_ref[...] += dot(left, right, call.summed, precision=call.precision)

        @pl.when(k == depth_blocks - 1)
        def _() -> None:
            mine = _rows_of_step(steps, step, block_m, block_n)
            is_new = (step == 0) | (steps.block[step] != steps.block[jnp.maximum(step - 1, 0)])
            before = jnp.where(is_new, 0.0, out_ref[...].astype(jnp.float32))
            out_ref[...] = jnp.where(mine, total_ref[...], before).astype(out_ref.dtype)

    def rhs_index(n: Any, s: Any, k: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        matrix = jnp.clip(group[s] - 1, 0, groups - 1)  # group 0: the rows before the first
        return (matrix, n, k) if call.transpose_rhs else (matrix, k, n)

    rhs_block = (block_n, block_k) if call.transpose_rhs else (block_k, block_n)
    kernel = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(columns, block_n), steps.group.shape[0], depth_blocks),
            in_specs=[
                pl.BlockSpec((block_m, block_k), lambda n, s, k, group, block, *_: (block[s], k)),
                pl.BlockSpec((None, *rhs_block), rhs_index),
            ],
            out_specs=pl.BlockSpec(
                (block_m, block_n), lambda n, s, k, group, block, *_: (block[s], n)
            ),
            scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, columns), call.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpret,
        name="grouped_matmul",
    )
    out: jax.Array = kernel(*steps, call.lhs, call.rhs)
    return out


def matrix_gradients(
    call: Arguments, dout: jax.Array, blocks: GroupedMatmulTpuBlocks, interpret: bool = False
) -> jax.Array:
    """The sums of :func:`.xla.matrix_gradients`.

    A group's sum stays in scratch memory while the grid walks through its blocks of rows.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    lefts, rights = call.for_drhs(dout)
    (rows, depth), columns = lefts.shape, rights.shape[1]
    block_m, block_n, block_k = blocks.within(rows, columns, depth)
    steps = grid_steps(call.spans, rows, block_m, aligned=True, visit_empty=True)
    last = steps.group.shape[0] - 1

    def body(*refs: Any) -> None:
        steps, (left_ref, right_ref, out_ref, total_ref) = Steps(*refs[:4]), refs[4:]
        step = pl.program_id(2)
        group = steps.group[step]
        clear((step == 0) | (group != steps.group[jnp.maximum(step - 1, 0)]), total_ref)

        @pl.when(steps.end[step] > steps.start[step])
        def _() -> None:
            # Both sides are zeroed: rows that are not this group's may hold an infinity.
            left = keep(_rows_of_step(steps, step, block_m, block_k), left_ref[...])
            right = keep(_rows_of_step(steps, step, block_m, block_n), right_ref[...])
            total_ref[...] += dot(left, right, (0, 0), precision=call.precision)

        @pl.when((step == last) | (group != steps.group[jnp.minimum(step + 1, last)]))
        def _() -> None:
            out_ref[...] = total_ref[...].astype(out_ref.dtype)

    kernel = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(columns, block_n), pl.cdiv(depth, block_k), last + 1),
            in_specs=[
                pl.BlockSpec((block_m, block_k), lambda n, k, s, group, block, *_: (block[s], k)),
                pl.BlockSpec((block_m, block_n), lambda n, k, s, group, block, *_: (block[s], n)),
            ],
            out_specs=pl.BlockSpec(
                (None, block_k, block_n), lambda n, k, s, group, *_: (group[s], k, n)
            ),
            scratch_shapes=[pltpu.VMEM((block_k, block_n), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(call.rhs.shape, call.rhs.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="grouped_matmul_rhs_gradient",
    )
    out: jax.Array = kernel(*steps, lefts, rights)
    return out


def _rows_of_step(steps: Steps, step: Any, block_m: int, width: int) -> jax.Array:
    """Which elements of a block `(block_m, width)` lie in rows that the step works on."""
    row = lax.broadcasted_iota(jnp.int32, (block_m, width), 0) + steps.block[step] * block_m
    return (row >= steps.start[step]) & (row < steps.end[step])


PALLAS_TPU = implementation(
    times_matrices,
    matrix_gradients,
    narrow=True,
    name="pallas",
    devices=("tpu",),
    config=GroupedMatmulTpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16"), rules=(no_float64_result,)),
)
