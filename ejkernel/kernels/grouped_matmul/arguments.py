"""What a call of the grouped product may look like: checked, and as implementations read it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments import (
    check_axes,
    check_one_dtype,
    checked_flag,
    checked_floating,
    checked_floating_type,
    checked_integers,
    checked_precision,
)
from .groups import Spans, row_spans

_NAME = "grouped_matmul"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One grouped product: that of a call, or the one that gives the gradient of its `lhs`."""

    lhs: jax.Array  # (m, k)
    rhs: jax.Array  # (groups, k, n), transposed (groups, n, k)
    spans: Spans
    dtype: jnp.dtype  # of the result
    transpose_rhs: bool = False
    precision: Any = None

    @staticmethod
    def of(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        group_offset: jax.Array | int | None = None,
        **options: Any,
    ) -> Arguments:
        """From the arguments of the kernel."""
        spans = row_spans(group_sizes, lhs.shape[0], rhs.shape[0], group_offset)
        dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
        return Arguments(lhs, rhs, spans, jnp.dtype(dtype), **options)

    def for_dlhs(self, dout: jax.Array) -> Arguments:
        """The product that gives the gradient of `lhs`: rows of `dout`, other matrices."""
        return dataclasses.replace(
            self, lhs=dout, transpose_rhs=not self.transpose_rhs, dtype=self.lhs.dtype
        )

    def for_drhs(self, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gradient of each matrix is the product of these two, the first one transposed."""
        return (dout, self.lhs) if self.transpose_rhs else (self.lhs, dout)

    @property
    def summed(self) -> tuple[int, int]:
        """The axes of `lhs` and of a matrix that a product sums over."""
        return 1, 1 if self.transpose_rhs else 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """`m`, `n` and `k` of the product."""
        m, k = self.lhs.shape
        return m, self.rhs.shape[1 if self.transpose_rhs else 2], k


def checked(
    lhs: Any, rhs: Any, group_sizes: Any, transpose: Any, dtype: Any, precision: Any, offset: Any
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong."""
    lhs, rhs = checked_floating(_NAME, "lhs", lhs), checked_floating(_NAME, "rhs", rhs)
    group_sizes = checked_integers(_NAME, "group_sizes", group_sizes)
    options: dict[str, Any] = {}
    if checked_flag(_NAME, "transpose_rhs", transpose):
        options["transpose_rhs"] = True
    if dtype is not None:
        kind = checked_floating_type(_NAME, "preferred_element_type", dtype)
        options["preferred_element_type"] = kind
    if precision is not None:
        options["precision"] = checked_precision(_NAME, precision)
    matrices = "groups n k" if "transpose_rhs" in options else "groups k n"
    check_axes(_NAME, {"lhs": (lhs, "m k"), "rhs": (rhs, matrices)})
    check_axes(_NAME, {"group_sizes": (group_sizes, "groups")})
    check_one_dtype(_NAME, {"lhs": lhs, "rhs": rhs})
    _check_sizes(group_sizes, lhs.shape[0])
    listed, groups = group_sizes.shape[0], rhs.shape[0]
    if offset is not None:
        options["group_offset"] = _checked_offset(offset, listed, groups)
    elif listed != groups:
        raise ValueError(
            f"{_NAME}: group_sizes has {listed} groups and rhs {groups} matrices; these must be "
            "equal (or give group_offset, if rhs holds some of the groups only)"
        )
    return (lhs, rhs, group_sizes), options


def checked_existing_out(existing_out: Any, shape: tuple[int, int]) -> jax.Array:
    """Rows for where there is no matrix, of the shape of the result."""
    rows = checked_floating(_NAME, "existing_out", existing_out)
    result = jax.ShapeDtypeStruct(shape, rows.dtype)
    check_axes(_NAME, {"the result": (result, "m n"), "existing_out": (rows, "m n")})
    return rows


def _check_sizes(group_sizes: jax.Array, rows: int) -> None:
    """Sizes that are known must be possible ones."""
    if isinstance(group_sizes, jax.core.Tracer):
        return
    sizes = np.asarray(group_sizes).astype(np.int64)
    if sizes.min() < 0:
        raise ValueError(f"{_NAME}: group_sizes has a negative size: {sizes.tolist()}")
    if sizes.sum() > rows:
        raise ValueError(f"{_NAME}: group_sizes add up to {sizes.sum()}, but lhs has {rows} rows")


def _checked_offset(group_offset: Any, listed: int, groups: int) -> jax.Array:
    """One number, which may be traced."""
    if isinstance(group_offset, int) and not isinstance(group_offset, bool):
        group_offset = np.asarray(group_offset)
    offset = checked_integers(_NAME, "group_offset", group_offset)
    if offset.size != 1:
        raise ValueError(f"{_NAME}: group_offset has shape {offset.shape}; it is one number")
    if listed < groups:
        raise ValueError(
            f"{_NAME}: group_sizes has {listed} groups, and rhs has more matrices, {groups}"
        )
    if not isinstance(offset, jax.core.Tracer) and not 0 <= int(offset.item()) <= listed - groups:
        raise ValueError(
            f"{_NAME}: group_offset is {offset.item()}; with these group_sizes and rhs it must be "
            f"from 0 to {listed - groups}"
        )
    return offset.reshape(())
