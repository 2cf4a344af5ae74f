"""How many bytes a Pallas grid reads and writes, block by block."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.extend.core
import numpy as np

MOST_STEPS = 1 << 16  # a larger grid is not walked through


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of a launch.

    Attributes:
      moved: of blocks whose index differs from that of the step before: what a TPU copies, whose
        grid runs in order, the last axis fastest.
      loaded: of the blocks of all steps: what a GPU reads, whose blocks know nothing of each other.
      unique: of the arrays.
    """

    moved: int
    loaded: int
    unique: int


def traffic_of(grid_mapping: Any) -> Traffic | None:
    """The traffic of a grid; None if it is too large or its index maps read run-time values."""
    grid = tuple(grid_mapping.grid)
    steps = math.prod(grid)
    if steps > MOST_STEPS or steps == 0:
        return None
    points = np.indices(grid, np.int32).reshape(len(grid), steps).T
    moved = loaded = unique = 0
    for mapping in grid_mapping.block_mappings:
        index_map = mapping.index_map_jaxpr
        if len(index_map.in_avals) != len(grid):
            return None  # it also reads prefetched scalars
        array = mapping.array_aval
        sizes = [getattr(size, "block_size", size) for size in mapping.block_shape]
        elements = math.prod(size if isinstance(size, int) else 1 for size in sizes)
        block = elements * np.dtype(array.dtype).itemsize
        moved += _changes(index_map, points) * block
        loaded += steps * block
        unique += math.prod(array.shape) * np.dtype(array.dtype).itemsize
    return Traffic(moved, loaded, unique)


def _changes(index_map: Any, points: Any) -> int:
    """How often the block index differs from that of the step before, the first one included."""
    evaluate = jax.extend.core.jaxpr_as_fun(index_map)
    indices = jax.vmap(lambda point: evaluate(*[point[i] for i in range(point.shape[0])]))(points)
    columns = np.stack([np.broadcast_to(np.asarray(i), (len(points),)) for i in indices], 1)
    return 1 + int(np.any(columns[1:] != columns[:-1], axis=1).sum())
