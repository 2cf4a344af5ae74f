"""Grouped matrix products for GPU, through Pallas' Triton backend.

Every block of threads computes one block of the result, and looks up in ``groups.grid_steps`` which
group and which rows that is. A group's first block begins at its first row, so no two groups share
one. Rows of no group are covered by blocks that multiply nothing and store zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Supports

from ..limits import TritonBlocks
from ..triton_blocks import compiler_params, joint, load, part, products, store
from .arguments import Arguments
from .groups import Steps, grid_steps, with_rows_of_no_group
from .products import implementation, no_float64_result, one_at_a_time, rows_for


@dataclasses.dataclass(frozen=True)
class GroupedMatmulGpuBlocks(TritonBlocks):
    """Blocks of a product `(m, k) @ (k, n)`, powers of two, and how its kernel is launched.

    In the gradient of `rhs` the result has blocks of `k` and `n`, and `m` is summed over.
    """


@dataclasses.dataclass(frozen=True)
class GroupedMatmulGpuConfig:
    """Blocks of the result, of the gradient of `lhs`, and of the gradient of `rhs`."""

    forward: GroupedMatmulGpuBlocks = GroupedMatmulGpuBlocks()
    dlhs: GroupedMatmulGpuBlocks = GroupedMatmulGpuBlocks()
    drhs: GroupedMatmulGpuBlocks = GroupedMatmulGpuBlocks(block_m=32, block_k=128)

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        """Not measured: blocks that neither spill registers nor exceed an A100's shared memory."""
        block_m = rows_for(inv, smallest=16, largest=128)
        block_k = 32 if inv.args[0].dtype.itemsize > 2 else 64
        blocks = GroupedMatmulGpuBlocks(block_m, 128, block_k, num_warps=8 if block_m == 128 else 4)
        return cls(blocks, blocks)

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        sizes = ((16, 128), (32, 128), (64, 64), (64, 128), (128, 64))
        choices = [(*size, 4) for size in sizes] + [(128, 128, 8), (64, 256, 8)]
        blocks = [GroupedMatmulGpuBlocks(m, n, k, w) for m, n, w in choices for k in (32, 64)]
        return one_at_a_time(cls.heuristic(inv), blocks)


def times_matrices(
    call: Arguments, blocks: GroupedMatmulGpuBlocks, interpret: bool = False
) -> jax.Array:
    """The product of :func:`.xla.times_matrices`."""
    from jax.experimental import pallas as pl

    rows, columns, depth = call.sizes
    groups, transposed = call.rhs.shape[0], call.transpose_rhs
    regions = with_rows_of_no_group(call.spans, rows)
    steps = grid_steps(regions, rows, blocks.block_m, aligned=False, visit_empty=False)

    def body(*refs: Any) -> None:
        (lhs_ref, rhs_ref), steps, out_ref = refs[:2], Steps(*refs[2:6]), refs[6]
        step = pl.program_id(0)
        region, first, end = steps.group[step], steps.block[step], steps.end[step]
        group = jnp.clip(region - 1, 0, groups - 1)  # region 0: the rows before the first group
        row, my_rows = part(first, blocks.block_m, end)
        column, my_columns = part(pl.program_id(1) * blocks.block_n, blocks.block_n, columns)
        has_matrix = (region > 0) & (region <= groups)
        (total,) = products(
            lambda inner: lhs_ref.at[row, inner],
            [lambda i: rhs_ref.at[(group, column, i) if transposed else (group, i, column)]],
            (my_rows, my_columns),
            depth,
            blocks,
            steps=jnp.where(has_matrix, jnp.int32(pl.cdiv(depth, blocks.block_k)), jnp.int32(0)),
            transposed=transposed,
            precision=call.precision,
        )
        store(out_ref.at[row, column], total, joint(my_rows, my_columns))

    kernel = pl.pallas_call(
        body,
        grid=(steps.group.shape[0], pl.cdiv(columns, blocks.block_n)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), call.dtype),
        compiler_params=compiler_params(blocks),
        interpret=interpret,
        name="grouped_matmul",
    )
    out: jax.Array = kernel(call.lhs, call.rhs, *steps)
    return out


def matrix_gradients(
    call: Arguments, dout: jax.Array, blocks: GroupedMatmulGpuBlocks, interpret: bool = False
) -> jax.Array:
    """The sums of :func:`.xla.matrix_gradients`.

    A block of threads computes `block_k` by `block_n` elements of one group's sum, `block_m` rows
    at a time; how many rows there are it reads from the group's span.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    lefts, rights = call.for_drhs(dout)
    groups, depth, columns = call.rhs.shape

    def body(left_ref: Any, right_ref: Any, starts: Any, ends: Any, out_ref: Any) -> None:
        group = pl.program_id(0)
        start, end = starts[group], ends[group]
        inner, my_depth = part(pl.program_id(1) * blocks.block_k, blocks.block_k, depth)
        column, my_columns = part(pl.program_id(2) * blocks.block_n, blocks.block_n, columns)

        def add(m: Any, total: jax.Array) -> jax.Array:
            row, mine = part(start + m * blocks.block_m, blocks.block_m, end)
            left = load(left_ref.at[row, inner], joint(mine, my_depth))
            right = load(right_ref.at[row, column], joint(mine, my_columns))
            total += plgpu.dot(left, right, trans_a=True, precision=call.precision)
            return total

        steps_m = lax.div(end - start + (blocks.block_m - 1), jnp.int32(blocks.block_m))
        total = jnp.zeros((blocks.block_k, blocks.block_n), jnp.float32)
        total = lax.fori_loop(jnp.int32(0), steps_m, add, total)
        store(out_ref.at[group, inner, column], total, joint(my_depth, my_columns))

    kernel = pl.pallas_call(
        body,
        grid=(groups, pl.cdiv(depth, blocks.block_k), pl.cdiv(columns, blocks.block_n)),
        out_shape=jax.ShapeDtypeStruct(call.rhs.shape, call.rhs.dtype),
        compiler_params=compiler_params(blocks),
        interpret=interpret,
        name="grouped_matmul_rhs_gradient",
    )
    out: jax.Array = kernel(lefts, rights, *call.spans)
    return out


PALLAS_GPU = implementation(
    times_matrices,
    matrix_gradients,
    narrow=True,
    name="triton",
    devices=("gpu",),
    config=GroupedMatmulGpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16", "float16"), rules=(no_float64_result,)),
)
