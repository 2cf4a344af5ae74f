"""How fast some programs really are: many interleaved rounds, and no noise in who is the best."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ejkernel.ops.tuner.clock import Stopwatch, typical


class ReferenceTimes:
    """Careful times of programs that compute the same.

    Args:
      calls: each program as a call without arguments, by its name.
      watch: makes what samples a call.
    """

    def __init__(
        self,
        calls: Mapping[Hashable, Callable[[], Any]],
        watch: Callable[[Callable[[], Any]], Stopwatch] = Stopwatch,
    ) -> None:
        self._watches = {name: watch(call) for name, call in calls.items()}
        self._samples: dict[Hashable, list[float]] = {name: [] for name in calls}
        self._order = random.Random(0)
        for one in self._watches.values():
            one.warm_up(2)

    def measure(self, rounds: int) -> None:
        """More rounds, in each of them all programs once, in another order."""
        names = list(self._watches)
        for _ in range(rounds):
            self._order.shuffle(names)
            for name in names:
                self._samples[name].append(self._watches[name].sample())

    def versus_the_best(self, name: Hashable) -> float:
        """The time of one by that of the best.

        Of many that are about as fast, the one that comes out first has also been lucky, and
        everybody would seem slower than they are. So the best is chosen by one half of the rounds
        and timed by the other, both ways; its own ratio is about 1, on either side.
        """
        return (self._by_halves(name, 0) + self._by_halves(name, 1)) / 2

    def _by_halves(self, name: Hashable, half: int) -> float:
        chosen_by = {other: typical(taken[half::2]) for other, taken in self._samples.items()}
        best = min(chosen_by, key=chosen_by.__getitem__)
        return typical(self._samples[name][1 - half :: 2]) / typical(
            self._samples[best][1 - half :: 2]
        )
