"""Timing one compiled program: a sample is long enough to rise above the timer's noise.

On a GPU or TPU the wall clock also counts how long Python and the driver took to ask, which for a
short kernel is most of it. The profiler says when the device was busy. On a CPU the two are the
same thing, and the wall clock is used.
"""

from __future__ import annotations

import logging
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from ..utils.fingerprint import device_kind

logger = logging.getLogger(__name__)

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

    def measure(self, warmup: int, samples: int) -> float:
        """The typical seconds per call, after warming up."""
        self.warm_up(warmup)
        return typical([self.sample() for _ in range(samples)])

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


# --- the device's own time -----------------------------------------------------------------------

# Devices whose profiler tells their time from the wall clock's, and what it calls them.
PLANES = {"gpu": "/device:GPU:", "tpu": "/device:TPU:"}


class ProfilerTaken(RuntimeError):
    """The profiler is not to be had, probably because somebody else is profiling."""


class DeviceTime:
    """Times what a device does while a function runs.

    The first measurement decides: if the profiler tells nothing of the device, this one and all
    later ones are left to the wall clock, for times of two kinds cannot be compared. For the same
    reason a later one that fails is an error.

    Args:
      read_profile: runs a function under the profiler and gives its `ProfileData`; tests give
        another one.
    """

    def __init__(self, read_profile: Callable[[Callable[[], Any]], Any] | None = None) -> None:
        self._read_profile = read_profile or profile_of
        self.works: bool | None = None

    def of(self, function: Callable[[], Any]) -> float | None:
        """Seconds for which the device was busy, or None if that cannot be known."""
        if self.works is False:
            function()
            return None
        try:
            busy = busy_seconds(self._read_profile(function))
        except ProfilerTaken as error:
            if self.works:
                raise
            logger.warning("ejkernel: ranking by the wall clock: %s", error)
            function()
            busy = None
        if busy is None and self.works:
            raise RuntimeError("the profiler saw nothing of it on the device")
        self.works = busy is not None
        return busy


def profile_of(function: Callable[[], Any]) -> Any:
    """The profile of one run of a function."""
    with tempfile.TemporaryDirectory(prefix="ejkernel-profile-") as folder:
        try:
            jax.profiler.start_trace(folder)
        except RuntimeError as error:
            raise ProfilerTaken(f"the profiler cannot be started: {error}") from error
        try:
            jax.block_until_ready(function())
        finally:
            jax.profiler.stop_trace()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(file))


def busy_seconds(profile: Any) -> float | None:
    """How long the busiest device of a profile was busy; None if it has no device.

    Whatever overlaps counts once. Where the profile has a line for whole programs, that is taken:
    its other lines are parts of it.
    """
    busiest = [
        _covered(_intervals(plane))
        for plane in profile.planes
        if plane.name.startswith(tuple(PLANES.values()))
    ]
    longest = max(busiest, default=0.0)
    return longest * 1e-9 if longest > 0 else None


def _intervals(plane: Any) -> list[tuple[float, float]]:
    lines = list(plane.lines)
    for wanted in ("XLA Modules", "Stream"):
        chosen = [line for line in lines if line.name.startswith(wanted)]
        if chosen:
            lines = chosen
            break
    return [
        (event.start_ns, event.start_ns + event.duration_ns)
        for line in lines
        for event in line.events
    ]


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
