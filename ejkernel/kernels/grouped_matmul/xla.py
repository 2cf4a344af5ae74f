r"""Grouped matrix products in plain JAX: a loop over the groups that have rows.

With :math:`R_g` the rows of group :math:`g`,

.. math::
    \mathrm{out}_i = \mathrm{lhs}_i \, W_g \;\; (i \in R_g), \qquad
    \mathrm{dW}_g = \sum_{i \in R_g} \mathrm{lhs}_i^T \, \mathrm{dout}_i ,

and the gradient of ``lhs`` is the first product again, with :math:`W_g^T`.

A group is walked through in tiles of ``tile_rows`` rows; what is left of it goes into the smallest
power of two that holds it, so a group of 100 rows costs a product of 128 and not of 512. A tile may
reach beyond its group: of the first product such rows are not stored, of the second they are zeroed
before it. Groups without rows cost nothing, not even reading their matrix.

Products of low-precision inputs are computed from float32 copies of the tiles: XLA's CPU backend
has no faster product for them, and sums stay exact.

Example:
    >>> import jax.numpy as jnp
    >>> spans = (jnp.array([0, 3]), jnp.array([3, 5]))
    >>> lhs, rhs = jnp.ones((6, 2)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
    >>> rows_times_matrices(lhs, rhs, spans, tile_rows=4)[:, 0].tolist()
    [1.0, 1.0, 1.0, 2.0, 2.0, 0.0]
    >>> transposed_rows_times_rows(lhs, lhs, spans, tile_rows=4)[:, 0, 0].tolist()
    [3.0, 2.0]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.core.varying import vary_alike

from ..dtypes import accumulation_dtype
from ..slicing import put_in_dim, take_in_dim
from .groups import Spans

Contracted: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

# A product with fewer rows than this takes as long as one with this many.
SMALLEST_TILE = 8

# With at most so many rows in all, the gradient of the matrices is written in one product.
FEW_ROWS = 32


def rows_times_matrices(
    lhs: jax.Array,
    rhs: jax.Array,
    spans: Spans,
    *,
    tile_rows: int,
    transpose_rhs: bool = False,
    precision: lax.PrecisionLike = None,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """``lhs[i] @ rhs[g]`` for every row ``i`` of group ``g``; zeros for rows of no group.

    Args:
        lhs: Rows, ``(m, k)``.
        rhs: One matrix per group, ``(groups, k, n)``, or ``(groups, n, k)`` if transposed.
        spans: The rows of each group.
        tile_rows: Most rows in one product.
        transpose_rhs: If true, the matrices are used transposed.
        precision: Of the products, as in ``jax.lax.dot``.
        out_dtype: Of the result; that of the inputs if not given.

    Returns:
        ``(m, n)``.
    """
    rows, columns = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    dtype = lhs.dtype if out_dtype is None else jnp.dtype(out_dtype)
    contracted = ((1,), (1 if transpose_rhs else 0,))
    sizes = _tile_sizes(tile_rows, rows)

    if rhs.shape[0] == 1:
        product = partial(_product, _wide(lhs), _wide(rhs[0]), contracted, precision, dtype)
        return _if_all_rows(spans, rows, product, lambda mine: jnp.where(mine, product(), 0))

    def add_group(group: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        matrix = _wide(take_in_dim(rhs, group, 1)[0])

        def add_tile(size: int, first: jax.Array, out: jax.Array) -> jax.Array:
            at, mine = _tile(first, end, size, rows)
            tile = _wide(take_in_dim(lhs, at, size))
            product = _product(tile, matrix, contracted, precision, dtype)
            before = take_in_dim(out, at, size)
            return put_in_dim(out, jnp.where(mine, product, before), at)

        return _over_tiles(start, end, sizes, add_tile, out)

    zeros = vary_alike(jnp.zeros((rows, columns), dtype), lhs, rhs, spans)
    return _over_groups(spans, add_group, zeros)


def transposed_rows_times_rows(
    lhs: jax.Array,
    dout: jax.Array,
    spans: Spans,
    *,
    tile_rows: int,
    precision: lax.PrecisionLike = None,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """The sum of ``lhs[i]ᵀ dout[i]`` over the rows of each group; zeros for groups without rows.

    Args:
        lhs: Rows, ``(m, k)``.
        dout: Rows, ``(m, n)``.
        spans: The rows of each group.
        tile_rows: Most rows in one product.
        precision: Of the products, as in ``jax.lax.dot``.
        out_dtype: Of the result; that of the inputs if not given.

    Returns:
        ``(groups, k, n)``.
    """
    rows, groups = lhs.shape[0], spans[0].shape[0]
    dtype = lhs.dtype if out_dtype is None else jnp.dtype(out_dtype)
    wide = accumulation_dtype(dtype)
    shape = (lhs.shape[1], dout.shape[1])

    if groups == 1:

        def product_of(left: jax.Array, right: jax.Array) -> jax.Array:
            return _product(left, right, ((0,), (0,)), precision, dtype)[None]

        def of_some(mine: jax.Array) -> jax.Array:
            return product_of(jnp.where(mine, _wide(lhs), 0), jnp.where(mine, _wide(dout), 0))

        return _if_all_rows(spans, rows, lambda: product_of(_wide(lhs), _wide(dout)), of_some)

    if rows <= FEW_ROWS:
        # The matrices that are written take longer than the products: those of all groups in one.
        row = jnp.arange(rows, dtype=spans[0].dtype)[:, None]
        mine = (row >= spans[0][None, :]) & (row < spans[1][None, :])
        # In the product of all groups a zero on the left does not hide an infinity on the right. So
        # that is moved to the left, where the rows of other groups have zeros of their own.
        finite = jnp.all(jnp.isfinite(dout), axis=1, keepdims=True)
        left = jnp.where(finite, _wide(lhs), jnp.nan)
        spread = jnp.where(mine[:, :, None], left[:, None, :], 0)
        right = jnp.where(finite & jnp.any(mine, 1, keepdims=True), _wide(dout), 0)
        return _product(spread, right, ((0,), (0,)), precision, dtype)

    def add_group(group: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        def product(size: int, first: jax.Array) -> jax.Array:
            at, mine = _tile(first, end, size, rows)
            # Both sides are zeroed: a row of another group may hold an infinity.
            left = jnp.where(mine, _wide(take_in_dim(lhs, at, size)), 0)
            right = jnp.where(mine, _wide(take_in_dim(dout, at, size)), 0)
            return _product(left, right, ((0,), (0,)), precision, wide)

        def add_in_place(size: int, first: jax.Array, out: jax.Array) -> jax.Array:
            total = take_in_dim(out, group, 1)[0] + product(size, first)
            return _set_matrix(out, group, total)

        def add_beside(size: int, first: jax.Array, total: jax.Array) -> jax.Array:
            return total + product(size, first)

        sizes = _tile_sizes(tile_rows, rows)
        if dtype == wide:
            return _over_tiles(start, end, sizes, add_in_place, out)
        total = _over_tiles(start, end, sizes, add_beside, jnp.zeros_like(out[0], wide))
        return _set_matrix(out, group, total.astype(dtype))

    zeros = vary_alike(jnp.zeros((groups, *shape), dtype), lhs, dout, spans)
    return _over_groups(spans, add_group, zeros)


def _product(
    left: jax.Array,
    right: jax.Array,
    contracted: Contracted,
    precision: lax.PrecisionLike,
    dtype: jnp.dtype,
) -> jax.Array:
    product = lax.dot_general(
        left,
        right,
        (contracted, ((), ())),
        precision=precision,
        preferred_element_type=accumulation_dtype(dtype),
    )
    return product.astype(dtype)


def _if_all_rows(
    spans: Spans,
    rows: int,
    of_all: Callable[[], jax.Array],
    of_some: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The one group most often has all rows. Then none need be masked, which takes 5 % here."""
    start, end = spans[0][0], spans[1][0]
    _, mine = _tile(start, end, rows, rows)
    whole = (start == 0) & (end == rows)
    result: jax.Array = lax.cond(whole, of_all, lambda: of_some(mine))
    return result


