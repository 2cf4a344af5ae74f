"""Block sizes that are good on a CPU without measuring, and those worth measuring.

Figures are from interleaved timings on two Zen 3 cores: 8 heads, lengths 64 to 4096, dimensions 32
to 256, where nothing else is said. A rule gives the share of the time that its blocks take versus
those that would be chosen without it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxlib.version import __version__ as _JAXLIB

from ..options import Window
from ..scalars import ceil_div
from ..tiles import equal_blocks

# Until jaxlib 0.10, XLA on CPU divides a batch of matrix products among its threads only inside one
# product, and only if that product's result has at least so many elements: smaller tiles leave
# cores idle. Since 0.11 the products of a batch are shared out to the threads.
_THREADED_TILE = 512 * 256
_SHARES_OUT_BATCHES = tuple(map(int, _JAXLIB.split(".")[:2])) >= (0, 11)

# The scores of all heads in a tile: so many are still near when they are read again. Half as many
# again as 8 heads need, because equal blocks are seldom the smallest that are large enough.
_CACHED_TILE = 12 * _THREADED_TILE

_SHORT = 512  # a sequence of so many positions, or fewer
_SMALL_SQUARE = 128  # a shorter one is not divided


class Blocks(NamedTuple):
    """Most queries, keys, and key heads (those of all examples counted) in a tile."""

    q: int
    k: int
    heads: int


def default_blocks(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    *,
    causal: bool,
    backward: bool,
    window: Window | None = None,
    by_example: bool = False,
    cut: bool = True,
    shares_out_batches: bool = _SHARES_OUT_BATCHES,
) -> Blocks:
    """Blocks that are good, not best, on a CPU, for arrays of these shapes.

    Where examples have lengths or segments of their own (`by_example`), one at a time skips most.
    `cut` says that nothing hinders tiles on the diagonal from being cut into strips, as `diagonal`
    explains; `shares_out_batches`, what XLA does with a batch of products.

    Example:
        >>> shape = (1, 512, 8, 64)
        >>> default_blocks(shape, shape, causal=False, backward=False)
        Blocks(q=512, k=256, heads=8)
    """
    (batch, q_len, q_heads, _), (_, k_len, kv_heads, head_dim) = q_shape, k_shape
    group = q_heads // kv_heads
    call = _Call(batch, q_len, k_len, kv_heads, group, head_dim, backward, shares_out_batches)
    if window is None and not by_example:
        if causal:
            blocks = (_cut_tile(call) if cut else None) or _squares(call)
        else:
            blocks = _tile_of_one_head(call)
        if blocks is not None:
            return blocks
    left, right = window or (None, None)
    width = left + right if left is not None and right is not None else None
    return _small_tile(call, causal=causal, width=width, by_example=by_example)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the rules decide by. The heads of a group share keys, and are rows of the same tile."""

    batch: int
    q_len: int
    k_len: int
    kv_heads: int
    group: int
    head_dim: int
    backward: bool
    shares_out_batches: bool

    @property
    def scores(self) -> int:
        """How many scores a key head has."""
        return self.group * self.q_len * self.k_len

    def at_most(self, heads: float) -> int:
        """So many key heads at once: all of all examples, or some of one.

        Two examples of ten were slower than one or all.
        """
        everything = self.batch * self.kv_heads
        return everything if everything <= heads else min(self.kv_heads, max(1, int(heads)))

    def near(self, block_q: int, block_k: int) -> int:
        """As many key heads as stay in the caches: more took up to 5 times as long."""
        return self.at_most(_CACHED_TILE // (self.group * block_q * block_k))


_CUT_SCORES = 2**21  # in a tile of several heads
_LONGEST_CUT = 1536
_MOST_CUT_SCORES = 2**22  # of one head


def _cut_tile(call: _Call) -> Blocks | None:
    """Causal and forward, where a sequence is one tile cut into strips.

    Up to 512 positions it took 0.6 to 0.94 of the time of tiles of 64 (jaxlib 0.10), 0.64 to 0.88
    of that of 128 (0.12). Beyond, until jaxlib 0.10, one head at a time took 0.56 to 0.95 of that
    of 512 x 256 of 8 heads up to 1536, unless 8 heads share their keys: 1.5 at 1024.
    """
    longest = _SHORT if call.shares_out_batches else _LONGEST_CUT
    if (
        call.backward
        or call.q_len != call.k_len
        or not _SMALL_SQUARE < call.q_len <= longest
        or call.scores > _MOST_CUT_SCORES
    ):
        return None
    together = _CUT_SCORES / call.scores if call.q_len <= _SHORT else 1
    return Blocks(call.q_len, call.k_len, call.at_most(together))


_SQUARE = 256
_HEADS_OF_SQUARES = 8


def _squares(call: _Call) -> Blocks | None:
    """Causal: squares skip most of what is hidden.

    Forward, until jaxlib 0.10, they are too small for threads. With batches shared out, 256 x 256
    of 8 heads took 0.8 to 0.95 of the time of 512 x 256; 64 heads at once 1.5.
    """
    if not call.shares_out_batches:
        return _squares_of_gradients(call) if call.backward else None
    if min(call.q_len, call.k_len) <= _SMALL_SQUARE:
        return None
    side = _SMALL_SQUARE if max(call.q_len, call.k_len) <= _SHORT else _SQUARE
    block_q, block_k = _nearest(call.q_len, side), _nearest(call.k_len, side)
    return Blocks(block_q, block_k, call.at_most(_HEADS_OF_SQUARES))


_THREADED_SQUARE = 384
_LEAST_WHOLE = 352


def _squares_of_gradients(call: _Call) -> Blocks | None:
    """Causal and backward, until jaxlib 0.10.

    * 512 x 512 of one head from 2048 positions on took 0.92 to 1 of the time of 256 x 512.
    * Squares of about 384 for 640 to 1536 took 0.75 to 0.95 of it; where heads share their keys,
      0.86 to 0.95 of the smallest tiles that use all cores. From dimension 128 on, one head at a
      time took 0.74 to 0.95 of all.
    * 128 x 128 up to 512 positions, where heads share their keys, took 0.72 to 0.97 of it.
    * Else a whole head took 0.72 to 0.98 from 384 to 512 positions, and 64 x 64 took 0.78 to 0.97
      below (1.1 with dimension 128).
    """
    length = call.k_len
    if call.group == 1 and min(call.q_len, length) >= _LONGEST_SIDE:
        return Blocks(equal_blocks(call.q_len, 512), equal_blocks(length, 512), heads=1)
    if call.q_len != length or length <= _SMALL_SQUARE:
        return None
    if length > _SHORT:
        side = _nearest(length, _THREADED_SQUARE)
        return Blocks(side, side, 1 if call.head_dim >= 128 else call.near(side, side))
    if call.group > 1:
        return Blocks(128, 128, call.near(128, 128))
    if length >= _LEAST_WHOLE:
        return Blocks(length, length, heads=1)
    return Blocks(64, 64, call.at_most(_HEADS_OF_SQUARES))


# One head at a time, in tiles so large that threads seldom wait for each other: of so many scores.
_FORWARD_TILE = 2**20
_BACKWARD_TILE = 2**19
_LONGEST_SIDE = 2048
_LEAST_SIDE = 128  # of the backward pass; with fewer rows, all heads at once are faster
_LEAST_HEAD = 512 * 512  # scores of a head; with no more, all heads at once are faster


def _tile_of_one_head(call: _Call) -> Blocks | None:
    """Where nothing is skipped, large tiles of one head.

    They took 0.76 to 1.03 of the time of the smallest tiles of all heads that use all cores (17
    shapes of more than 512 x 512 scores).
    """
    group, q_len, k_len = call.group, call.q_len, call.k_len
    if call.scores <= _LEAST_HEAD:
        return None
    if not call.backward:
        block_q = equal_blocks(q_len, _LONGEST_SIDE // group)
        return Blocks(block_q, _nearest(k_len, _FORWARD_TILE / (block_q * group)), heads=1)
    if min(group * q_len, k_len) < _LEAST_SIDE:
        return None
    block_k = equal_blocks(k_len, _LONGEST_SIDE)
    return Blocks(_nearest(q_len, _BACKWARD_TILE / (block_k * group)), block_k, heads=1)


_NARROW = 512  # of a window: the keys that a query sees in it

# Where a few queries meet all keys at once, keys and values are what is read: so many bytes of them
# are brought into tile layout without leaving the caches; beyond the second figure, not all heads.
_CACHED_KEYS = 2**23
_ALL_KEYS = 2**24


def _small_tile(call: _Call, *, causal: bool, width: int | None, by_example: bool) -> Blocks:
    """The smallest tile that uses all cores, or a smaller one if that skips much more.

    * Larger ones leave the caches and, if causal, reach further beyond the diagonal: 1024 x 512 was
      1.1 to 2 times slower, 256 x 256 up to 1.7 times.
    * Forward wants at most 512 queries (they read all keys), backward at most 512 keys.
    * If even the whole matrix is too small for threads, one tile is best.
    * Tiles of 64 took 0.6 of the time in a causal forward pass of 129 to 512 that cannot be cut,
      and down to half in windows of less than 512 keys. With batches shared out, 128 are better in
      those of more than 128 keys (0.61 to 0.77).
    * Where all keys of a few queries are one tile, slices of 8 MiB of keys and values took 0.25 to
      0.4 of the time of all at once, from 16 MiB on; below, all at once is best. In the backward
      pass, 128 keys of all heads took 0.8 to 0.95 of it. Until jaxlib 0.10, 256 keys of a slice at
      a time took 0.75 of the time of a single query, and 1.3 where 4 heads share their keys.
    * All heads of 128 x 128 take 1.02 to 1.13 of the time of one at a time in the forward pass
      (jaxlib 0.10), and 0.85 to 0.95 in both passes together, which then share their layout.
    """
    q_len, k_len, backward = call.q_len, call.k_len, call.backward
    corner = causal and not backward and 128 * 128 < q_len * k_len <= _SHORT * _SHORT
    if width is not None and 128 < width <= _NARROW and call.shares_out_batches:
        block_q, block_k = min(q_len, 128), min(k_len, 128)
    elif corner or (width is not None and width < _NARROW):
        block_q, block_k = min(q_len, 64), min(k_len, 64)
    elif call.scores < _THREADED_TILE:
        block_q, block_k = q_len, k_len
    elif backward and causal and q_len == k_len > _SHORT:
        block_q = block_k = _nearest(k_len, _THREADED_SQUARE)
    elif backward:
        block_k, block_q = _long_and_short_block(k_len, q_len, short_rows=call.group)
    else:
        block_q, block_k = _long_and_short_block(q_len, k_len, long_rows=call.group)
    heads = call.near(block_q, block_k)
    key_bytes = 2 * 4 * k_len * call.head_dim  # of a head: keys and values, in float32
    if (block_q, block_k) == (q_len, k_len) and call.batch * call.kv_heads * key_bytes > _ALL_KEYS:
        if backward:
            block_k = min(k_len, 128)
        else:
            heads = min(heads, call.at_most(_CACHED_KEYS // key_bytes))
            if call.group * q_len == 1 and not call.shares_out_batches:
                block_k = min(k_len, 256)
    return Blocks(block_q, block_k, min(heads, call.kv_heads) if by_example else heads)


def candidate_blocks(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], *, backward: bool
) -> list[Blocks]:
    """Blocks worth racing, each program once: a longer block than the sequence is the sequence."""
    (batch, q_len, _, _), (_, k_len, kv_heads, _) = q_shape, k_shape
    sides, of_one_head = _CANDIDATES[backward]
    heads = dict.fromkeys((batch * kv_heads, kv_heads, 1))
    found = [(q, k, h) for q, k in sides for h in heads] + [(q, k, 1) for q, k in of_one_head]
    return list(dict.fromkeys(Blocks(min(q, q_len), min(k, k_len), h) for q, k, h in found))


# Queries and keys in a tile of some heads and in one of one head, forward (False) and backward.
_CANDIDATES = {
    False: (((64, 64), (128, 128), (256, 256), (512, 256)), ((1024, 1024), (2048, 512))),
    True: (
        ((128, 128), (256, 256), (384, 384), (256, 512), (512, 512)),
        ((512, 1024), (256, 2048)),
    ),
}


def _nearest(length: int, wanted: float) -> int:
    """The size of equal blocks that comes nearest to the wanted one."""
    return ceil_div(length, max(1, round(length / wanted)))


def _long_and_short_block(
    long_len: int, short_len: int, long_rows: int = 1, short_rows: int = 1
) -> tuple[int, int]:
    """A block of at most 512 rows, and the smallest other one that makes the tile large enough.

    A query is as many rows of a tile as there are heads that share its keys.
    """
    long_block = equal_blocks(long_len, 512 // long_rows)
    needed = ceil_div(_THREADED_TILE, long_block * long_rows * short_rows)
    # Rounding the number of blocks down rounds the size of equal blocks up.
    return long_block, ceil_div(short_len, max(1, short_len // needed))
