"""Block sizes that are good on a CPU without measuring, and those worth measuring."""

from __future__ import annotations

from typing import NamedTuple

from jaxlib.version import __version__ as _JAXLIB

from .layout import ceil_div
from .options import Window

# Until jaxlib 0.10, XLA on CPU divides a batch of matrix products among its threads only inside one
# product, and only if that product's result has at least so many elements: smaller tiles leave
# cores idle. Since 0.11 the products of a batch are shared out to the threads.
_THREADED_TILE = 512 * 256
_SHARES_OUT_BATCHES = tuple(map(int, _JAXLIB.split(".")[:2])) >= (0, 11)

# The scores of all heads in a tile: so many are still near when they are read again. Half as many
# again as 8 heads need, because equal blocks are seldom the smallest that are large enough.
_CACHED_TILE = 12 * _THREADED_TILE


# Where nothing is skipped, one head at a time is best, in tiles so large that threads seldom wait
# for each other: of so many scores in the forward and in the backward pass.
_FORWARD_TILE = 2**20
_BACKWARD_TILE = 2**19
_LONGEST_SIDE = 2048
_LEAST_SIDE = 128  # of the backward pass; with fewer rows, all heads at once are faster
_LEAST_HEAD = 512 * 512  # scores of a head; with no more, all heads at once are faster

# Causal, what is not longer than this is one tile cut into strips (`diagonal`), of as many heads as
# have so many scores together; until jaxlib 0.10, what is longer too, of one head.
_SHORT = 512
_CUT_SCORES = 2**21
_LONGEST_CUT = 1536
_MOST_CUT_SCORES = 2**22  # of one head

# Causal, with batches shared out: squares of so many heads, which skip most of what is hidden.
_SQUARE = 256
_SMALL_SQUARE = 128  # of short sequences
_HEADS_OF_SQUARES = 8

_NARROW = 512  # of a window: the keys that a query sees in it

