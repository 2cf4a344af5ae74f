"""Which tiles are needed, by positions and by data, and how those on the diagonal are cut.

Half of a tile on the diagonal of a causal call is hidden. Small tiles waste less of it and are
slow; a large tile whose queries meet the keys in strips, each strip only those up to its own last
query, is fast and wastes little.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from ..options import Options
from ..scalars import Index, ceil_div, clamp, larger, minus, plus, quotient, smaller, times
from ..tiles import Tiles, equal_blocks
from .layout import counting, pad

# A tile that is all there is has four strips: more are hardly faster, and take longer to trace and
# to compile. Where there are several tiles, only large ones are worth it, and two are enough.
_STRIPS_OF_ONE_TILE = 4
_STRIPS_OF_SEVERAL = 2
_LEAST_OF_ONE = 128  # queries; a tile that is not larger is not cut
_LEAST_OF_SEVERAL = 511

# Given one of these options, tiles are not cut: what a query sees does not simply end at itself, or
# there is another array that would have to be cut as the scores are.
UNCUT = (
    *("bias", "mask", "segment_ids", "q_lengths", "kv_lengths"),
    *("window", "dropout_key", "sequence_axis"),
)


def tiles_of(q: jax.Array, k: jax.Array, block_q: int, block_k: int) -> Tiles:
    """The tiles of `(batch, length, heads, head_dim)` arrays, for equal blocks of at most a size.

    Fewer zeros are appended than there are blocks, and nothing if the length divides evenly.
    """
    (_, q_len, q_heads, _), (_, kv_len, kv_heads, _) = q.shape, k.shape
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads cannot be shared out to {kv_heads} key heads")
    sizes = (equal_blocks(q_len, block_q), equal_blocks(kv_len, block_k))
    return Tiles(q_len, kv_len, *sizes, group=q_heads // kv_heads)


@dataclasses.dataclass(frozen=True)
class Needed:
    """Which tiles hold scores that count: from the positions alone, and from the data if it says.

    `data` is a table of `(q_blocks, k_blocks)` booleans, or None. Of a row or a column of it the
    part between the first and the last True is walked through: all of it that counts where segment
    ids are sorted, as in packed sequences.
    """

    tiles: Tiles
    options: Options
    data: jax.Array | None

    @staticmethod
    def of(tiles: Tiles, options: Options) -> Needed:
        """For the examples and heads that the options hold."""
        return Needed(tiles, options, _needed_by_data(tiles, options))

    def keys_seen_by(self, i: Index) -> tuple[Index, Index, Index]:
        """Of the key blocks: the first that query block `i` sees anything of, the first that it
        does not see wholly, and the end."""
        tiles = self.tiles
        if tiles.k_blocks == 1:
            return 0, self._one_block_seen_wholly(), 1  # see `loop`
        left, right = self._band()
        first_query = times(i, tiles.block_q)
        next_query = plus(first_query, tiles.block_q)
        begin: Index = 0
        end: Index = tiles.k_blocks
        if left is not None:
            begin = quotient(clamp(0, plus(first_query, left), tiles.padded_kv_len), tiles.block_k)
        if right is not None:
            seen = clamp(0, plus(next_query, right), tiles.kv_len)
            end = quotient(plus(seen, tiles.block_k - 1), tiles.block_k)
        begin, end = self._cut(begin, end, i, axis=1)
        if self.options.hides_anywhere:
            return begin, begin, end
        whole: Index = tiles.kv_len // tiles.block_k
        if right is not None:
            seen_by_all = clamp(0, plus(plus(first_query, 1), right), tiles.kv_len)
            whole = quotient(seen_by_all, tiles.block_k)
        return begin, whole, end

    def queries_seeing(self, j: Index) -> tuple[Index, Index, Index]:
        """Of the query blocks: the first that sees anything of key block `j`, the first that sees
        all of it, and the end."""
        tiles = self.tiles
        if tiles.q_blocks == 1:
            return 0, 1 - self._one_block_seen_wholly(), 1  # see `loop`
        left, right = self._band()
        first_key = times(j, tiles.block_k)
        next_key = plus(first_key, tiles.block_k)
        begin: Index = 0
        whole: Index = 0
        end: Index = tiles.q_blocks
        if right is not None:
            first = clamp(0, plus(first_key, minus(right)), tiles.padded_q_len)
            begin = quotient(first, tiles.block_q)
            # The queries from the last key's position on see the whole block.
            above = clamp(0, plus(plus(next_key, -1), minus(right)), tiles.padded_q_len)
            whole = quotient(plus(above, tiles.block_q - 1), tiles.block_q)
        if left is not None:
            seen = clamp(0, plus(next_key, minus(left)), tiles.q_len)
            end = quotient(plus(seen, tiles.block_q - 1), tiles.block_q)
        begin, end = self._cut(begin, end, j, axis=0)
        if self.options.hides_anywhere:
            return begin, end, end
        if tiles.kv_len < tiles.padded_kv_len:  # then nobody sees all of the last block
            padding = clamp(0, plus(next_key, -tiles.kv_len), 1)
            whole = larger(whole, times(padding, tiles.q_blocks))
        return begin, whole, end

    def _one_block_seen_wholly(self) -> int:
        """1 if nothing is hidden anywhere, else 0: what is known of a line with a single tile."""
        padded = self.tiles.kv_len < self.tiles.padded_kv_len
        hidden = padded or self.options.hides_anywhere or self.options.band[1] is not None
        return 0 if hidden else 1

    def _band(self) -> tuple[Index | None, Index | None]:
        """`(-left, right)` of the options, for positions counted from the first query and key."""
        left, right = self.options.band
        ahead = plus(self.options.first_query, minus(self.options.first_key))
        return (
            None if left is None else plus(ahead, -left),
            None if right is None else plus(ahead, right),
        )

    def _cut(self, begin: Index, end: Index, index: Index, axis: int) -> tuple[Index, Index]:
        """Shorten a range of blocks to what the data needs of a row or a column of tiles."""
        if self.data is None:
            return begin, end
        line = self.data[index] if axis == 1 else self.data[:, index]
        first = jnp.argmax(line).astype(jnp.int32)
        last = line.shape[0] - jnp.argmax(line[::-1]).astype(jnp.int32)
        return larger(begin, first), smaller(end, jnp.where(jnp.any(line), last, 0))


def _needed_by_data(tiles: Tiles, options: Options) -> jax.Array | None:
    """Which tiles any example or head needs, by segment ids, lengths and mask."""
    needed = None
    if options.by_example:
        q, k = (
            (options.segment_ids, options.q_lengths),
            (options.kv_segment_ids, options.kv_lengths),
        )
        q_low, q_high = _id_bounds(*q, options.first_query, tiles.q_len, tiles.q_blocks)
        k_low, k_high = _id_bounds(*k, options.first_key, tiles.kv_len, tiles.k_blocks)
        overlap = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
        needed = jnp.any(overlap, axis=0)
    if options.mask is not None:
        by_rows = _any_in_blocks(jnp.any(options.mask, axis=(0, 1)), tiles.q_blocks, 0)
        by_mask = _any_in_blocks(by_rows, tiles.k_blocks, 1)
        needed = by_mask if needed is None else needed & by_mask
    if needed is None:
        return None
    return jnp.broadcast_to(needed, (tiles.q_blocks, tiles.k_blocks))


def _id_bounds(
    ids: jax.Array | None, lengths: jax.Array | None, first: Index, length: int, blocks: int
) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest segment id in each block, `(examples, blocks)`.

    In a block without any the smallest is larger than the largest, so it meets no other block.
    """
    size = ceil_div(length, blocks)
    if ids is None:
        ids = jnp.zeros((1, length), jnp.int32)
    position = counting(blocks * size)[None]
    exists = position < length
    if lengths is not None:
        exists = exists & (position + first < lengths[:, None])
    ids = pad(ids.astype(jnp.int32), blocks * size, 1)
    limits = np.iinfo(np.int32)
    low, high = jnp.where(exists, ids, limits.max), jnp.where(exists, ids, limits.min)
    cut = (-1, blocks, size)
    return low.reshape(cut).min(axis=2), high.reshape(cut).max(axis=2)


