"""Where candidates are compiled, run, compared and timed.

The tuner's logic does not know whether a program runs in this process or in a worker that may be
killed: it talks to a `Bench`. Programs are functions of a flat list of arrays, so that a bench
needs nothing of the user's code but the lowered program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax

from ..config.functions import Function
from ..utils.fingerprint import current_device, device_kind, short_hash
from ..utils.locations import without_locations
from .clock import PLANES, DeviceTime, Stopwatch
from .judge import NonDeterminism, differs, non_determinism


class CandidateError(Exception):
    """A candidate that cannot be used; the message is the reason that is stored."""


class BenchUnavailable(RuntimeError):
    """Nothing can be run at all here; no candidate is to blame."""


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program before compilation. Equal fingerprints mean equal programs."""

    fingerprint: str
    program: Any


Clock = Literal["auto", "device", "wall"]


class Bench(Protocol):
    """Compiles, runs, compares and times programs for one set of inputs."""

    @property
    def clock(self) -> str:
        """Whose seconds `sample` gives: `"device"` or `"wall"`."""

    def lower(self, function: Function) -> Lowered:
        """Trace a function of the inputs into a program."""

    def compile(self, lowered: Lowered) -> Any:
        """Compile a program; the handle that comes back stands for it in the other calls."""

    def run(self, handle: Any) -> None:
        """Run it once and hold its output for `compare`."""

    def compare(self, handle: Any, reference: Any) -> str | None:
        """Why the output of one handle differs from that of another, or None."""

    def warm_up(self, handle: Any, times: int) -> None:
        """Run it a few times and learn how long a sample must be."""

    def sample(self, handle: Any) -> float:
        """Seconds per call, from one sample."""

    def repeats(self, handle: Any) -> NonDeterminism | None:
        """How the output of the latest run differs from the one that `run` held, or None.

        The latest run is the last one that was timed; without one, it is run again. Asked once.
        """

    def forget(self, handle: Any) -> None:
        """Free what a handle holds."""


@dataclasses.dataclass(eq=False)
class LocalHandle:
    """A program compiled in this process."""

    compiled: Any
    watch: Stopwatch
    output: Any = None


class LocalBench:
    """Runs everything in this process.

    Args:
      arrays: the inputs, in the order in which functions take them.
      timer: a clock in seconds.
      clock: `"device"` takes the profiler's word for how long the device worked, if it has one,
        else the wall clock's; `"auto"` does so on GPU and TPU.
    """

    def __init__(
        self,
        arrays: list[Any],
        timer: Callable[[], float] = time.perf_counter,
        clock: Clock = "auto",
    ) -> None:
        self._arrays = arrays
        self._timer = timer
        by_device = clock == "device" or (clock == "auto" and device_kind() in PLANES)
        self._device_time = DeviceTime() if by_device else None

    @property
    def clock(self) -> str:
        return "device" if self._device_time is not None and self._device_time.works else "wall"

    def lower(self, function: Function) -> Lowered:
        def program(arrays: list[Any]) -> Any:
            return function(*arrays)

        with without_locations():
            lowered = jax.jit(program).lower(self._arrays)
        return Lowered(program_fingerprint(lowered.as_text()), lowered)

    def compile(self, lowered: Lowered) -> LocalHandle:
        compiled = lowered.program.compile()
        analysis, available = compiled.memory_analysis(), _available_bytes()
        if analysis is not None and available is not None:
            # In addition to the inputs, as the compiler says.
            needed = int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
            if needed > available:
                raise CandidateError(
                    f"it needs {_readable_bytes(needed)} and {_readable_bytes(available)} are "
                    "available"
                )
        watch = Stopwatch(
            lambda: compiled(self._arrays),
            self._timer,
            device_time=None if self._device_time is None else self._device_time.of,
        )
        return LocalHandle(compiled, watch)

    def run(self, handle: LocalHandle) -> None:
        start = self._timer()
        handle.output = jax.block_until_ready(handle.compiled(self._arrays))
        handle.watch.ran_for(self._timer() - start)

    def compare(self, handle: LocalHandle, reference: LocalHandle) -> str | None:
        return differs(handle.output, reference.output)

    def warm_up(self, handle: LocalHandle, times: int) -> None:
        handle.watch.warm_up(times)

    def sample(self, handle: LocalHandle) -> float:
        return handle.watch.sample()

    def repeats(self, handle: LocalHandle) -> NonDeterminism | None:
        again = handle.watch.take_output()
        if again is None:
            again = jax.block_until_ready(handle.compiled(self._arrays))
        return non_determinism(handle.output, again)

    def forget(self, handle: LocalHandle) -> None:
        handle.output = None


_HOST_CALL = re.compile(r"custom_call @\w*python\w*")
_unique = itertools.count()


def program_fingerprint(text: str) -> str:
    """A hash of a program's text; of one that calls back into Python, a new one each time.

    The text does not say which Python function is called, so equal texts prove nothing there.
    """
    if _HOST_CALL.search(text):
        return f"calls-python-{next(_unique)}"
    return short_hash(text, 32)


def _available_bytes() -> int | None:
    """Free memory of the current device, or None if nobody says."""
    device = current_device()
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if device.platform == "cpu":
        return _host_bytes()
    return None


def _host_bytes() -> int | None:
    with contextlib.suppress(OSError):  # not Linux
        text = pathlib.Path("/proc/meminfo").read_text(encoding="ascii")
        if available := re.search(r"^MemAvailable: +(\d+) kB", text, re.MULTILINE):
            return int(available[1]) * 1024
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _readable_bytes(count: int) -> str:
    """`1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