# Where a few queries meet all keys at once, keys and values are what is read: so many bytes of them
# are brought into tile layout without leaving the caches; beyond the second figure, not all heads.
_CACHED_KEYS = 2**23
_ALL_KEYS = 2**24


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

    From interleaved timings (8 heads, lengths 64 to 4096, dimensions 32 to 128, two Zen 3 cores):

    * Where nothing is skipped, large tiles of one head took 0.76 to 1.03 of the time of the
      smallest tiles of all heads that use all cores (17 shapes of more than 512 x 512 scores).
    * Causal, a forward pass of up to 512 positions in one tile cut into strips took 0.6 to 0.94 of
      the time of tiles of 64 (jaxlib 0.10) and 0.64 to 0.88 of that of 128 (0.12).
    * Beyond, until jaxlib 0.10, one tile of one head cut into strips took 0.56 to 0.95 of the time
      of 512 x 256 of 8 heads up to 1536 positions, unless 8 heads share their keys: 1.5 at 1024.
    * Since jaxlib 0.11, causal squares of 256 of 8 heads took 0.8 to 0.95 of the time of 512 x 256;
      64 heads at once 1.5.
    * Else the smallest tile that uses all cores wins: larger ones leave the caches and, if causal,
      reach further beyond the diagonal; 1024 x 512 was 1.1 to 2 times slower, 256 x 256 up to 1.7
      times.
    * The forward pass prefers long query blocks, because each one reads all keys. In the backward
      pass the roles are exchanged.
    * In a causal backward pass, squares skip most: about 384 x 384 took 0.75 to 0.95 of the time of
      256 x 512 for lengths of 640 to 1536; from 2048 on 512 x 512 of one head took 0.92 to 1.
    * If even the whole matrix is too small for threads, one tile is best.
    * What small tiles skip can be worth more than threads: tiles of 64 in a causal forward pass of
      129 to 512 that cannot be cut (0.6 of the time there), and in windows of less than 512 keys
      (down to half of the time). With batches shared out, 128 are better in those of more than 128
      keys (0.61 to 0.77 of the time).
    * More than 8 heads at once leave the caches: a batch of 4 then takes up to 5 times as long.
    * Forward, a whole head that is about 128 x 128 is best alone: it stays with its core. Not so
      with batches shared out: all heads took 0.6 to 0.75 of the time.
    * Where all keys of a few queries are one tile, slices of 8 MiB of keys and values took 0.25 to
      0.4 of the time of all at once, from 16 MiB on; below, all at once is best. In the backward
      pass, 128 keys of all heads took 0.8 to 0.95 of it. Until jaxlib 0.10, 256 keys of a slice at
      a time took 0.75 of the time of a single query, and 1.3 where 4 heads share their keys.
    * Else ``head_dim`` changed the times but never the order, so it is not used.
    """
    (batch, q_len, q_heads, _), (_, k_len, kv_heads, head_dim) = q_shape, k_shape
    group = q_heads // kv_heads  # the heads that share keys are rows of the same tile
    if window is None and not by_example:
        if causal and cut and not backward and q_len == k_len:
            longest = _SHORT if shares_out_batches else _LONGEST_CUT
            scores = group * q_len * k_len
            if _SMALL_SQUARE < q_len <= longest and scores <= _MOST_CUT_SCORES:
                together = max(1, _CUT_SCORES // scores) if q_len <= _SHORT else 1
                return Blocks(q_len, k_len, _heads(batch, kv_heads, together))
        if causal and shares_out_batches and min(q_len, k_len) > _SMALL_SQUARE:
            side = _SMALL_SQUARE if max(q_len, k_len) <= _SHORT else _SQUARE
            heads = _heads(batch, kv_heads, _HEADS_OF_SQUARES)
            return Blocks(_nearest(q_len, side), _nearest(k_len, side), heads)
        alone = _tile_of_one_head(q_len, k_len, group, causal=causal, backward=backward)
        if alone is not None:
            return Blocks(*alone, heads=1)
    left, right = window or (None, None)
    width = left + right if left is not None and right is not None else _THREADED_TILE
    corner = causal and not backward and 128 * 128 < q_len * k_len <= 512 * 512
    if shares_out_batches and 128 < width <= _NARROW:
        block_q, block_k = min(q_len, 128), min(k_len, 128)
    elif corner or width < _NARROW:
        block_q, block_k = min(q_len, 64), min(k_len, 64)
    elif group * q_len * k_len < _THREADED_TILE:
        block_q, block_k = q_len, k_len
    elif backward and causal and (group, q_len) == (1, k_len) and k_len > 512:
        block_q = block_k = _nearest(k_len, 384)
    elif backward:
        block_k, block_q = _long_and_short_block(k_len, q_len, short_rows=group)
    else:
        block_q, block_k = _long_and_short_block(q_len, k_len, long_rows=group)
    heads = batch * kv_heads
    in_cache = max(1, _CACHED_TILE // (group * block_q * block_k))
    key_bytes = 2 * 4 * k_len * head_dim  # of a head: keys and values, in float32
    if (block_q, block_k) == (q_len, k_len) and heads * key_bytes > _ALL_KEYS:
        if backward:
            block_k = min(k_len, 128)
        else:
            in_cache = min(in_cache, max(1, _CACHED_KEYS // key_bytes))
            if group * q_len == 1 and not shares_out_batches:
                block_k = min(k_len, 256)
    if not (backward or shares_out_batches) and 64 * 64 < group * q_len * k_len <= 128 * 128:
        heads = 1
    elif by_example or heads > in_cache:
        heads = min(kv_heads, in_cache)  # of one example: two of ten were slower than one or all
    return Blocks(block_q, block_k, heads)


def candidate_blocks(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], *, backward: bool
) -> list[Blocks]:
    """Blocks worth racing, each program once: a longer block than the sequence is the sequence."""
    (batch, q_len, _, _), (_, k_len, kv_heads, _) = q_shape, k_shape
    sides = _BACKWARD_SIDES if backward else _FORWARD_SIDES
    of_one_head = _BACKWARD_SIDES_OF_ONE_HEAD if backward else _FORWARD_SIDES_OF_ONE_HEAD
    heads = dict.fromkeys((batch * kv_heads, kv_heads, 1))
    found = [(q, k, h) for q, k in sides for h in heads] + [(q, k, 1) for q, k in of_one_head]
    return list(dict.fromkeys(Blocks(min(q, q_len), min(k, k_len), h) for q, k, h in found))


_FORWARD_SIDES = ((64, 64), (128, 128), (256, 256), (512, 256))
_FORWARD_SIDES_OF_ONE_HEAD = ((1024, 1024), (2048, 512))
_BACKWARD_SIDES = ((128, 128), (256, 256), (384, 384), (256, 512), (512, 512))
_BACKWARD_SIDES_OF_ONE_HEAD = ((512, 1024), (256, 2048))


def _heads(batch: int, kv_heads: int, most: int) -> int:
    """At most so many key heads: all of all examples, or some of one."""
    return batch * kv_heads if batch * kv_heads <= most else min(kv_heads, most)


def _tile_of_one_head(
    q_len: int, k_len: int, group: int, *, causal: bool, backward: bool
) -> tuple[int, int] | None:
    """Queries and keys of a tile, where one head at a time is best; else None."""
    if causal:
        large = backward and group == 1 and min(q_len, k_len) >= _LONGEST_SIDE
        return (_equal(q_len, 512), _equal(k_len, 512)) if large else None
    if group * q_len * k_len <= _LEAST_HEAD:
        return None
    if not backward:
        block_q = _equal(q_len, _LONGEST_SIDE // group)
        return block_q, _nearest(k_len, _FORWARD_TILE / (block_q * group))
    if min(group * q_len, k_len) < _LEAST_SIDE:
        return None
    block_k = _equal(k_len, _LONGEST_SIDE)
    return _nearest(q_len, _BACKWARD_TILE / (block_k * group)), block_k


def _equal(length: int, most: int) -> int:
    """The size of equal blocks of at most so many, as in Tiling."""
    return ceil_div(length, ceil_div(length, max(1, most)))


def _nearest(length: int, wanted: float) -> int:
    """The size of equal blocks that comes nearest to the wanted one."""
    return ceil_div(length, max(1, round(length / wanted)))


def _long_and_short_block(
    long_len: int, short_len: int, long_rows: int = 1, short_rows: int = 1
) -> tuple[int, int]:
    """A block of at most 512 rows, and the smallest other one that makes the tile large enough.

    A query is as many rows of a tile as there are heads that share its keys.
    """
    long_block = _equal(long_len, 512 // long_rows)
    needed = ceil_div(_THREADED_TILE, long_block * long_rows * short_rows)
    # Rounding the number of blocks down rounds the size of equal blocks up.
    return long_block, ceil_div(short_len, max(1, short_len // needed))
