"""How many bytes a Pallas grid copies: a block is copied when its index changes between steps."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.extend.core
import numpy as np

MOST_STEPS = 1 << 16  # a larger grid is not walked through


def moved_bytes(grid_mapping: Any) -> int | None:
    """Bytes of all block copies of a grid; None if the index maps depend on run-time values.

    The grid runs in order, its last axis fastest, as on a TPU. On a GPU blocks run in any order
    and each reads its own, which is the same number if nothing is shared between them.
    """
    grid = tuple(grid_mapping.grid)
    steps = math.prod(grid)
    if steps > MOST_STEPS or steps == 0:
        return None
    points = np.indices(grid, np.int32).reshape(len(grid), steps).T
    total = 0
    for mapping in grid_mapping.block_mappings:
        closed = mapping.index_map_jaxpr
        if len(closed.in_avals) != len(grid):
            return None  # it also reads prefetched scalars
        shape = [getattr(size, "block_size", size) for size in mapping.block_shape]
        sizes = [size if isinstance(size, int) else 1 for size in shape]
        dtype = mapping.array_aval.dtype if hasattr(mapping, "array_aval") else None
        if dtype is None:
            return None
        copies = _changes(closed, points)
        total += copies * math.prod(sizes) * np.dtype(dtype).itemsize
    return total


def _changes(closed: Any, points: Any) -> int:
    """How often the block index differs from that of the step before, the first one included."""
    evaluate = jax.extend.core.jaxpr_as_fun(closed)
    indices = jax.vmap(lambda point: evaluate(*[point[i] for i in range(point.shape[0])]))(points)
    columns = np.stack([np.broadcast_to(np.asarray(i), (len(points),)) for i in indices], 1)
    return 1 + int(np.any(columns[1:] != columns[:-1], axis=1).sum())
