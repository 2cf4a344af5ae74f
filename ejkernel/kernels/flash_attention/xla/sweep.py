"""The sweep of the backward pass over the tiles of a call: blocks of keys, and who sees them.

Tiles are `(keys, queries)` here: XLA's CPU products take up to twice as long when their large
operand must be transposed, and of the three that read a tile only that of the gradient of the
queries would need it. So that one is computed as its own transpose, where the small operand is
transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..finite import may_hide, zero_if_not_finite
from ..options import Options
from ..rows import NOTHING_SEEN, Rows
from ..scalars import Index, scalar, times
from .layout import as_row, loop, pad, product, span, to_rows
from .slices import Slice, Slices
from .tile import Tile, padded
from .tiling import Needed, Tiling

State = TypeVar("State")


class Arrays(NamedTuple):
    """The arrays of a call."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    rows: Rows  # as they lie in a tile, padded: each (batch, kv_heads, 1, queries * group)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A call of the backward pass, cut into slices and tiles."""

    arrays: Arrays
    options: Options
    tiling: Tiling
    slices: Slices

    @staticmethod
    def of(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        dout: jax.Array,
        rows: Rows,
        *,
        options: Options,
        block_q: int,
        block_k: int,
        block_heads: int | None,
    ) -> Sweep:
        """The sweep of a call for which these are the statistics of the rows, or taken as such."""
        tiling = Tiling.of(q, k, block_q, block_k)
        shift, share, delta = (
            as_row(pad(x, tiling.padded_q_len, 2, appended), tiling.group)
            for x, appended in zip(rows, (NOTHING_SEEN, 1.0, 0.0), strict=True)
        )
        arrays = Arrays(q, k, v, dout, Rows(shift, share, delta))
        return Sweep(arrays, padded(options, tiling), tiling, Slices.of(q, k, block_heads))

    def over(self, part: Slice) -> SliceSweep:
        """The sweep over the tiles of one slice.

        What the slice does not see is zero in its arrays. It is made so here and not in front of
        all slices: padding, cleaning and laying out is then one pass through memory, and no copy of
        whole arrays exists (cleaned as a whole, a causal call of 2048 positions took 1.14 of the
        time).
        """
        (q, k, v, dout, rows), options = self.arrays, part.options(self.options)
        q_len, k_len = self.tiling.padded_q_len, self.tiling.padded_k_len
        q, dout = (to_rows(pad(part.queries(x), q_len, 1), self.tiling.group) for x in (q, dout))
        k, v = (pad(part.keys(x), k_len, 1) for x in (k, v))
        shift, share, delta = (part.rows(x) for x in rows)
        dout = lax.mul(lax.convert_element_type(dout, shift.dtype), _by_row(share))
        delta = lax.mul(delta, share)
        if may_hide(options):
            # Whoever sees something that is not finite has a log-sum-exp or a delta that is not. So
            # it is enough to let such rows have NaN for their shift.
            bad = lax.bitwise_not(lax.bitwise_and(lax.is_finite(shift), lax.is_finite(delta)))
            # A query that sees nothing may hold anything.
            seeing = _by_row(lax.ne(shift, scalar(NOTHING_SEEN, shift)))
            shift = lax.select(bad, lax.full_like(shift, jnp.nan), shift)
            delta = lax.select(bad, lax.full_like(delta, 0), delta)
            q, dout = (zero_if_not_finite(x, counts=seeing) for x in (q, dout))
        tile = Tile(self.tiling, options, keys_in_front=True)
        needed = Needed.of(self.tiling, options)
        return SliceSweep(tile, needed, q, k, v, dout, shift, delta)


class Keys(NamedTuple):
    """A block of keys and their values, each `(batch, kv_heads, block_k, features)`."""

    j: Index
    scaled: jax.Array
    values: jax.Array


class Tiled(NamedTuple):
    """A block of queries and what it has to do with a block of keys.

    Arrays of the queries are `(batch, kv_heads, rows, features)`, those of the tile `(batch,
    kv_heads, block_k, rows)`.
    """

    i: Index
    start: Index  # of its rows
    q: jax.Array
    dout: jax.Array
    scores: jax.Array
    slope: jax.Array | None  # of the soft cap
    d_weights: jax.Array  # gradient of the loss with respect to the weights
    masked: bool


@dataclasses.dataclass(frozen=True)
class SliceSweep:
    """The tiles of one slice. `dout` and `delta` have been multiplied by the shares."""

    tile: Tile
    needed: Needed
    q: jax.Array  # (batch, kv_heads, queries * group, head_dim)
    k: jax.Array  # (batch, k_len, kv_heads, head_dim)
    v: jax.Array
    dout: jax.Array  # (batch, kv_heads, queries * group, value_dim)
    shift: jax.Array  # (batch, kv_heads, 1, queries * group)
    delta: jax.Array

    @property
    def rows(self) -> int:
        """How many rows a tile has."""
        return self.tile.tiling.block_q * self.tile.tiling.group

    def keys(self, j: Index) -> Keys:
        """The `j`-th block of keys."""
        size, options = self.tile.tiling.block_k, self.tile.options

        def laid_out(x: jax.Array) -> jax.Array:
            x = to_rows(span(x, times(j, size), size, 1), group=1)
            x = zero_if_not_finite(x) if may_hide(options) else x
            return lax.convert_element_type(x, self.shift.dtype)

        k, v = laid_out(self.k), laid_out(self.v)
        return Keys(j, lax.mul(k, scalar(options.softmax_scale, k)), v)

    def each_tile(
        self,
        keys: Keys,
        visit: Callable[[Tiled, State], State],
        state: State,
        *,
        shift: jax.Array | None = None,
    ) -> State:
        """Pass the state through `visit`, once for every block of queries that sees these keys.

        The scores are less `shift`, if it is given, and in any case -inf where they are hidden.
        """
        tile, j = self.tile, keys.j

        def step(i: Index, state: State, *, masked: bool) -> State:
            start = times(i, self.rows)
            q = lax.convert_element_type(span(self.q, start, self.rows, 2), self.shift.dtype)
            dout = span(self.dout, start, self.rows, 2)
            less = None if shift is None else span(shift, start, self.rows, 3)
            products = product(keys.scaled, q, 3, 3)
            scores, slope = tile.apply(products, i, j, masked=masked, shift=less)
            d_weights = tile.dropped(product(keys.values, dout, 3, 3), i, j)
            return visit(Tiled(i, start, q, dout, scores, slope, d_weights, masked), state)

        begin, whole, end = self.needed.queries_seeing(j)
        state = loop(begin, whole, partial(step, masked=True), state)
        return state if whole is end else loop(whole, end, partial(step, masked=False), state)


def _by_row(x: jax.Array) -> jax.Array:
    """`(batch, kv_heads, 1, rows)` as a factor of `(batch, kv_heads, rows, features)`."""
    return lax.transpose(x, (0, 1, 3, 2))


def weighted(weights: jax.Array, x: jax.Array, *, masked: bool) -> jax.Array:
    """Their product; in a tile that hides scores zero wherever the weight is.

    Zero times what is too large for a number would be NaN.
    """
    found = lax.mul(weights, x)
    if not masked:
        return found
    return lax.select(lax.eq(weights, scalar(0, weights)), lax.full_like(found, 0), found)
