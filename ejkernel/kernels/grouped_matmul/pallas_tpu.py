"""Grouped matrix products for TPU: one grid over the tiles that the groups need.

Which group and which rows a grid step works on is computed beforehand (``groups.grid_steps``) and
prefetched into scalar memory, where the block index maps read it. A tile of rows at the border of
two groups is visited once for each, one visit after the other, so it stays in vector memory between
them. Rows of no group are one more group, whose visits write zeros and multiply nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tile import Tile
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
    """The product of :func:`.xla.rows_times_matrices`; the tile's sizes are multiples of 128."""
    rows, depth = lhs.shape
    groups, columns = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    dtype = lhs.dtype if out_dtype is None else jnp.dtype(out_dtype)
    tile = tile.within(rows, columns, depth)
    steps = grid_steps(
        with_rows_of_no_group(spans, rows), rows, tile.rows, aligned=True, visit_empty=False
    )
    depth_blocks = pl.cdiv(depth, tile.depth)

    def body(*refs: Any) -> None:
        steps, (lhs_ref, rhs_ref, out_ref, total_ref) = Steps(*refs[:4]), refs[4:]
        step, block = pl.program_id(1), pl.program_id(2)
        group = steps.group[step]

        @pl.when(block == 0)
        def _() -> None:
            total_ref[...] = jnp.zeros_like(total_ref)

        @pl.when((group > 0) & (group <= groups) & (steps.end[step] > steps.start[step]))
        def _() -> None:
            left, right = lhs_ref[...], rhs_ref[...]
            if depth % tile.depth:  # what a block holds beyond its array is undefined
                there = depth - block * tile.depth
                left = _below(there, left, axis=1)
                right = _below(there, right, axis=1 if transpose_rhs else 0)
            total_ref[...] += lax.dot_general(
                left,
                right,
                (((1,), (1 if transpose_rhs else 0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )

        @pl.when(block == depth_blocks - 1)
        def _() -> None:
            mine = _rows_of_step(steps, step, tile.rows, tile.columns)
            is_new = (step == 0) | (steps.tile[step] != steps.tile[jnp.maximum(step - 1, 0)])
            before = jnp.where(is_new, 0.0, out_ref[...].astype(jnp.float32))
            out_ref[...] = jnp.where(mine, total_ref[...], before).astype(out_ref.dtype)

    def matrix(group: jax.Array) -> jax.Array:
        return jnp.clip(group - 1, 0, groups - 1)  # group 0 is that of the rows before the first

    rhs_block: tuple[int | None, ...] = (None, tile.depth, tile.columns)
    if transpose_rhs:
        rhs_block = (None, tile.columns, tile.depth)

    def rhs_index(n: Any, s: Any, k: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        return (matrix(group[s]), n, k) if transpose_rhs else (matrix(group[s]), k, n)

    grid = (pl.cdiv(columns, tile.columns), steps.group.shape[0], depth_blocks)
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=grid,
            in_specs=[
                pl.BlockSpec(
                    (tile.rows, tile.depth), lambda n, s, k, group, tile, *_: (tile[s], k)
                ),
                pl.BlockSpec(rhs_block, rhs_index),
            ],
            out_specs=pl.BlockSpec(
                (tile.rows, tile.columns), lambda n, s, k, group, tile, *_: (tile[s], n)
            ),
            scratch_shapes=[pltpu.VMEM((tile.rows, tile.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpret,
        name="grouped_matmul",
    )
    out: jax.Array = call(*steps, lhs, rhs)
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

    ``tile.depth`` and ``tile.columns`` are those of the result, ``tile.rows`` what is summed at
    once. A group's sum stays in scratch memory while the grid walks through its tiles of rows.
    """
    (rows, depth), columns = lhs.shape, dout.shape[1]
    groups = spans[0].shape[0]
    dtype = lhs.dtype if out_dtype is None else jnp.dtype(out_dtype)
    tile = tile.within(rows, columns, depth)
    steps = grid_steps(spans, rows, tile.rows, aligned=True, visit_empty=True)
    last = steps.group.shape[0] - 1

    def body(*refs: Any) -> None:
        steps, (lhs_ref, dout_ref, out_ref, total_ref) = Steps(*refs[:4]), refs[4:]
        step = pl.program_id(2)
        group = steps.group[step]

        @pl.when((step == 0) | (group != steps.group[jnp.maximum(step - 1, 0)]))
        def _() -> None:
            total_ref[...] = jnp.zeros_like(total_ref)

        @pl.when(steps.end[step] > steps.start[step])
        def _() -> None:
            # Both sides are zeroed: rows that are not this group's may hold an infinity.
            left = _keep(_rows_of_step(steps, step, tile.rows, tile.depth), lhs_ref[...])
            right = _keep(_rows_of_step(steps, step, tile.rows, tile.columns), dout_ref[...])
            total_ref[...] += lax.dot_general(
                left,
                right,
                (((0,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )

        @pl.when((step == last) | (group != steps.group[jnp.minimum(step + 1, last)]))
        def _() -> None:
            out_ref[...] = total_ref[...].astype(out_ref.dtype)

    grid = (pl.cdiv(columns, tile.columns), pl.cdiv(depth, tile.depth), last + 1)
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=grid,
            in_specs=[
                pl.BlockSpec(
                    (tile.rows, tile.depth), lambda n, k, s, group, tile, *_: (tile[s], k)
                ),
                pl.BlockSpec(
                    (tile.rows, tile.columns), lambda n, k, s, group, tile, *_: (tile[s], n)
                ),
            ],
            out_specs=pl.BlockSpec(
                (None, tile.depth, tile.columns), lambda n, k, s, group, *_: (group[s], k, n)
            ),
            scratch_shapes=[pltpu.VMEM((tile.depth, tile.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((groups, depth, columns), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="grouped_matmul_rhs_gradient",
    )
    out: jax.Array = call(*steps, lhs, dout)
    return out


def _rows_of_step(steps: Steps, step: Any, tile_rows: int, width: int) -> jax.Array:
    """Which elements of a block ``(tile_rows, width)`` lie in rows that the step works on."""
    row = lax.broadcasted_iota(jnp.int32, (tile_rows, width), 0) + steps.tile[step] * tile_rows
    return (row >= steps.start[step]) & (row < steps.end[step])


def _below(limit: Any, x: jax.Array, axis: int) -> jax.Array:
    return _keep(lax.broadcasted_iota(jnp.int32, x.shape, axis) < limit, x)


def _keep(mask: jax.Array, x: jax.Array) -> jax.Array:
    # Masks have the layout of 32-bit arrays; older TPUs cannot select narrower ones with them.
    return jnp.where(mask, x.astype(jnp.float32), 0.0).astype(x.dtype)
