"""How the score matrix is cut into tiles, and which of them are needed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..options import Options
from ..scalars import Index, ceil_div, clamp, larger, minus, plus, quotient, smaller, times
from .layout import counting, pad


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Equal blocks of queries and of keys.

    1000 queries in blocks of at most 512 become 500 and 500, not 512 and 488. Then fewer zeros are
    appended than there are blocks, and nothing if the length divides evenly.
    """

    q_len: int
    k_len: int
    group: int  # query heads per key head
    q_blocks: int
    k_blocks: int

    @staticmethod
    def of(q: jax.Array, k: jax.Array, block_q: int, block_k: int) -> Tiling:
        """The tiles of `(batch, length, heads, head_dim)` arrays, for blocks of at most a size."""
        (_, q_len, q_heads, _), (_, k_len, kv_heads, _) = q.shape, k.shape
        if q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads cannot be shared out to {kv_heads} key heads")
        q_blocks, k_blocks = max(1, ceil_div(q_len, block_q)), max(1, ceil_div(k_len, block_k))
        return Tiling(q_len, k_len, q_heads // kv_heads, q_blocks, k_blocks)

    @property
    def block_q(self) -> int:
        return max(1, ceil_div(self.q_len, self.q_blocks))

    @property
    def block_k(self) -> int:
        return max(1, ceil_div(self.k_len, self.k_blocks))

    @property
    def padded_q_len(self) -> int:
        return self.q_blocks * self.block_q

    @property
    def padded_k_len(self) -> int:
        return self.k_blocks * self.block_k


@dataclasses.dataclass(frozen=True)
class Needed:
    """Which tiles hold scores that count: from the positions alone, and from the data if it says.

    `data` is a table of `(q_blocks, k_blocks)` booleans, or None. Of a row or a column of it the
    part between the first and the last True is walked through: all of it that counts where segment
    ids are sorted, as in packed sequences.
    """

    tiling: Tiling
    options: Options
    data: jax.Array | None

    @staticmethod
    def of(tiling: Tiling, options: Options) -> Needed:
        """For the examples and heads that the options hold."""
        return Needed(tiling, options, _needed_by_data(tiling, options))

    def keys_seen_by(self, i: Index) -> tuple[Index, Index, Index]:
        """Of the key blocks: the first that query block `i` sees anything of, the first that it
        does not see wholly, and the end."""
        tiling = self.tiling
        if tiling.k_blocks == 1:
            return 0, self._one_block_seen_wholly(), 1  # see `loop`
        left, right = self._band()
        first_query = times(i, tiling.block_q)
        next_query = plus(first_query, tiling.block_q)
        begin: Index = 0
        end: Index = tiling.k_blocks
        if left is not None:
            begin = self._key_block(plus(first_query, left))
        if right is not None:
            seen = clamp(0, plus(next_query, right), tiling.k_len)
            end = quotient(plus(seen, tiling.block_k - 1), tiling.block_k)
        begin, end = self._cut(begin, end, i, axis=1)
        if self.options.hides_anywhere:
            return begin, begin, end
        whole: Index = tiling.k_len // tiling.block_k
        if right is not None:
            seen_by_all = clamp(0, plus(plus(first_query, 1), right), tiling.k_len)
            whole = quotient(seen_by_all, tiling.block_k)
        return begin, whole, end

    def queries_seeing(self, j: Index) -> tuple[Index, Index, Index]:
        """Of the query blocks: the first that sees anything of key block `j`, the first that sees
        all of it, and the end."""
        tiling = self.tiling
        if tiling.q_blocks == 1:
            return 0, 1 - self._one_block_seen_wholly(), 1  # see `loop`
        left, right = self._band()
        first_key = times(j, tiling.block_k)
        next_key = plus(first_key, tiling.block_k)
        begin: Index = 0
        whole: Index = 0
        end: Index = tiling.q_blocks
        if right is not None:
            begin = self._query_block(plus(first_key, minus(right)))
            # The queries from the last key's position on see the whole block.
            above = clamp(0, plus(plus(next_key, -1), minus(right)), tiling.padded_q_len)
            whole = quotient(plus(above, tiling.block_q - 1), tiling.block_q)
        if left is not None:
            seen = clamp(0, plus(next_key, minus(left)), tiling.q_len)
            end = quotient(plus(seen, tiling.block_q - 1), tiling.block_q)
        begin, end = self._cut(begin, end, j, axis=0)
        if self.options.hides_anywhere:
            return begin, end, end
        if tiling.k_len < tiling.padded_k_len:  # then nobody sees all of the last block
            padding = clamp(0, plus(next_key, -tiling.k_len), 1)
            whole = larger(whole, times(padding, tiling.q_blocks))
        return begin, whole, end

    def _one_block_seen_wholly(self) -> int:
        """1 if nothing is hidden anywhere, else 0: what is known of a line with a single tile."""
        padded = self.tiling.k_len < self.tiling.padded_k_len
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

    def _key_block(self, key: Index) -> Index:
        return quotient(clamp(0, key, self.tiling.padded_k_len), self.tiling.block_k)

    def _query_block(self, query: Index) -> Index:
        return quotient(clamp(0, query, self.tiling.padded_q_len), self.tiling.block_q)

    def _cut(self, begin: Index, end: Index, index: Index, axis: int) -> tuple[Index, Index]:
        """Shorten a range of blocks to what the data needs of a row or a column of tiles."""
        if self.data is None:
            return begin, end
        line = self.data[index] if axis == 1 else self.data[:, index]
        first = jnp.argmax(line).astype(jnp.int32)
        last = line.shape[0] - jnp.argmax(line[::-1]).astype(jnp.int32)
        return larger(begin, first), smaller(end, jnp.where(jnp.any(line), last, 0))


def _needed_by_data(tiling: Tiling, options: Options) -> jax.Array | None:
    """Which tiles any example or head needs, by segment ids, lengths and mask."""
    needed = None
    if options.by_example:
        q_low, q_high = _id_bounds(
            options.segment_ids,
            options.q_lengths,
            options.first_query,
            tiling.q_len,
            tiling.q_blocks,
        )
        k_low, k_high = _id_bounds(
            options.kv_segment_ids,
            options.kv_lengths,
            options.first_key,
            tiling.k_len,
            tiling.k_blocks,
        )
        overlap = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
        needed = jnp.any(overlap, axis=0)
    if options.mask is not None:
        by_rows = _any_in_blocks(jnp.any(options.mask, axis=(0, 1)), tiling.q_blocks, 0)
        by_mask = _any_in_blocks(by_rows, tiling.k_blocks, 1)
        needed = by_mask if needed is None else needed & by_mask
    if needed is None:
        return None
    return jnp.broadcast_to(needed, (tiling.q_blocks, tiling.k_blocks))


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
