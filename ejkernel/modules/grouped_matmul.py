"""`grouped_matmul`: every row times the matrix of its group, as in a mixture of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.arguments import (
    checked_array,
    checked_flag,
    checked_floating,
    checked_floating_type,
    checked_integers,
    checked_precision,
    given_options,
    refuse_empty,
    shown,
)
from ejkernel.kernels.grouped_matmul import GroupedMatmul, GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.groups import row_spans

_kernel = GroupedMatmul()
_NAME = "grouped_matmul"


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    precision: str | jax.lax.Precision | None = None,
    group_offset: jax.Array | int | None = None,
    existing_out: jax.Array | None = None,
    implementation: str | None = None,
    cfg: GroupedMatmulConfig | None = None,
) -> jax.Array:
    r"""Multiply the rows of each group by the group's own matrix.

    The rows of `lhs` are sorted by group: the first `group_sizes[0]` rows are multiplied by
    `rhs[0]`, the next `group_sizes[1]` by `rhs[1]`, and so on. Groups may be empty. Rows beyond
    the sum of the sizes give zeros and have zero gradients. Differentiable in `lhs` and `rhs` (and
    `existing_out`).

    Args:
      lhs: rows, `(m, k)`.
      rhs: a matrix per group, `(groups, k, n)`; `(groups, n, k)` with `transpose_rhs`. Of the same
        dtype as `lhs`.
      group_sizes: rows of each group, `(groups,)`, integers. Sizes that are known (not traced) are
        checked: a negative one, or a sum of more than `m`, is a `ValueError`. Inside `jit` they
        cannot be: there a negative size counts as 0, and what reaches beyond row `m` is cut off.
      transpose_rhs: use each matrix transposed.
      preferred_element_type: dtype of the result; by default that of the inputs. Sums are kept in
        float32 (float64 for float64) in any case.
      precision: of the products, as in `jax.lax.dot`: `"default"`, `"high"`, `"highest"`.
      group_offset: the group that `rhs[0]` belongs to, where `rhs` holds only some of the groups
        (experts spread over devices). `group_sizes` then lists all groups, and rows of groups
        without a matrix here give zeros, so the shards' results add up. At most the number of
        groups that are elsewhere; a larger one is a `ValueError`, or inside `jit` cut to that.
      existing_out: `(m, n)`; rows without a matrix take it instead of zeros.
      implementation: demand one (`"xla"`, `"pallas"`, `"triton"`); by default the device's best.
      cfg: tiles; by default the tuned ones of the store, else a heuristic.

    Returns:
      `(m, n)`.

    >>> import jax, jax.numpy as jnp
    >>> tokens, experts = jnp.ones((6, 8)), jnp.ones((3, 8, 4))
    >>> grouped_matmul(tokens, experts, jnp.array([2, 0, 3])).sum(axis=1).tolist()
    [32.0, 32.0, 32.0, 32.0, 32.0, 0.0]
    """
    lhs, rhs = checked_floating(_NAME, "lhs", lhs), checked_floating(_NAME, "rhs", rhs)
    group_sizes = checked_integers(_NAME, "group_sizes", group_sizes)
    transpose_rhs = checked_flag(_NAME, "transpose_rhs", transpose_rhs)
    if group_offset is not None:
        group_offset = _checked_offset(group_offset)
    if existing_out is not None:
        existing_out = checked_floating(_NAME, "existing_out", existing_out)
    _check_shapes(lhs, rhs, group_sizes, transpose_rhs, group_offset)
    options: dict[str, Any] = {}
    if transpose_rhs:
        options["transpose_rhs"] = True
    if preferred_element_type is not None:
        options["preferred_element_type"] = checked_floating_type(
            _NAME, "preferred_element_type", preferred_element_type
        )
    if precision is not None:
        options["precision"] = checked_precision(_NAME, precision)
    if group_offset is not None:
        options["group_offset"] = group_offset
    options |= given_options(_NAME, implementation, cfg)
    out = _kernel(lhs, rhs, group_sizes, **options)
    if existing_out is None:
        return out
    if existing_out.shape != out.shape:
        raise ValueError(
            f"grouped_matmul: existing_out has shape {existing_out.shape}; it must have that of "
            f"the result, {out.shape}"
        )
    starts, ends = row_spans(group_sizes, lhs.shape[0], rhs.shape[0], options.get("group_offset"))
    row = jnp.arange(lhs.shape[0], dtype=starts.dtype)[:, None]
    computed = (row >= starts[0]) & (row < ends[-1])
    return jnp.where(computed, out, existing_out.astype(out.dtype))


def _check_shapes(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    transpose_rhs: bool,
    group_offset: jax.Array | None,
) -> None:
    for name, array, axes in (
        ("lhs", lhs, "(m, k)"),
        ("rhs", rhs, "(groups, n, k)" if transpose_rhs else "(groups, k, n)"),
        ("group_sizes", group_sizes, "(groups,)"),
    ):
        if array.ndim != axes.count(",") + (name != "group_sizes"):
            raise ValueError(f"grouped_matmul: {name} has shape {array.shape}; it must be {axes}")
        refuse_empty(_NAME, name, array)
    if lhs.dtype != rhs.dtype:
        raise TypeError(
            f"grouped_matmul: lhs is {lhs.dtype} and rhs is {rhs.dtype}; they must have one dtype "
            "(cast one; preferred_element_type sets that of the result)"
        )
    shared = rhs.shape[2 if transpose_rhs else 1]
    if lhs.shape[1] != shared:
        other = "transposed " if transpose_rhs else ""
        raise ValueError(
            f"grouped_matmul: lhs {lhs.shape} has {lhs.shape[1]} columns and the matrices of "
            f"{other}rhs {rhs.shape} have {shared} rows; these must be equal"
        )
    _check_groups(group_sizes, lhs.shape[0], rhs.shape[0], group_offset)


def _check_groups(
    group_sizes: jax.Array, rows: int, groups: int, group_offset: jax.Array | None
) -> None:
    listed = group_sizes.shape[0]
    if group_offset is None and listed != groups:
        raise ValueError(
            f"grouped_matmul: group_sizes has {listed} groups and rhs {groups} matrices; these "
            "must be equal (or give group_offset, if rhs holds some of the groups only)"
        )
    if listed < groups:
        raise ValueError(
            f"grouped_matmul: group_sizes has {listed} groups, and rhs has more matrices, {groups}"
        )
    if group_offset is not None:
        _check_offset(group_offset, listed - groups)
    if not isinstance(group_sizes, jax.core.Tracer):
        sizes = np.asarray(group_sizes).astype(np.int64)
        if sizes.min() < 0:
            raise ValueError(f"grouped_matmul: group_sizes has a negative size: {sizes.tolist()}")
        if sizes.sum() > rows:
            raise ValueError(
                f"grouped_matmul: group_sizes add up to {sizes.sum()}, but lhs has {rows} rows"
            )


def _checked_offset(group_offset: Any) -> jax.Array:
    """One number, which may be traced."""
    if isinstance(group_offset, int) and not isinstance(group_offset, bool):
        group_offset = np.asarray(group_offset)
    offset = checked_array(_NAME, "group_offset", group_offset)
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(f"grouped_matmul: group_offset must be an integer, got {shown(offset)}")
    if offset.size != 1:
        raise ValueError(f"grouped_matmul: group_offset has shape {offset.shape}; it is one number")
    return offset.reshape(())


def _check_offset(group_offset: jax.Array, largest: int) -> None:
    if not isinstance(group_offset, jax.core.Tracer):
        offset = int(group_offset)
        if not 0 <= offset <= largest:
            raise ValueError(
                f"grouped_matmul: group_offset is {offset}; with these group_sizes and rhs it must "
                f"be from 0 to {largest}"
            )
