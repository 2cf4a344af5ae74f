"""The tile of a matrix product."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one step of a matrix product ``(rows, depth) @ (depth, columns)`` works on.

    Args:
      rows: of the left matrix, the tokens.
      columns: of the right one.
      depth: how much of the axis that both share.
      warps: of a GPU's block of threads.
      stages: loads in flight on a GPU.

    >>> Tile(rows=256).within(rows=100, columns=64, depth=1000)
    Tile(rows=100, columns=64, depth=128, warps=4, stages=2)
    """

    rows: int = 128
    columns: int = 128
    depth: int = 128
    warps: int = 4
    stages: int = 2

    def within(self, rows: int, columns: int, depth: int) -> Tile:
        """No longer in any direction than the arrays are."""
        return dataclasses.replace(
            self,
            rows=min(self.rows, rows),
            columns=min(self.columns, columns),
            depth=min(self.depth, depth),
        )
