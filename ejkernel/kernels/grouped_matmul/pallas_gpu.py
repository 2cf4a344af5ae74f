"""Grouped matrix products for GPU, through Pallas' Triton backend.

Every block of threads computes one tile of the result, and looks up in ``groups.grid_steps`` which
group and which rows that is. A group's first tile begins at its first row, so no two groups share
one. Rows of no group are covered by tiles that multiply nothing and store zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..tile import Tile
from ..triton_blocks import joint, load, part, store
from .groups import Spans, Steps, grid_steps, with_rows_of_no_group


def rows_times_matrices(
    lhs: jax.Array,
    rhs: jax.Array,
    spans: Spans,
    *,
    tile: Tile,
    transpose_rhs: bool = False,
    precision: lax.PrecisionLike = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The product of :func:`.xla.rows_times_matrices`; the tile's sizes are powers of two."""
    rows, depth = lhs.shape
    groups, columns = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    dtype = lhs.dtype if out_dtype is None else jnp.dtype(out_dtype)
    steps = grid_steps(
        with_rows_of_no_group(spans, rows), rows, tile.rows, aligned=False, visit_empty=False
    )

    def body(*refs: Any) -> None:
        (lhs_ref, rhs_ref), steps, out_ref = refs[:2], Steps(*refs[2:6]), refs[6]
        step = pl.program_id(0)
        region, first, end = steps.group[step], steps.tile[step], steps.end[step]
        group = jnp.clip(region - 1, 0, groups - 1)  # region 0: the rows before the first group
        row, my_rows = part(first, tile.rows, end)
        column, my_columns = part(pl.program_id(1) * tile.columns, tile.columns, columns)

        def add(block: Any, total: jax.Array) -> jax.Array:
            inner, there = part(block * tile.depth, tile.depth, depth)
            left = load(lhs_ref.at[row, inner], joint(my_rows, there))
            if transpose_rhs:
                right = load(rhs_ref.at[group, column, inner], joint(my_columns, there))
            else:
                right = load(rhs_ref.at[group, inner, column], joint(there, my_columns))
            total += plgpu.dot(left, right, trans_b=transpose_rhs, precision=precision)
            return total

        has_matrix = (region > 0) & (region <= groups)
        blocks = jnp.where(has_matrix, jnp.int32(pl.cdiv(depth, tile.depth)), jnp.int32(0))
        total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
        total = lax.fori_loop(jnp.int32(0), blocks, add, total)
        store(out_ref.at[row, column], total, joint(my_rows, my_columns))

    call = pl.pallas_call(
        body,
        grid=(steps.group.shape[0], pl.cdiv(columns, tile.columns)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_matmul",
    )
    out: jax.Array = call(lhs, rhs, *steps)
    return out


def transposed_rows_times_rows(
    lhs: jax.Array,
    dout: jax.Array,
    spans: Spans,
    *,
    tile: Tile,
    precision: lax.PrecisionLike = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The sums of :func:`.xla.transposed_rows_times_rows`.

    A block of threads computes ``tile.depth`` by ``tile.columns`` elements of one group's sum,
    ``tile.rows`` rows at a time; how many rows there are it reads from ``spans``.
    """
    depth, columns = lhs.shape[1], dout.shape[1]
    groups = spans[0].shape[0]
    dtype = lhs.dtype if out_dtype is None else jnp.dtype(out_dtype)

    def body(lhs_ref: Any, dout_ref: Any, starts: Any, ends: Any, out_ref: Any) -> None:
        group = pl.program_id(0)
        start, end = starts[group], ends[group]
        inner, my_depth = part(pl.program_id(1) * tile.depth, tile.depth, depth)
        column, my_columns = part(pl.program_id(2) * tile.columns, tile.columns, columns)

        def add(block: Any, total: jax.Array) -> jax.Array:
            row, mine = part(start + block * tile.rows, tile.rows, end)
            left = load(lhs_ref.at[row, inner], joint(mine, my_depth))
            right = load(dout_ref.at[row, column], joint(mine, my_columns))
            total += plgpu.dot(left, right, trans_a=True, precision=precision)
            return total

        blocks = lax.div(end - start + (tile.rows - 1), jnp.int32(tile.rows))
        total = jnp.zeros((tile.depth, tile.columns), jnp.float32)
        total = lax.fori_loop(jnp.int32(0), blocks, add, total)
        store(out_ref.at[group, inner, column], total, joint(my_depth, my_columns))

    call = pl.pallas_call(
        body,
        grid=(groups, pl.cdiv(depth, tile.depth), pl.cdiv(columns, tile.columns)),
        out_shape=jax.ShapeDtypeStruct((groups, depth, columns), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_matmul_rhs_gradient",
    )
    out: jax.Array = call(lhs, dout, *spans)
    return out
