"""How much measuring a tuning run may do: effort levels and budgets, in one place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Effort:
    """How candidates are measured.

    Attributes:
      name: what it is called.
      screening: samples of every candidate before the first ones leave.
      rounds: most samples of the finalists.
      share_of_build: racing takes this share of the time that compiling took, once everyone has run
        twice the screening rounds: precision that costs more than it can gain is waste. A race
        that is still in doubt then, as on a busy machine, may take `PATIENCE` times as long.
      margin: a race is over when the leader is surely within this share of the best.
      finalists: how many of a search's best are raced against each other at its end.
      share_of_space: how much of a large space is evaluated.
      most_evaluations: never more than this many candidates.
    """

    name: str
    screening: int
    rounds: int
    share_of_build: float
    margin: float
    finalists: int
    share_of_space: float
    most_evaluations: int

    def lower(self) -> Effort:
        """The next lower level; the lowest one, and one of your own, stays what it is."""
        names = list(EFFORTS)
        if EFFORTS.get(self.name) != self:
            return self
        return EFFORTS[names[max(0, names.index(self.name) - 1)]]


PATIENCE = 4
SETTLING = 0.25  # seconds of a race in which nobody leaves yet
DOUBT = 0.01  # a race whose leader may be slower than another by more than this is in doubt

EFFORTS: dict[str, Effort] = {
    effort.name: effort
    for effort in (
        Effort("quick", 2, 12, 0.06, 0.03, 4, 0.10, 24),
        Effort("standard", 3, 40, 0.10, 0.01, 8, 0.20, 64),
        Effort("full", 5, 100, 10.0, 0.005, 12, 1.0, 100_000),
    )
}


def effort_of(name: str | Effort) -> Effort:
    """An effort by name; an `Effort` of your own is taken as it is."""
    if isinstance(name, Effort):
        return name
    if name not in EFFORTS:
        raise ValueError(f"effort={name!r} is not known; it is one of {', '.join(EFFORTS)}")
    return EFFORTS[name]


@dataclasses.dataclass
class Budget:
    """What is left to spend: seconds and evaluations, either of them unlimited by default."""

    seconds: float | None = None
    evaluations: int | None = None
    timer: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("evaluations", self.evaluations)):
            if value is not None and not value > 0:
                raise ValueError(f"budget: {name}={value!r} must be positive (None: no limit)")
        self._start = self.timer()
        self._spent = 0

    def spend(self, evaluations: int = 1) -> None:
        """Count evaluated candidates."""
        self._spent += evaluations

    @property
    def exhausted(self) -> str | None:
        """What ran out, in words, or None."""
        if self.evaluations is not None and self._spent >= self.evaluations:
            return f"the budget of {self.evaluations} evaluations is spent"
        if self.seconds is not None and self.timer() - self._start >= self.seconds:
            return f"the budget of {self.seconds:g} seconds is spent"
        return None