def _any_in_blocks(table: jax.Array, blocks: int, axis: int) -> jax.Array:
    """Whether anything is True in each block along an axis; an axis of size 1 stays."""
    length = table.shape[axis]
    if length == 1:
        return table
    size = ceil_div(length, blocks)
    padded = pad(table, blocks * size, axis)
    shape = (*padded.shape[:axis], blocks, size, *padded.shape[axis + 1 :])
    return jnp.any(padded.reshape(shape), axis=axis + 1)


def strips(tiles: Tiles, options: Options) -> list[tuple[int, int]] | None:
    """The first query and the end of each strip of a query block; None: blocks are not cut.

    Where there are strips, query block `i` sees the keys before its own first position wholly, and
    of the keys from there on, those up to each query.
    """
    squares = (
        options.causal
        and all(getattr(options, name) is None for name in UNCUT)
        # On several devices positions are known only when the program runs.
        and all(isinstance(at, int) and at == 0 for at in (options.first_query, options.first_key))
        and tiles.padded_q_len == tiles.padded_kv_len
        and tiles.q_len <= tiles.kv_len  # else a query would see appended keys
        and tiles.block_q % tiles.block_k == 0
        and tiles.block_k > 1  # nobody asks for steps of one key to be fast
    )
    if tiles.q_blocks == 1:
        least, count = _LEAST_OF_ONE, _STRIPS_OF_ONE_TILE
    else:
        least, count = _LEAST_OF_SEVERAL, _STRIPS_OF_SEVERAL
    if not squares or tiles.block_q <= least:
        return None
    edges = [tiles.block_q * n // count for n in range(count + 1)]
    return list(itertools.pairwise(edges))
