"""Which pages of a cache are free, and which belong to whom: enough for a small server.

Pages themselves are arrays of the user's; this counts them. All of it is NumPy on the host, and
takes microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class OutOfPages(RuntimeError):
    """More tokens than there are free pages for; nothing was changed."""


class PagePool:
    """The pages of a cache, and the sequences that have some of them.

    Args:
      pages: how many there are.
      page_size: tokens that one holds.
      sequences: how many there are at a time at most: the rows of the page table.
      pages_per_sequence: the columns of the page table.

    >>> pool = PagePool(pages=8, page_size=4, sequences=2, pages_per_sequence=4)
    >>> a, b = pool.add(), pool.add()
    >>> pool.extend({a: 6, b: 1})  # a prompt of six tokens, and one of one
    array([0, 6, 7], dtype=int32)
    >>> pool.lengths, pool.free_pages
    (array([6, 1], dtype=int32), 5)
    >>> pool.remove(a)
    >>> pool.extend({b: 1}), pool.free_pages
    (array([0, 0, 1], dtype=int32), 7)
    """

    def __init__(
        self, *, pages: int, page_size: int, sequences: int, pages_per_sequence: int
    ) -> None:
        sizes = {
            "pages": pages,
            "page_size": page_size,
            "sequences": sequences,
            "pages_per_sequence": pages_per_sequence,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"PagePool: {name}={size} must be at least 1")
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._rows = list(range(sequences - 1, -1, -1))
        self._table = np.zeros((sequences, pages_per_sequence), np.int32)
        self._lengths = np.zeros(sequences, np.int32)

    @property
    def free_pages(self) -> int:
        """How many pages nobody has."""
        return len(self._free)

    @property
    def free_sequences(self) -> int:
        """How many sequences may be added."""
        return len(self._rows)

    # Copies: JAX may use the memory of a NumPy array without copying it, after it was changed here.

    @property
    def page_table(self) -> np.ndarray:
        """`(sequences, pages_per_sequence)`; zeros where a sequence has no page."""
        return self._table.copy()

    @property
    def lengths(self) -> np.ndarray:
        """`(sequences,)`: tokens of each; zero if there is none."""
        return self._lengths.copy()

    def add(self) -> int:
        """A new sequence without tokens: its row in the page table."""
        if not self._rows:
            raise OutOfPages(f"PagePool: all {len(self._lengths)} sequences are taken")
        return self._rows.pop()

    def pages_for(self, row: int, tokens: int) -> int:
        """How many more pages a sequence needs for so many more tokens."""
        self._check(row)
        if tokens < 0:
            raise ValueError(f"PagePool: sequence {row} cannot have {tokens} new tokens")
        length = int(self._lengths[row])
        return -(-(length + tokens) // self.page_size) + -length // self.page_size

    def extend(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Give sequences pages for new tokens, by row, and count these in their lengths.

        Returns:
          `query_starts`, `(sequences + 1,)`: where each sequence's new tokens are when they are
          packed in the order of rows.
        """
        needed = {row: self.pages_for(row, count) for row, count in tokens.items()}
        limit = self._table.shape[1] * self.page_size
        for row, count in tokens.items():
            if self._lengths[row] + count > limit:
                raise OutOfPages(
                    f"PagePool: sequence {row} would have {self._lengths[row] + count} tokens, and "
                    f"{self._table.shape[1]} pages of {self.page_size} hold {limit}"
                )
        if (total := sum(needed.values())) > len(self._free):
            raise OutOfPages(
                f"PagePool: {total} more pages are needed, and {len(self._free)} are free"
            )
        counts = np.zeros(len(self._lengths), np.int64)
        for row, count in tokens.items():
            held = -(-int(self._lengths[row]) // self.page_size)
            for place in range(held, held + needed[row]):
                self._table[row, place] = self._free.pop()
            self._lengths[row] += count
            counts[row] = count
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    def remove(self, row: int) -> None:
        """A sequence has ended: its pages and its row are free."""
        self._check(row)
        held = -(-int(self._lengths[row]) // self.page_size)
        self._free.extend(int(page) for page in self._table[row, :held][::-1])
        self._table[row], self._lengths[row] = 0, 0
        self._rows.append(row)

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self._lengths) or row in self._rows:
            raise ValueError(f"PagePool: there is no sequence {row}")
