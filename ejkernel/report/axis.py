"""An axis of a plot: where a value stands, in percent, and which values get a mark."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

MOST_TICKS = 5
LOGARITHMIC_FROM = 6.0  # a range that spans more than this factor is shown by orders of magnitude


@dataclasses.dataclass(frozen=True)
class Axis:
    """From `low` to `high`, both positive."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def over(cls, values: Iterable[float], *, logarithmic: bool | None = None) -> Axis:
        """An axis that has room for all these values, none of them at the very edge.

        >>> Axis.over([1.0, 2.0]).at(1.5)
        50.0
        """
        known = [value for value in values if value > 0]
        low, high = (min(known), max(known)) if known else (1.0, 2.0)
        if logarithmic is None:
            logarithmic = high / low > LOGARITHMIC_FROM
        if high / low < 1.02:  # all alike: do not blow up the last digit
            low, high = low * 0.99, high * 1.01
        if logarithmic:
            room = (high / low) ** 0.05
            return cls(low / room, high * room, True)
        room = 0.06 * (high - low)
        return cls(max(low - room, low / 2), high + room, False)

    def at(self, value: float) -> float:
        """Where a value stands, 0 to 100; what lies outside stands at the edge."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(100 * share, 2)

    def shows(self, value: float) -> bool:
        """False for what lies beyond its ends."""
        return self.low <= value <= self.high

    def ticks(self) -> list[float]:
        """Round values for marks, neither crowded nor fewer than two where that can be.

        >>> Axis(0.9, 2.1, False).ticks()
        [1.0, 1.25, 1.5, 1.75, 2.0]
        """
        if self.logarithmic:
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [tick for tick in self._decades(steps) if self.low <= tick <= self.high]
                if len(found) <= MOST_TICKS:
                    break
            every = -(-len(found) // MOST_TICKS)  # of decades, where there are many
            if len(found) >= 2:
                return found[::every]
        return self._even()

    def _decades(self, steps: tuple[int, ...]) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        return [step * 10.0**power for power in range(first, last + 1) for step in steps]

    def _even(self) -> list[float]:
        size = 10.0 ** math.floor(math.log10(self.high - self.low)) / 10
        steps = (f * size for f in (1, 2, 2.5, 5, 10, 20, 25, 50, 100))
        step = next(s for s in steps if (self.high - self.low) / s <= MOST_TICKS)
        first = math.ceil(self.low / step)
        return [round(i * step, 15) for i in range(first, math.floor(self.high / step) + 1)]
