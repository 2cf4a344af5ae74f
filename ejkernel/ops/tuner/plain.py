"""Plain JAX, timed together with the winner: what the kernel is worth, tuned or not.

It runs once the race is decided, in rounds of its own with the winner, so it cannot influence who
wins. It costs a few samples, and whatever goes wrong with it is recorded and ends nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...speedup import Gain, PlainJax, gain_of
from .bench import Bench, CandidateError
from .build import Builder, TuningTask, reason_of
from .clock import typical

ROUNDS = (3, 9)  # fewest and most
DOUBTFUL = 2  # times the usual limit of time, if it is still in doubt what is faster
LONGEST = 10.0  # seconds of one run; what takes longer is not run again
TOO_SLOW = 20.0  # times as long as the heuristic config; likewise
SHORT = 1.0  # seconds; one run of a program says little about one that is shorter


def time_plain(
    bench: Bench,
    task: TuningTask,
    builder: Builder,
    *,
    warmup: int,
    winner: Any,
    heuristic: float,
    limit: float,
    out_of_time: Callable[[], bool],
) -> PlainJax | None:
    """Time a task's plain formulation, else its reference; None if it has neither.

    Args:
      bench: where the candidates ran.
      task: whose they are.
      builder: has the reference's program already.
      warmup: runs before the first sample.
      winner: the handle that runs in the same rounds; None if it was measured in an earlier run.
      heuristic: seconds of the heuristic config.
      limit: seconds after which no further round begins, beyond the fewest; a result that is
        still in doubt may take twice as long.
      out_of_time: true if no time is left.
    """
    name = task.plain_name
    try:
        built = None
        if task.plain is not None:
            built = _built(bench, task, builder)
        if built is None and task.reference is not None:
            name, built = task.reference_name, (builder.reference, builder.reference_seconds)
        if built is None:
            return None
        handle, once = built
        if once > LONGEST:
            reason = f"one run takes longer than {LONGEST:g} s; it was not run again"
            return PlainJax(name, once, reason=reason)
        if once > max(SHORT, TOO_SLOW * heuristic):
            return _too_slow(name, once)
        if out_of_time():
            return PlainJax(name, reason="no time was left to time it")
        bench.warm_up(handle, warmup)
        mine: list[float] = []
        others: list[float] = []
        start = time.monotonic()
        for done in range(ROUNDS[1]):
            if done >= ROUNDS[0]:
                in_doubt = bool(others) and _in_doubt(gain_of(mine, others))
                took = time.monotonic() - start
                if out_of_time() or took > (DOUBTFUL if in_doubt else 1) * limit:
                    break
            # The second of two programs reads what the first left in the caches: they take turns.
            for samples, program in ((mine, handle), (others, winner))[:: -1 if done % 2 else 1]:
                if program is not None:
                    samples.append(bench.sample(program))
            # A single short sample may have met a burst of load; a long one is not to be repeated.
            factor = gain_of(mine, others or [heuristic] * len(mine)).times
            if min(factor, min(mine) / heuristic) > TOO_SLOW and (done or mine[0] > SHORT):
                return _too_slow(name, min(mine))
        return PlainJax(name, typical(mine), gain_of(mine, others) if others else None)
    except Exception as error:  # noqa: BLE001  stored as data: the race is decided already
        return PlainJax(name, reason=reason_of(error))


def _built(bench: Bench, task: TuningTask, builder: Builder) -> tuple[Any, float] | None:
    """The plain formulation's program and the seconds of its first run; None: not for this call."""
    assert task.plain is not None
    try:
        lowered = bench.lower(task.plain)
    except NotImplementedError:  # it cannot express this call
        return None
    handle = bench.compile(lowered)
    start = time.monotonic()
    with task.guard("plain JAX"):
        bench.run(handle)
    seconds = time.monotonic() - start
    if builder.reference is not None:
        difference = bench.compare(handle, builder.reference)
        if difference is not None:
            raise CandidateError(f"it computes something else than the kernel: {difference}")
    bench.forget(handle)
    return handle, seconds


def _in_doubt(gain: Gain) -> bool:
    """True if more rounds would say more: which is faster, or roughly by how much."""
    return not gain.is_real or gain.high > 1.5 * gain.low


def _too_slow(name: str, seconds: float) -> PlainJax:
    reason = f"stopped: it takes more than {TOO_SLOW:g} times as long as the heuristic config"
    return PlainJax(name, seconds, more_than=TOO_SLOW, reason=reason)
