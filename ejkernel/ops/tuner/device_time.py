"""How long a device worked, by its own account: the profiler's, where there is one.

On a GPU or TPU the wall clock also counts how long Python and the driver took to ask, which for a
short kernel is most of it. The profiler says when the device was busy. On a CPU the two are the
same thing, and the wall clock is used.
"""

from __future__ import annotations

import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

from ..utils.fingerprint import device_kind

logger = logging.getLogger(__name__)

_PLANES = {"gpu": "/device:GPU:", "tpu": "/device:TPU:"}


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


def has_device_time(device: Any = None) -> bool:
    """Is there a profiler that could tell a device's time from the wall clock's?"""
    return device_kind(device) in _PLANES


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
        if plane.name.startswith(tuple(_PLANES.values()))
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
