r"""Grouped matrix products in plain JAX: a loop over the groups that have rows.

With :math:`R_g` the rows of group :math:`g`,

.. math::
    \mathrm{out}_i = \mathrm{lhs}_i \, W_g \;\; (i \in R_g), \qquad
    \mathrm{dW}_g = \sum_{i \in R_g} \mathrm{lhs}_i^T \, \mathrm{dout}_i ,

and the gradient of ``lhs`` is the first product again, with :math:`W_g^T`.

A group is walked through in blocks of ``block_m`` rows; what is left of it goes into the smallest
power of two that holds it, so a group of 100 rows costs a product of 128 and not of 512. A block
may reach beyond its group: of the first product such rows are not stored, of the second they are
zeroed before it. Groups without rows cost nothing, not even reading their matrix.

Products of low-precision inputs are computed from float32 copies of the blocks: XLA's CPU backend
has no faster product for them, and sums stay exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation
from ejkernel.ops.core.varying import vary_alike

from ..dot import dot
from ..dtypes import accumulation_dtype
from ..limits import COUNT
from ..sizes import next_power_of_two
from ..slicing import put_in_dim, take_in_dim
from .arguments import Arguments
from .groups import Spans, rows_of_groups
from .products import implementation, one_at_a_time

# A product with fewer rows than this takes as long as one with this many.
SMALLEST_BLOCK = 8

# With at most so many rows in all, the gradient of the matrices is written in one product.
FEW_ROWS = 32

# Smallest result of a product that XLA's CPU backend divides among its threads.
THREADED_RESULT = 131_072


@dataclasses.dataclass(frozen=True)
class GroupedMatmulXlaConfig:
    """Most rows in one product.

    Args:
      block_m: of the result.
      dlhs_block_m: of the gradient of `lhs`.
      drhs_block_m: of the gradient of `rhs`, which is a sum over rows.
    """

    block_m: Annotated[int, COUNT] = 256
    dlhs_block_m: Annotated[int, COUNT] = 256
    drhs_block_m: Annotated[int, COUNT] = 1024

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        """Measured on two Zen 3 cores.

        XLA's CPU backend divides a product among its threads if the result is large enough, and
        larger blocks leave the caches; but the sum over rows of the gradient of `rhs` reads and
        writes a whole matrix for each block, so its blocks are long. Shorter groups get shorter
        blocks by themselves.
        """
        sides = (
            inv.args[1].shape[1:] if inv.kwargs.get("transpose_rhs") else inv.args[1].shape[:0:-1]
        )
        return cls(
            *(min(1024, max(256, next_power_of_two(-(-THREADED_RESULT // n)))) for n in sides)
        )

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        sizes = (64, 128, 256, 512, 1024, 2048)
        return one_at_a_time(cls.heuristic(inv), [s for s in sizes if s < 2 * inv.args[0].shape[0]])


def times_matrices(call: Arguments, block_m: int) -> jax.Array:
    """`lhs[i] @ rhs[g]` for every row `i` of group `g`, `(m, n)`; zeros for rows of no group."""
    lhs, rhs = call.lhs, call.rhs
    rows, columns, _ = call.sizes
    wide = accumulation_dtype(call.dtype)

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        found = dot(left, right, call.summed, dtype=wide, precision=call.precision)
        return found.astype(call.dtype)

    if rhs.shape[0] == 1:
        of_all = partial(product, _wide(lhs), _wide(rhs[0]))
        return _if_all_rows(call.spans, rows, of_all, lambda mine: jnp.where(mine, of_all(), 0))

    def add_group(group: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        matrix = _wide(take_in_dim(rhs, group, 1)[0])

        def add_block(size: int, first: jax.Array, out: jax.Array) -> jax.Array:
            at, mine = _block(first, end, size, rows)
            block = product(_wide(take_in_dim(lhs, at, size)), matrix)
            before = take_in_dim(out, at, size)
            return put_in_dim(out, jnp.where(mine, block, before), at)

        return _over_blocks(start, end, _block_sizes(block_m, rows), add_block, out)

    zeros = vary_alike(jnp.zeros((rows, columns), call.dtype), lhs, rhs, call.spans)
    return _over_groups(call.spans, add_group, zeros)


def matrix_gradients(call: Arguments, dout: jax.Array, block_m: int) -> jax.Array:
    """The sum of `lhs[i]ᵀ dout[i]` over the rows of each group; zeros for groups without rows."""
    lefts, rights = call.for_drhs(dout)
    rows, spans, dtype = lefts.shape[0], call.spans, call.rhs.dtype
    wide = accumulation_dtype(dtype)
    product = partial(dot, summed=(0, 0), dtype=wide, precision=call.precision)

    if call.rhs.shape[0] == 1:

        def of_all() -> jax.Array:
            return product(_wide(lefts), _wide(rights)).astype(dtype)[None]

        def of_some(mine: jax.Array) -> jax.Array:
            left, right = (jnp.where(mine, _wide(side), 0) for side in (lefts, rights))
            return product(left, right).astype(dtype)[None]

        return _if_all_rows(spans, rows, of_all, of_some)

    if rows <= FEW_ROWS:
        # The matrices that are written take longer than the products: those of all groups in one.
        mine = rows_of_groups(spans, rows)
        # In the product of all groups a zero on the left does not hide an infinity on the right. So
        # that is moved to the left, where the rows of other groups have zeros of their own.
        finite = jnp.all(jnp.isfinite(rights), axis=1, keepdims=True)
        left = jnp.where(finite, _wide(lefts), jnp.nan)
        spread = jnp.where(mine[:, :, None], left[:, None, :], 0)
        right = jnp.where(finite & jnp.any(mine, 1, keepdims=True), _wide(rights), 0)
        return product(spread, right).astype(dtype)

    def add_group(group: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        def of_block(size: int, first: jax.Array) -> jax.Array:
            at, mine = _block(first, end, size, rows)
            # Both sides are zeroed: a row of another group may hold an infinity.
            blocks = (_wide(take_in_dim(side, at, size)) for side in (lefts, rights))
            left, right = (jnp.where(mine, block, 0) for block in blocks)
            return product(left, right)

        def add_in_place(size: int, first: jax.Array, out: jax.Array) -> jax.Array:
            total = take_in_dim(out, group, 1)[0] + of_block(size, first)
            return put_in_dim(out, total[None], group)

        over_blocks = partial(_over_blocks, start, end, _block_sizes(block_m, rows))
        if dtype == wide:
            return over_blocks(add_in_place, out)
        zeros = jnp.zeros_like(out[0], wide)
        total = over_blocks(lambda size, first, total: total + of_block(size, first), zeros)
        return put_in_dim(out, total.astype(dtype)[None], group)

    zeros = vary_alike(jnp.zeros(call.rhs.shape, dtype), lefts, rights, spans)
    return _over_groups(spans, add_group, zeros)


def _if_all_rows(
    spans: Spans,
    rows: int,
    of_all: Callable[[], jax.Array],
    of_some: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The one group most often has all rows. Then none need be masked, which takes 5 % here."""
    start, end = spans[0][0], spans[1][0]
    _, mine = _block(start, end, rows, rows)
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


