"""The sources of configs, one small object each. The chain asks them in order.

A tier answers with a `TierHit` or says why it has nothing. It knows nothing of the other tiers.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from ...markup import one_line
from ...store.reading import shown
from ..core.limits import reasons_against_config
from ..core.types import ConfigKey
from . import context
from .cache import ConfigCache, OverlayLayer
from .outcome import Outcome, TuningFailed, TuningInterrupted
from .policy import AutotunePolicy

if TYPE_CHECKING:
    from ..core.invocation import Invocation
    from ..core.kernel import Kernel
    from ..tuner.tuner import Tuner

logger = logging.getLogger(__name__)

Emit = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Request:
    """One question: which config for this call, under this policy."""

    inv: Invocation[Any, Any]
    kernel: Kernel[Any, Any]
    key: ConfigKey
    policy: AutotunePolicy
    emit: Emit
    offline: bool = False  # asked by a tuning run, not by a call that runs with the answer
    tuner: Tuner | None = None  # another one than the selector's
    agreed: bool = False  # asked for all processes of a job; programs keep what was agreed before

    @property
    def measured(self) -> str:
        """What a tuning run times for this question."""
        return "forward and backward" if self.inv.differentiated else "forward"


@dataclasses.dataclass(frozen=True)
class TierHit:
    """A config, where it came from in words, and what else is known about it.

    `doubt` says why it may not be the best any more: where tuning is allowed it is measured again.
    """

    cfg: Any
    reason: str
    about: Any = None
    doubt: str = ""


class Tier(Protocol):
    """A source of configs."""

    name: str

    def look(self, request: Request) -> TierHit | str:
        """The config for a request, or the reason why this tier has none."""
        ...


_said: set[str] = set()
_MOST_SAID = 1000  # then it starts again: a server meets ever new calls


def refusal(request: Request, cfg: Any, where: str) -> str | None:
    """Why a config that somebody kept cannot serve a call, said once; None if it can.

    The next source answers then. A config of another class is the program's own mistake and
    raises a `TypeError`.
    """
    request.kernel.check_config_class(cfg, f"{where} holds")
    reasons = reasons_against_config(request.kernel, cfg, request.inv)
    if not reasons:
        return None
    held = f"{where} holds {shown(cfg, 1000)}"
    return warn_once(request, f"{held}, but {'; '.join(reasons)}", f"{request.key.op_id} {held}")


def warn_once(request: Request, reason: str, trouble: str) -> str:
    """Say why a config is not used, each trouble the first time, and give the reason back."""
    if trouble not in _said:
        if len(_said) >= _MOST_SAID:
            _said.clear()
        _said.add(trouble)
        logger.warning("ejkernel: a config is not used: %s", one_line(f"{request.key}: {reason}"))
    return reason


class OverrideTier:
    """The config that the caller gave with the call."""

    name = "override"

    def look(self, request: Request) -> TierHit | str:
        cfg = request.inv.override_cfg
        if cfg is None:
            return "the call gave no cfg"
        request.kernel.check_config(cfg, inv=request.inv)
        request.emit("override", cfg=cfg)
        return TierHit(cfg, "given with the call")


class OverlayTier:
    """`overlay_cache` blocks and tuning results in force, innermost first."""

    name = "overlay"

    def look(self, request: Request) -> TierHit | str:
        count = 0
        refused = []
        for layer in context.layers_in_force(OverlayLayer):
            count += 1
            cfg = layer.find(request.key)
            if cfg is None:
                continue
            if reason := refusal(request, cfg, "an overlay"):
                refused.append(reason)
                continue
            request.emit("overlay_hit", cfg=cfg)
            return TierHit(cfg, f"an overlay in force holds it (number {count} from the inside)")
        if refused:
            return "; ".join(refused)
        return f"{count} in force, none has this call" if count else "none in force"


class MemoryTier:
    """The selector's memory cache."""

    name = "memory"

    def __init__(self, cache: ConfigCache) -> None:
        self.cache = cache

    def look(self, request: Request) -> TierHit | str:
        cfg = self.cache.get(request.key)
        if cfg is None:
            return f"not among its {len(self.cache)} configs"
        if reason := refusal(request, cfg, "the memory cache"):
            return reason
        request.emit("cache_hit", level="memory", cfg=cfg)
        return TierHit(cfg, "in the memory cache")


class HeuristicsTier:
    """The kernel's default config. Never kept: it would stand in the way of tuning later."""

    name = "heuristics"

    def look(self, request: Request) -> TierHit | str:
        if not request.policy.allow_heuristics:
            return "the policy does not allow it (allow_heuristics=False)"
        try:
            cfg = request.kernel.heuristic(request.inv)
        except NotImplementedError as error:
            return str(error)
        request.emit("heuristics", cfg=cfg)
        return TierHit(cfg, "the kernel's heuristic_cfg")


MOST_FINISHED = 4096
"""How many results of tuning are kept to be given again; the memory cache has their configs too."""


class AutotuneTier:
    """Measure the candidates; each key once, however many threads ask for it."""

    name = "autotune"

    def __init__(
        self,
        tune: Callable[[Request], Outcome[Any]],
        keep: Callable[[Request, Outcome[Any]], None],
        forbid_reautotune: bool,
    ) -> None:
        self._tune = tune
        self._keep = keep
        self._forbid_reautotune = forbid_reautotune
        self._lock = threading.Lock()
        self._under_way: dict[ConfigKey, Future[TierHit | str]] = {}
        self._finished: dict[ConfigKey, TierHit | str] = {}
        self._here = threading.local()

    def look(self, request: Request) -> TierHit | str:
        if not request.policy.allow_autotune:
            return "the policy does not allow it (allow_autotune=False)"
        key = request.key
        if key in self._keys_of_this_thread():
            return "this very call is being tuned in this thread"
        with self._lock:
            if self._forbid_reautotune and key in self._finished:
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
            outcome = self._tune(request)
        except TuningFailed as error:
            # Rule: never fatal. The next tier serves, and the reason is said once.
            logger.warning("ejkernel: %s", error)
            request.emit("error", error=error)
            return str(error)
        except TuningInterrupted as interrupt:
            if interrupt.outcome is not None:
                self._keep(request, interrupt.outcome)
            raise
        self._keep(request, outcome)
        request.emit("autotune_finish", cfg=outcome.best, outcome=outcome)
        return TierHit(outcome.best, outcome.summary(), outcome)
