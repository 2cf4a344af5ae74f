"""Block sizes that are good on a CPU without measuring, and those worth measuring."""

from __future__ import annotations

from typing import NamedTuple

from .layout import ceil_div
from .options import Window

# XLA on CPU divides a batch of matrix products among its threads only inside one product, and only
# if that product's result has at least this many elements. Smaller tiles leave cores idle.
_THREADED_TILE = 512 * 256


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
) -> Blocks:
    """Blocks that are good, not best, on a CPU, for arrays of these shapes.

    From interleaved timings (8 heads, lengths 64 to 4096, dimensions 32 to 128, two Zen 3 cores):

    * The smallest tile that uses all cores wins: larger ones leave the caches and, if causal, reach
      further beyond the diagonal; 1024 x 512 was 1.1 to 2 times slower, 256 x 256 up to 1.7 times.
    * The forward pass prefers long query blocks, because each one reads all keys. In the backward
      pass the roles are exchanged.
    * If even the whole matrix is too small for threads, one tile is best, except in a causal
      forward pass, where tiles of 64 skip almost half of the work.
    * ``head_dim`` changed the times but never the order, so it is not used.
    """
    del window
    (batch, q_len, _, _), (_, k_len, kv_heads, _) = q_shape, k_shape
    heads = kv_heads if by_example else batch * kv_heads
    if q_len * k_len < _THREADED_TILE:
        largest = 64 if causal and not backward else _THREADED_TILE
        return Blocks(max(1, min(q_len, largest)), max(1, min(k_len, largest)), heads)
    if backward:
        block_k, block_q = _long_and_short_block(k_len, q_len)
    else:
        block_q, block_k = _long_and_short_block(q_len, k_len)
    return Blocks(block_q, block_k, heads)


def candidate_blocks(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], *, backward: bool
) -> list[Blocks]:
    """Blocks worth racing, each program once: a longer block than the sequence is the sequence."""
    (batch, q_len, _, _), (_, k_len, kv_heads, _) = q_shape, k_shape
    sides = _BACKWARD_SIDES if backward else _FORWARD_SIDES
    heads = dict.fromkeys((batch * kv_heads, kv_heads, 1))
    found = (Blocks(min(q, q_len), min(k, k_len), h) for q, k in sides for h in heads)
    return list(dict.fromkeys(found))


_FORWARD_SIDES = ((64, 64), (128, 128), (256, 256), (256, 512), (512, 256), (512, 512))
_BACKWARD_SIDES = ((128, 128), (256, 256), (256, 512), (512, 256), (512, 512), (128, 1024))


def _long_and_short_block(long_len: int, short_len: int) -> tuple[int, int]:
    """A block of at most 512, and the smallest other one that makes the tile large enough."""
    long_block = ceil_div(long_len, ceil_div(long_len, 512))  # equal blocks, as in Tiling
    needed = ceil_div(_THREADED_TILE, long_block)
    # Rounding the number of blocks down rounds the size of equal blocks up.
    return long_block, ceil_div(short_len, max(1, short_len // needed))
