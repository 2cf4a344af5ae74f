"""Timing one compiled program: a sample is long enough to rise above the timer's noise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax

from ..utils.fingerprint import device_kind

SHORTEST_SAMPLE = 2e-3  # seconds; shorter ones measure noise


class Stopwatch:
    """Measures a callable without arguments, several calls per sample if they are short.

    A GPU or TPU works off what it is given one after the other, so that only the last call is
    waited for. On a CPU, JAX runs calls that do not need each other at the same time: there each
    is waited for, or programs of one thread would seem as fast as there are cores.

    Args:
      function: what is measured.
      timer: a clock in seconds.
      shortest_sample: seconds; as many calls make a sample.
      device_time: runs a function and gives the seconds that its device was busy, if it can.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        timer: Callable[[], float] = time.perf_counter,
        shortest_sample: float = SHORTEST_SAMPLE,
        device_time: Callable[[Callable[[], Any]], float | None] | None = None,
    ) -> None:
        self._device_time = device_time
        self._function = function
        self._timer = timer
        self._calls = 1
        self._known_long = False
        self._shortest_sample = shortest_sample
        self._keeps_output = True
        self._output: Any = None
        self._waits = device_kind() == "cpu"

    def ran_for(self, seconds: float) -> None:
        """It was run once already, for so long; a long run needs no further one to learn from."""
        self._known_long = seconds > 2 * self._shortest_sample

    def warm_up(self, times: int) -> None:
        """Run it, and learn how many calls make a sample."""
        if self._known_long and times <= 1:
            return
        for _ in range(max(times, 1)):
            once = self._time(1)
        self._calls = max(1, math.ceil(self._shortest_sample / max(once, 1e-9)))
        self._calls = min(self._calls, 10_000)

    def sample(self) -> float:
        """Seconds per call, from one sample; the device's own if it tells them."""
        if self._device_time is None:
            return self._time(self._calls) / self._calls
        wall = 0.0

        def timed() -> None:
            nonlocal wall
            wall = self._time(self._calls)

        busy = self._device_time(timed)
        return (wall if busy is None else busy) / self._calls

    def take_output(self) -> Any:
        """What the last measured call returned, once (None: it was not called); then no more."""
        output, self._output, self._keeps_output = self._output, None, False
        return output

    def _time(self, calls: int) -> float:
        start = self._timer()
        out = None
        for _ in range(calls):
            out = self._function()
            if self._waits:
                jax.block_until_ready(out)
        if not self._waits:
            jax.block_until_ready(out)
        seconds = self._timer() - start
        if self._keeps_output:
            self._output = out
        return seconds


def typical(samples: list[float] | tuple[float, ...]) -> float:
    """The mean of the fastest two thirds: disturbed samples out, fast outliers diluted."""
    fastest = sorted(samples)[: max(1, math.ceil(len(samples) * 2 / 3))]
    return sum(fastest) / len(fastest)
