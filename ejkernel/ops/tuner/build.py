"""From candidates to programs that may race: lowered, deduplicated, compiled, run and judged.

Lowering happens in the caller's thread, with the caller's JAX settings. Compiling releases Python's
lock, so it runs in threads while the next program is lowered and the last one is judged.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..config.functions import Function
from ..config.outcome import Trial, Verdict
from ..utils.fingerprint import stable_json
from .bench import Bench, BenchUnavailable, CandidateError, Lowered

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TuningTask:
    """What is to be tuned: a function for every config, and how to know whether it is right.

    Attributes:
      name: what it is, for messages.
      make_function: gives the function of a config; it takes `args` and `kwargs`.
      args: the positional inputs to measure with.
      kwargs: those by keyword.
      candidates: the configs to try.
      reference: what to compare outputs with; None compares with the baseline's output, or
        not at all without a baseline.
      baseline: the config that wins ties (the heuristic one).
      reasons_against: why a config is not supported, if so.
      known: what earlier runs found out, by the config's `stable_json`.
      guard: a context manager made for each candidate, entered around its first run.
      measured: what the functions compute, for the report.
      notes: remarks that go with the outcome.
      work: what a call has to do, which goes with the outcome too.
      plain: the same in plain JAX, as users would write it; it is timed, never chosen. One that
        raises `NotImplementedError` when traced cannot express the call, and the reference is
        timed instead, as it is without one.
      plain_name: what that function is called.
      reference_name: what the reference is called.
    """

    name: str
    make_function: Callable[[Any], Function]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    candidates: Sequence[Any]
    reference: Function | None = None
    baseline: Any = None
    reasons_against: Callable[[Any], Sequence[str]] = lambda cfg: ()
    known: Mapping[str, Trial[Any]] = dataclasses.field(default_factory=dict)
    guard: Callable[[Any], Any] = contextlib.nullcontext
    measured: str = "forward"
    notes: tuple[str, ...] = ()
    work: Mapping[str, Any] | None = None
    plain: Function | None = None
    plain_name: str = "plain"
    reference_name: str = "reference"


class Builder:
    """Turns candidates into handles of a bench, one after the other, and remembers the refused.

    Args:
      bench: where programs run.
      task: whose candidates they are.
      on_refused: told of each candidate that cannot be used, with the reason.
    """

    def __init__(
        self, bench: Bench, task: TuningTask, on_refused: Callable[[Trial[Any]], None]
    ) -> None:
        self.bench = bench
        self.reference: Any = None
        self.reference_seconds = 0.0  # of the reference's first run
        self.refused: dict[str, Trial[Any]] = {}
        self.duplicates: dict[str, str] = {}  # config -> the earlier config with the same program
        self.compilations = 0
        self._task = task
        self._on_refused = on_refused
        self._threads = min(os.cpu_count() or 1, 8)  # that compile
        self._first_with: dict[str, Any] = {}  # program fingerprint -> config

    def build(self, configs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each usable config with its handle; the others are in `refused` afterwards."""
        queue: collections.deque[tuple[Any, concurrent.futures.Future[Any]]] = collections.deque()
        waiting = collections.deque(configs)
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            try:
                while waiting or queue:
                    # A few more than the threads, so that none of them waits for lowering.
                    while waiting and len(queue) <= self._threads:
                        cfg = waiting.popleft()
                        lowered = self._lower(cfg)
                        if lowered is not None:
                            self.compilations += 1
                            queue.append((cfg, pool.submit(self.bench.compile, lowered)))
                    if not queue:
                        continue
                    cfg, compiling = queue.popleft()
                    handle = self._judged(cfg, compiling)
                    if handle is not None:
                        yield cfg, handle
            finally:
                for _, compiling in queue:
                    compiling.cancel()

    def use_as_reference(self, function: Function) -> None:
        """Make a function's output the reference that all candidates are compared with."""
        handle = self.bench.compile(self.bench.lower(function))
        start = time.monotonic()
        self.bench.run(handle)
        self.reference_seconds = time.monotonic() - start
        self.trust(handle)

    def trust(self, handle: Any) -> None:
        """Make the output of a handle the reference, which must be the same at each run."""
        difference = self.bench.repeats(handle)
        if difference is not None and not difference.harmless:
            raise CandidateError(f"it is non-deterministic: {difference.reason}")
        self.reference = handle

    def _lower(self, cfg: Any) -> Lowered | None:
        if reasons := self._task.reasons_against(cfg):
            self.refuse(cfg, Verdict.UNSUPPORTED, "; ".join(reasons))
            return None
        with self.blaming(cfg):
            lowered = self.bench.lower(self._task.make_function(cfg))
            earlier = self._first_with.setdefault(lowered.fingerprint, cfg)
            if earlier is cfg:
                return lowered
            self.refuse(cfg, Verdict.DUPLICATE, f"the same program as {earlier}")
            self.duplicates[stable_json(cfg)] = stable_json(earlier)
        return None

    def _judged(self, cfg: Any, compiling: concurrent.futures.Future[Any]) -> Any:
        with self.blaming(cfg):
            handle = compiling.result()
            with self._task.guard(cfg):
                self.bench.run(handle)
            if self.reference is None:
                return handle
            difference = self.bench.compare(handle, self.reference)
            if difference is None:
                return handle
            self.refuse(cfg, Verdict.WRONG, difference)
            self.bench.forget(handle)
        return None

    @contextlib.contextmanager
    def blaming(self, cfg: Any) -> Iterator[None]:
        """A candidate may fail in any way: it is refused with the reason, and the others go on."""
        try:
            yield
        except BenchUnavailable:
            raise  # nobody's fault: no candidate is blamed
        except Exception as error:  # noqa: BLE001  stored as data
            self.refuse(cfg, Verdict.FAILED, reason_of(error))

    def refuse(self, cfg: Any, verdict: Verdict, reason: str) -> None:
        """Remember that a candidate cannot be used, and why."""
        logger.debug("candidate %s: %s: %s", cfg, verdict.value, reason)
        trial = Trial(cfg, verdict, reason=reason)
        self.refused[stable_json(cfg)] = trial
        self._on_refused(trial)


def reason_of(error: Exception) -> str:
    """An error in one line, as it is stored with a trial."""
    if isinstance(error, CandidateError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
