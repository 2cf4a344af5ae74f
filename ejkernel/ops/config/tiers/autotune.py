"""Measure the candidates."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ...core.types import ConfigKey
from ..outcome import Outcome, TuningFailed, TuningInterrupted
from .request import Request, TierHit

logger = logging.getLogger(__name__)


MOST_FINISHED = 4096
"""How many results of tuning are held to be given again; the memory cache has their configs too."""


@dataclasses.dataclass(frozen=True)
class AutotuneTier:
    """Measure the candidates; each key once, however many threads ask for it."""

    name = "autotune"

    tune: Callable[[Request], Outcome[Any]]
    store: Callable[[Request, Outcome[Any]], None]
    forbid_reautotune: bool
    _lock: Any = dataclasses.field(default_factory=threading.Lock)
    _under_way: dict[ConfigKey, Future[TierHit | str]] = dataclasses.field(default_factory=dict)
    _finished: dict[ConfigKey, TierHit | str] = dataclasses.field(default_factory=dict)
    _here: threading.local = dataclasses.field(default_factory=threading.local)

    def look(self, request: Request) -> TierHit | str:
        key = request.key
        if key in self._keys_of_this_thread():
            return "this very call is being tuned in this thread"
        with self._lock:
            if self.forbid_reautotune and key in self._finished:
                return self._finished[key]
            waiting = self._under_way.get(key)
            if waiting is None:
                promise: Future[TierHit | str] = Future()
                self._under_way[key] = promise
        if waiting is not None:
            return waiting.result()
        return self._fulfil(promise, request)

    def _keys_of_this_thread(self) -> set[ConfigKey]:
        if not hasattr(self._here, "keys"):
            self._here.keys = set()
        return self._here.keys  # type: ignore[no-any-return]

    def _fulfil(self, promise: Future[TierHit | str], request: Request) -> TierHit | str:
        key = request.key
        self._keys_of_this_thread().add(key)
        try:
            answer = self._measure(request)
        except BaseException as error:
            promise.set_exception(error)
            raise
        else:
            with self._lock:
                self._finished[key] = answer
                while len(self._finished) > MOST_FINISHED:
                    del self._finished[next(iter(self._finished))]
            promise.set_result(answer)
            return answer
        finally:
            self._keys_of_this_thread().discard(key)
            with self._lock:
                del self._under_way[key]

    def _measure(self, request: Request) -> TierHit | str:
        request.emit("autotune_start")
        try:
            outcome = self.tune(request)
        except TuningFailed as error:
            # Rule: never fatal. The next tier answers, and the reason is said once.
            logger.warning("ejkernel: %s", error)
            request.emit("error", error=error)
            return str(error)
        except TuningInterrupted as interrupt:
            if interrupt.outcome is not None:
                self.store(request, interrupt.outcome)
            raise
        self.store(request, outcome)
        request.emit("autotune_finish", cfg=outcome.best, outcome=outcome)
        return TierHit(outcome.best, outcome.summary(), outcome)