def _over_groups(
    spans: Spans,
    add_group: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
    state: jax.Array,
) -> jax.Array:
    """Visit the groups that have rows, first to last."""
    starts, ends = spans
    has_rows = ends > starts
    # Not sorted: XLA cannot serialise a program for CPU that holds a sort once it has run.
    (visited,) = jnp.nonzero(has_rows, size=has_rows.size, fill_value=0)

    def visit(i: jax.Array, state: jax.Array) -> jax.Array:
        group = visited[i]
        return add_group(group, starts[group], ends[group], state)

    state = lax.fori_loop(0, jnp.sum(has_rows), visit, state)
    return state


def _over_tiles(
    start: jax.Array,
    end: jax.Array,
    sizes: list[int],
    add_tile: Callable[[int, jax.Array, jax.Array], jax.Array],
    state: jax.Array,
) -> jax.Array:
    """Cover a group's rows with tiles, the large ones first.

    A size is used as long as the next smaller one would not hold the rest; so every size but the
    first is used at most once. One loop per size, and not a switch between sizes, because XLA
    updates the state of a loop in place.
    """

    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):

        def more(carry: tuple[jax.Array, jax.Array], smaller: int = smaller) -> jax.Array:
            return end - carry[0] > smaller

        def step(
            carry: tuple[jax.Array, jax.Array], size: int = size
        ) -> tuple[jax.Array, jax.Array]:
            return carry[0] + size, add_tile(size, *carry)

        start, state = lax.while_loop(more, step, (start, state))
    return state


def _tile(first: jax.Array, end: jax.Array, size: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Where a tile is read, and which of its rows count.

    At the end of the array a tile begins before its first row rather than reach beyond the end.
    """
    at = jnp.minimum(first, rows - size)
    row = at + jnp.arange(size, dtype=first.dtype)[:, None]
    return at, (row >= first) & (row < end)


def _tile_sizes(tile_rows: int, rows: int) -> list[int]:
    """The largest tile, and below it the powers of two.

    A tile is smaller than the array, unless it is the only one: where a tile begins would not
    depend on the loop any more, so XLA would compute its product in front of the loop, for every
    group, whether the group needs such a tile or not.
    """
    if rows <= SMALLEST_TILE:
        return [rows]
    largest = tile_rows if tile_rows < rows else _power_of_two_below(rows)
    sizes = [largest]
    while (smaller := _power_of_two_below(sizes[-1])) >= SMALLEST_TILE:
        sizes.append(smaller)
    return sizes


def _power_of_two_below(size: int) -> int:
    return 1 << (size - 1).bit_length() >> 1


def _set_matrix(matrices: jax.Array, group: jax.Array, matrix: jax.Array) -> jax.Array:
    return put_in_dim(matrices, matrix[None], group)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(accumulation_dtype(x.dtype))
