"""What the forward function of a gradient rule leaves for the backward function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

STEP = 8
"""Counts of arrays are rounded up to a multiple of this, so that most rules agree on one."""


class Residuals:
    """The residuals of one call, whichever of its arrays are differentiated.

    JAX may trace the forward function several times, once for each set of differentiated arrays,
    and gives the backward function the arrays of any of them in the structure of the last. So each
    trace leaves the same number of arrays, empty ones among them; and what is not an array stays
    here, where the shape of one more empty array says which it is.
    """

    def __init__(self, at_least: int) -> None:
        self._at_least = at_least
        self._beside: dict[int, tuple[int, Any]] = {}
        self._numbers = itertools.count()  # two threads never get the same
        self._room: dict[str, int] = {}

    def has_room(self, count: int) -> bool:
        """Whether this many arrays can be left: the first trace decides how many any trace can.

        There always is for `at_least`, the arguments of the call: whoever has more leaves these,
        and computes the others again in the backward function.
        """
        room = -(-max(count, self._at_least) // STEP) * STEP
        return count <= self._room.setdefault("arrays", room)

    def leave(self, arrays: Sequence[Any], beside: Any) -> list[Any]:
        """What a forward function returns as its residuals."""
        assert self.has_room(len(arrays))
        number = next(self._numbers)
        self._beside[number] = (len(arrays), beside)
        unused = self._room["arrays"] - len(arrays)
        return [np.zeros((0, number), bool), *arrays, *[np.zeros(0, bool)] * unused]

    def take(self, residuals: Sequence[Any]) -> tuple[list[Any], Any]:
        """What a backward function was left: the arrays, and what is no array."""
        count, beside = self._beside[residuals[0].shape[1]]
        return list(residuals[1 : 1 + count]), beside
