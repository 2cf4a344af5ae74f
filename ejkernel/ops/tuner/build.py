"""From candidates to programs that may race: lowered, deduplicated, compiled, run and judged.

Lowering happens in the caller's thread, with the caller's JAX settings. Compiling releases Python's
lock, so it runs in threads while the next program is lowered and the last one is judged.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..config.functions import Function
from ..config.outcome import Trial, Verdict
from ..utils.fingerprint import stable_json
from .bench import Bench, BenchUnavailable, CandidateError, Lowered

logger = logging.getLogger(__name__)

Made = Callable[[Any], Function]


class Builder:
    """Turns candidates into handles of a bench, one after the other, and remembers the refused.

    Args:
      bench: where programs run.
      make_function: gives the function of a config.
      reasons_against: why a config is not supported, if so.
      guard: entered around the first run of a candidate (a crash journal).
      on_refused: told of each candidate that cannot be used, with the reason.
      threads: how many programs are compiled at the same time.
    """

    def __init__(
        self,
        bench: Bench,
        make_function: Made,
        *,
        reasons_against: Callable[[Any], Sequence[str]] | None = None,
        guard: Callable[[Any], Any] | None = None,
        on_refused: Callable[[Trial[Any]], None] | None = None,
        threads: int | None = None,
    ) -> None:
        self.bench = bench
        self.reference: Any = None
        self.refused: dict[str, Trial[Any]] = {}
        self.duplicates: dict[
            str, str
        ] = {}  # a config whose program another one has already -> that one
        self.compilations = 0
        self._make_function = make_function
        self._reasons_against = reasons_against
        self._guard = guard
        self._on_refused = on_refused
        self._threads = threads or max(1, min(os.cpu_count() or 1, 8))
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
        self.bench.run(handle)
        self.trust(handle)

    def trust(self, handle: Any) -> None:
        """Make the output of a handle the reference, which must be the same at each run."""
        difference = self.bench.repeats(handle)
        if difference is not None and not difference.harmless:
            raise CandidateError(f"it is non-deterministic: {difference.reason}")
        self.reference = handle

    def _lower(self, cfg: Any) -> Lowered | None:
        reasons = list(self._reasons_against(cfg)) if self._reasons_against is not None else []
        if reasons:
            self.refuse(cfg, Verdict.UNSUPPORTED, "; ".join(reasons))
            return None
        try:
            lowered = self.bench.lower(self._make_function(cfg))
        except BenchUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  a candidate may fail in any way: kept as data
            self.refuse(cfg, Verdict.FAILED, reason_of(error))
            return None
        earlier = self._first_with.setdefault(lowered.fingerprint, cfg)
        if earlier is not cfg:
            self.refuse(cfg, Verdict.DUPLICATE, f"the same program as {earlier}")
            self.duplicates[stable_json(cfg)] = stable_json(earlier)
            return None
        return lowered

    def _judged(self, cfg: Any, compiling: concurrent.futures.Future[Any]) -> Any:
        try:
            handle = compiling.result()
            if self._guard is None:
                self.bench.run(handle)
            else:
                with self._guard(cfg):
                    self.bench.run(handle)
            difference = (
                None if self.reference is None else self.bench.compare(handle, self.reference)
            )
        except BenchUnavailable:
            raise  # nobody's fault: no candidate is blamed
        except Exception as error:  # noqa: BLE001  a candidate may fail in any way: kept as data
            self.refuse(cfg, Verdict.FAILED, reason_of(error))
            return None
        if difference is not None:
            self.refuse(cfg, Verdict.WRONG, difference)
            self.bench.forget(handle)
            return None
        return handle

    def refuse(self, cfg: Any, verdict: Verdict, reason: str) -> None:
        """Remember that a candidate cannot be used, and why."""
        logger.debug("candidate %s: %s: %s", cfg, verdict.value, reason)
        trial = Trial(cfg, verdict, reason=reason)
        self.refused[stable_json(cfg)] = trial
        if self._on_refused is not None:
            self._on_refused(trial)


def reason_of(error: Exception) -> str:
    """An error in one line, as it is kept with a trial."""
    if isinstance(error, CandidateError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
