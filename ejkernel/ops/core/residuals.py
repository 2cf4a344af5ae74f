"""What the forward function of a gradient rule leaves for the backward function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

CAPACITY_MULTIPLE = 8
"""Capacities are rounded up to a multiple of this, so that most traces of a call fit into one."""


class Residuals:
    """The residuals of one call, whichever of its arrays are differentiated.

    `jax.custom_vjp` needs residuals of the same structure from every trace of the forward function,
    and it traces once for each set of differentiated arrays. So each trace is padded with empty
    arrays to a fixed number, and what is no array stays here: the shape of one more empty array is
    the number under which it is found.

    `min_capacity` is the number of arrays that always fit: the arguments of the call.
    """

    def __init__(self, min_capacity: int) -> None:
        self._min_capacity = min_capacity
        self._static: dict[int, tuple[int, Any]] = {}
        self._numbers = itertools.count()  # two threads never get the same
        self._capacity: dict[str, int] = {}

    def reserve(self, count: int) -> bool:
        """Whether this many arrays fit: the first trace fixes the capacity of all of them.

        A trace with more packs the arguments instead, and computes the others again in the backward
        function.
        """
        multiples = -(-max(count, self._min_capacity) // CAPACITY_MULTIPLE)
        return count <= self._capacity.setdefault("arrays", multiples * CAPACITY_MULTIPLE)

    def pack(self, arrays: Sequence[Any], static: Any) -> list[Any]:
        """What a forward function returns as its residuals."""
        assert self.reserve(len(arrays))
        number = next(self._numbers)
        self._static[number] = (len(arrays), static)
        unused = self._capacity["arrays"] - len(arrays)
        return [np.zeros((0, number), bool), *arrays, *[np.zeros(0, bool)] * unused]

    def unpack(self, residuals: Sequence[Any]) -> tuple[list[Any], Any]:
        """The arrays that were packed, and what is no array."""
        count, static = self._static[residuals[0].shape[1]]
        return list(residuals[1 : 1 + count]), static
