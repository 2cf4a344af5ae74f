"""Which rows belong to which group, and how blocks of rows cover them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ejkernel.ops.utils.serialize import is_symbolic

Spans: TypeAlias = tuple[jax.Array, jax.Array]
"""First row of every group, and the row after its last one: two int32 arrays."""


def row_spans(
    group_sizes: jax.Array, rows: int, groups: int, group_offset: jax.Array | int | None = None
) -> Spans:
    """The rows of the groups whose matrices are here.

    Groups follow each other. What reaches beyond the last row is cut off, and a negative size
    counts as zero, so that no size can make a kernel read or write where it must not.

    Args:
        group_sizes: Rows of each group, also of groups whose matrices are elsewhere.
        rows: Rows there are.
        groups: Matrices here.
        group_offset: The group of the first matrix here; 0 if not given.

    Example:
        >>> import jax.numpy as jnp
        >>> starts, ends = row_spans(jnp.array([2, 0, 3, 9]), 8, groups=3, group_offset=1)
        >>> starts.tolist(), ends.tolist()
        ([2, 2, 5], [2, 5, 8])
    """
    sizes = _int32(group_sizes, rows)
    if not is_symbolic(rows) and sizes.shape[0] * rows < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), jnp.int32(rows))
    else:  # sizes that are too large must not add up to a number that is too large for int32
        ends = jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, jnp.int32(rows) - a), sizes)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    if group_offset is None:
        return starts[:groups], ends[:groups]
    first = _int32(jnp.asarray(group_offset), sizes.shape[0] - groups).reshape(())
    return (
        jax.lax.dynamic_slice_in_dim(starts, first, groups),
        jax.lax.dynamic_slice_in_dim(ends, first, groups),
    )


def _int32(numbers: jax.Array, most: int) -> jax.Array:
    """Integers of any dtype, as those from 0 to `most` that are nearest.

    Limits are compared in a dtype that holds them: 1000 as an int8 is -24.
    """
    narrow = numbers.dtype.itemsize < 4
    wide = numbers.astype(jnp.int32) if narrow else numbers
    return jnp.clip(wide, 0, most).astype(jnp.int32)


def rows_of_groups(spans: Spans, rows: int) -> jax.Array:
    """Which rows belong to which group, `(rows, groups)`."""
    row = jnp.arange(rows, dtype=spans[0].dtype)[:, None]
    return (row >= spans[0][None, :]) & (row < spans[1][None, :])


class Steps(NamedTuple):
    """What each step of a grid works on; int32 arrays with one element per step."""

    group: jax.Array  # whose matrix
    block: jax.Array  # which block of rows
    start: jax.Array  # first row of that block that belongs to the group
    end: jax.Array  # the row after the last one; steps that are not needed have none


def with_rows_of_no_group(spans: Spans, rows: int) -> Spans:
    """The same spans between two more: the rows before the first group and after the last."""
    starts, ends = spans
    return (
        jnp.concatenate([jnp.zeros_like(starts[:1]), starts, ends[-1:]]),
        jnp.concatenate([starts[:1], ends, jnp.full_like(ends[-1:], rows)]),
    )


def grid_steps(spans: Spans, rows: int, block_m: int, *, aligned: bool, visit_empty: bool) -> Steps:
    """Every block of every group, one after the other, padded to a number known while tracing.

    Args:
        spans: The rows of each group, in order and without gaps.
        rows: Rows there are.
        block_m: Rows of a block.
        aligned: If true, blocks begin at multiples of ``block_m`` and groups share those at their
            borders. If false, the first block of a group begins at its first row, and ``block`` is
            the row where a block begins.
        visit_empty: If true, groups without rows get one step too.

    Returns:
        As many steps as any group sizes can need. The last ones repeat the last step's group and
        block, without rows.

    Example:
        >>> import jax.numpy as jnp
        >>> spans = (jnp.array([0, 5]), jnp.array([5, 8]))
        >>> steps = grid_steps(spans, rows=8, block_m=4, aligned=True, visit_empty=False)
        >>> [list(map(int, step)) for step in zip(*steps)]  # rows 0-3, row 4, rows 5-7
        [[0, 0, 0, 4], [0, 1, 4, 5], [1, 1, 5, 8]]
    """
    starts, ends = spans
    row_blocks = -(-rows // block_m)
    # Aligned: a border inside a block adds one step. Not aligned: so does the rest of each group.
    most = row_blocks + starts.shape[0] - (1 if aligned else 0)
    first_block = starts // block_m if aligned else jnp.zeros_like(starts)
    origin = jnp.zeros_like(starts) if aligned else starts
    blocks = jnp.where(
        ends > starts, -(-(ends - origin) // block_m) - first_block, 1 if visit_empty else 0
    )
    until = jnp.cumsum(blocks)

    step = jnp.arange(most, dtype=jnp.int32)
    needed = step < until[-1]
    step = jnp.minimum(step, jnp.maximum(until[-1] - 1, 0))
    group = jnp.searchsorted(until, step, side="right").astype(jnp.int32)
    group = jnp.minimum(group, starts.shape[0] - 1)
    number = first_block[group] + step - (until - blocks)[group]
    begin = origin[group] + number * block_m
    start = jnp.maximum(begin, starts[group])
    end = jnp.where(needed, jnp.minimum(begin + block_m, ends[group]), start)
    # A group without rows may lie behind the last row.
    block = jnp.minimum(number, row_blocks - 1) if aligned else begin
    return Steps(group, block.astype(jnp.int32), start, jnp.maximum(start, end))
