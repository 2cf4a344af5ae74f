"""Sizes of blocks."""

from __future__ import annotations


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is not less; Pallas has the same, and takes long to import.

    >>> [next_power_of_two(size) for size in (1, 5, 8)]
    [1, 8, 8]
    """
    return 1 << (size - 1).bit_length()
