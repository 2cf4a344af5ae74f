"""The tiles on the diagonal of a causal call, cut into strips that end where their queries do.

Half of a tile on the diagonal is hidden. Small tiles waste less of it and are slow; a large tile
whose queries meet the keys in strips, each strip only those up to its own last query, is fast and
wastes little.
"""

from __future__ import annotations

import itertools

from ..options import Options
from .tiling import Tiling

# A tile that is all there is has four strips: more are hardly faster, and take longer to trace and
# to compile. Where there are several tiles, only large ones are worth it, and two are enough.
_STRIPS_OF_ONE_TILE = 4
_STRIPS_OF_SEVERAL = 2
_LEAST_OF_ONE = 128  # queries; a tile that is not larger is not cut
_LEAST_OF_SEVERAL = 511

Strip = tuple[int, int]

# Given one of these options, tiles are not cut: what a query sees does not simply end at itself, or
# there is another array that would have to be cut as the scores are.
UNCUT = (
    "bias",
    "mask",
    "segment_ids",
    "q_lengths",
    "kv_lengths",
    "window",
    "dropout_key",
    "sequence_axis",
)


def strips(tiling: Tiling, options: Options) -> list[Strip] | None:
    """The first query and the end of each strip of a query block; None: blocks are not cut.

    Where there are strips, query block `i` sees the keys before its own first position wholly, and
    of the keys from there on, those up to each query.
    """
    squares = (
        options.causal
        and all(getattr(options, name, None) is None for name in UNCUT)
        # On several devices positions are known only when the program runs.
        and all(isinstance(at, int) and at == 0 for at in (options.first_query, options.first_key))
        and tiling.padded_q_len == tiling.padded_k_len
        and tiling.q_len <= tiling.k_len  # else a query would see appended keys
        and tiling.block_q % tiling.block_k == 0
        and tiling.block_k > 1  # nobody asks for steps of one key to be fast
    )
    if tiling.q_blocks == 1:
        least, count = _LEAST_OF_ONE, _STRIPS_OF_ONE_TILE
    else:
        least, count = _LEAST_OF_SEVERAL, _STRIPS_OF_SEVERAL
    if not squares or tiling.block_q <= least:
        return None
    edges = [tiling.block_q * n // count for n in range(count + 1)]
    return list(itertools.pairwise(edges))
