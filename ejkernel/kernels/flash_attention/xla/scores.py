"""One tile of scores: soft cap, bias, what is hidden, what is dropped.

Tiles are seen with five axes, `(batch, kv_heads, queries, group, keys)`; the backward pass holds
them with the keys in front, `(batch, kv_heads, keys, queries, group)`. Everything that differs
between the two is here, so that both passes compute the same scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...slicing import put
from ..dropout import keep_mask
from ..options import Options
from ..rows import Statistics
from ..scalars import Index, int32, minus, plus, scalar, times, times_cap
from ..tiles import Tiles
from .layout import block, counting, pad

_KEYS_IN_FRONT = (0, 1, 4, 2, 3)
_KEYS_LAST = (0, 1, 3, 4, 2)


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of query block `i` against key block `j`, for some examples and heads."""

    tiles: Tiles
    options: Options
    keys_in_front: bool

    @property
    def may_hide_all_of_a_first_tile(self) -> bool:
        """True if a query may see nothing of the first tile that it meets.

        By position alone it cannot: every query sees the first key, if there is one.
        """
        options = self.options
        elsewhere = not isinstance(options.first_key, int)
        unseen = options.hides_anywhere or options.bias is not None or self.tiles.kv_len == 0
        return unseen or elsewhere

    def apply(
        self,
        products: jax.Array,
        i: Index,
        j: Index,
        *,
        masked: bool,
        shift: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Scores from scaled products of queries and keys, and the slope of the soft cap, if any.

        With `shift`, one number for every row of the tile, they are less that. What does not count
        becomes -inf, whatever the shift is; only if `masked`, because most tiles hide nothing.
        """
        options = self.options
        if not masked and options.bias is None and options.logits_soft_cap is None:
            return products if shift is None else lax.sub(products, shift), None
        shape = products.shape
        scores = self._with_five_axes(products)
        scores, slope = self._capped(scores)
        if options.bias is not None:
            bias = lax.convert_element_type(self._part(options.bias, i, j), scores.dtype)
            scores = lax.add(scores, bias)
        if shift is not None:
            scores = lax.sub(scores, self._with_five_axes(shift))
        if masked:
            hidden, zeros = lax.full_like(scores, -jnp.inf), lax.full_like(scores, 0)
            visible = self._visible(i, j)
            if visible is not None:
                visible = lax.broadcast_in_dim(visible, scores.shape, range(5))
                scores = lax.select(visible, scores, hidden)
                # The slope of a product that is NaN would be NaN.
                slope = None if slope is None else lax.select(visible, slope, zeros)
        slope = None if slope is None else lax.reshape(slope, shape)
        return lax.reshape(scores, shape), slope

    def add_to_softmax(
        self, met: Statistics, tile: jax.Array, weigh: Callable[[jax.Array], jax.Array]
    ) -> Statistics:
        """The online softmax of rows with a tile added, of whose weights `weigh` makes a sum."""
        axis = 2 if self.keys_in_front else 3
        largest = lax.max(met.largest, over_keys(lax.reduce_max, tile, axis))
        # A row that has met nothing but -inf is shifted by nothing: -inf - -inf would be NaN.
        shift = zero_if_lowest(largest) if self.may_hide_all_of_a_first_tile else largest
        shrink = lax.exp(lax.sub(met.largest, shift))
        weights = lax.exp(lax.sub(tile, shift))
        total = lax.add(lax.mul(shrink, met.total), over_keys(lax.reduce_sum, weights, axis))
        return Statistics(largest, total, lax.add(lax.mul(shrink, met.weighted), weigh(weights)))

    def on_diagonal(self, products: jax.Array, queries: int) -> jax.Array:
        """Scores of a strip, `diagonal.strips`: its last keys are its own queries.

        Its earlier keys are all seen and yet compared as well: hiding in place what is in the last
        square would make XLA copy the strip, twice.
        """
        scores, _ = self._capped(products)
        shape, keys = scores.shape, scores.shape[3]
        row, key = (lax.broadcasted_iota(np.int32, shape, axis) for axis in (2, 3))
        query = row if self.tiles.group == 1 else lax.div(row, np.int32(self.tiles.group))
        visible = lax.le(key, lax.add(query, np.int32(keys - queries)))
        return lax.select(visible, scores, lax.full_like(scores, -jnp.inf))

    def dropped(self, weights: jax.Array, i: Index, j: Index) -> jax.Array:
        """Weights after dropout: zero, or larger by as much as is dropped on average."""
        rate, key = self.options.dropout_rate, self.options.dropout_key
        if key is None:
            return weights
        five = self._with_five_axes(weights)
        shape = five.shape if not self.keys_in_front else [five.shape[a] for a in _KEYS_LAST]
        batch, kv_heads, queries, group, keys = shape
        heads = counting(kv_heads * group).reshape(1, kv_heads, 1, group, 1)
        keep = keep_mask(
            rate,
            key,
            counting(batch).reshape(batch, 1, 1, 1, 1) + self.options.first_example,
            heads + self.options.first_head,
            counting(queries).reshape(1, 1, queries, 1, 1) + self._first_query(i),
            counting(keys).reshape(1, 1, 1, 1, keys) + self._first_key(j),
        )
        kept = jnp.where(self._placed(keep), five * scalar(1 / (1 - rate), five), 0.0)
        return lax.reshape(kept, weights.shape)

    def add_to_bias_gradient(
        self, gradient: jax.Array, d_scores: jax.Array, i: Index, j: Index
    ) -> jax.Array:
        """The gradient of the bias, as `zero_bias_gradient` has it, with that of one tile added."""
        five = self._with_five_axes(d_scores)
        once = tuple(axis for axis in range(5) if gradient.shape[axis] == 1 < five.shape[axis])
        five = jnp.sum(five, axis=once, keepdims=True)
        keys, queries = five.shape[2], five.shape[3]
        j = 0 if gradient.shape[2] == keys else j
        i = 0 if gradient.shape[3] == queries else i
        before = block(block(gradient, j, keys, 2), i, queries, 3)
        starts = (0, 0, times(j, keys), times(i, queries), 0)
        return put(gradient, lax.add(before, five), starts)

    def _capped(self, scores: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The scores after the soft cap, and its slope; as they are if there is none."""
        cap = self.options.logits_soft_cap
        if cap is None:
            return scores, None
        bent = lax.tanh(lax.mul(scores, scalar(1 / cap, scores)))
        slope = lax.sub(scalar(1, bent), lax.mul(bent, bent))
        return times_cap(bent, cap), slope

    def _visible(self, i: Index, j: Index) -> jax.Array | None:
        """Which scores count, `(batch or 1, heads or 1, queries, group or 1, keys)` as placed."""
        options, tiles = self.options, self.tiles
        parts = []
        left, right = options.band
        key = self._iota(tiles.block_k, axis=4)
        if left is not None or right is not None:
            # Positions, not differences of them: a table of those would be the same for all tiles,
            # and XLA would keep it in memory and read it instead of comparing.
            query = self._iota(tiles.block_q, axis=2)
            start = plus(self._first_key(j), minus(self._first_query(i)))
            position = lax.add(key, int32(start))
            if right is not None:
                parts.append(lax.le(position, lax.add(query, np.int32(right))))
            if left is not None:
                parts.append(lax.ge(position, lax.sub(query, np.int32(left))))
        if tiles.kv_len < tiles.padded_kv_len:
            real = plus(tiles.kv_len, minus(times(j, tiles.block_k)))
            parts.append(lax.lt(key, int32(real)))
        if options.kv_lengths is not None:
            lengths = options.kv_lengths.reshape(-1, 1, 1, 1, 1)
            parts.append(key + self._first_key(j) < lengths)
        if options.segment_ids is not None and options.kv_segment_ids is not None:
            q_ids = block(pad(options.segment_ids, tiles.padded_q_len, 1), i, tiles.block_q, 1)
            k_ids = block(pad(options.kv_segment_ids, tiles.padded_kv_len, 1), j, tiles.block_k, 1)
            same = q_ids[:, None, :, None, None] == k_ids[:, None, None, None, :]
            parts.append(self._placed(same))
        if options.mask is not None:
            parts.append(self._part(options.mask, i, j))
        visible = None
        for part in parts:
            if visible is None:
                visible = part
                continue
            shape = np.broadcast_shapes(visible.shape, part.shape)
            wide = [lax.broadcast_in_dim(x, shape, range(5)) for x in (visible, part)]
            visible = lax.bitwise_and(*wide)
        return visible

    def _part(self, x: jax.Array, i: Index, j: Index) -> jax.Array:
        """Of a `(batch, heads, queries, keys)` array, axes of 1 included, what this tile needs."""
        if x.shape[2] > 1:
            x = block(x, i, self.tiles.block_q, 2)
        if x.shape[3] > 1:
            x = block(x, j, self.tiles.block_k, 3)
        batch, heads, queries, keys = x.shape
        group = 1 if heads == 1 else self.tiles.group
        x = lax.reshape(x, (batch, heads // group, group, queries, keys))
        return self._placed(lax.transpose(x, (0, 1, 3, 2, 4)))

    def _iota(self, size: int, axis: int) -> jax.Array:
        """Counts along one of the five axes, named by its place in the forward pass."""
        place = _KEYS_IN_FRONT.index(axis) if self.keys_in_front else axis
        shape = [1] * 5
        shape[place] = size
        return lax.broadcasted_iota(np.int32, shape, place)

    def _placed(self, x: jax.Array) -> jax.Array:
        return lax.transpose(x, _KEYS_IN_FRONT) if self.keys_in_front else x

    def _with_five_axes(self, tile: jax.Array) -> jax.Array:
        batch, heads, rows, columns = tile.shape
        group = self.tiles.group
        if self.keys_in_front:
            return lax.reshape(tile, (batch, heads, rows, columns // group, group))
        return lax.reshape(tile, (batch, heads, rows // group, group, columns))

    def _first_query(self, i: Index) -> Index:
        return plus(self.options.first_query, times(i, self.tiles.block_q))

    def _first_key(self, j: Index) -> Index:
        return plus(self.options.first_key, times(j, self.tiles.block_k))


def over_keys(reduce: Any, tile: jax.Array, axis: int) -> jax.Array:
    """A reduction of a tile over its keys, of which one stays."""
    return lax.expand_dims(reduce(tile, (axis,)), (axis,))


def zero_if_lowest(x: jax.Array) -> jax.Array:
    """The array with zeros for -inf."""
    return lax.select(lax.eq(x, scalar(-jnp.inf, x)), lax.full_like(x, 0), x)


def weighted(weights: jax.Array, x: jax.Array, *, masked: bool) -> jax.Array:
    """Their product; in a tile that hides scores zero wherever the weight is.

    Zero times what is too large for a number would be NaN.
    """
    found = lax.mul(weights, x)
    if not masked:
        return found
    return lax.select(lax.eq(weights, scalar(0, weights)), lax.full_like(found, 0), found)


def padded(options: Options, tiles: Tiles) -> Options:
    """The options with bias and mask as long as the padded sequences, where they are not 1."""

    def fit(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        x = pad(x, tiles.padded_q_len, 2) if x.shape[2] > 1 else x
        return pad(x, tiles.padded_kv_len, 3) if x.shape[3] > 1 else x

    return options.replace(bias=fit(options.bias), mask=fit(options.mask))


def zero_bias_gradient(bias: jax.Array, group: int, dtype: Any) -> jax.Array:
    """Zeros for the gradient of a padded bias, in the layout of the tiles of the backward pass.

    So a tile is added as it lies. Turning each of them first took longer than all the rest.
    """
    batch, heads, queries, keys = bias.shape
    split = (heads, 1) if heads == 1 else (heads // group, group)
    zeros = lax.full_like(bias, 0, dtype)
    return lax.reshape(zeros, (batch, split[0], keys, queries, split[1]))


def bias_gradient(sums: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of a bias of this shape from what `add_to_bias_gradient` added up."""
    batch, kv_heads, keys, queries, group = sums.shape
    turned = lax.transpose(sums, (0, 1, 4, 3, 2))
    return lax.slice(lax.reshape(turned, (batch, kv_heads * group, queries, keys)), (0,) * 4, shape)