def _over_blocks(
    start: jax.Array,
    end: jax.Array,
    sizes: list[int],
    add_block: Callable[[int, jax.Array, jax.Array], jax.Array],
    state: jax.Array,
) -> jax.Array:
    """Cover a group's rows with blocks, the large ones first.

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
            return carry[0] + size, add_block(size, *carry)

        start, state = lax.while_loop(more, step, (start, state))
    return state


def _block(first: jax.Array, end: jax.Array, size: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Where a block is read, and which of its rows count.

    At the end of the array a block begins before its first row rather than reach beyond the end.
    """
    at = jnp.minimum(first, rows - size)
    row = at + jnp.arange(size, dtype=first.dtype)[:, None]
    return at, (row >= first) & (row < end)


def _block_sizes(block_m: int, rows: int) -> list[int]:
    """The largest block, and below it the powers of two.

    A block is smaller than the array, unless it is the only one: where a block begins would not
    depend on the loop any more, so XLA would compute its product in front of the loop, for every
    group, whether the group needs such a block or not.
    """
    if rows <= SMALLEST_BLOCK:
        return [rows]
    sizes = [block_m if block_m < rows else next_power_of_two(rows) // 2]
    while (smaller := next_power_of_two(sizes[-1]) // 2) >= SMALLEST_BLOCK:
        sizes.append(smaller)
    return sizes


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(accumulation_dtype(x.dtype))


XLA = implementation(
    times_matrices, matrix_gradients, narrow=False, name="xla", config=GroupedMatmulXlaConfig
)
