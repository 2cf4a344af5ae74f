"""Which config a call runs with: a chain of tiers, asked in a fixed order."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from ..core.invocation import Invocation
from ..core.kernel import Kernel, kernel_named
from ..core.requirements import refuse_reference
from ..core.types import ConfigKey
from ..registry import count_decision, count_tuning
from ..utils.fingerprint import device_fingerprint
from .cache import ConfigCache, OverlayLayer, overlay_cache
from .context import (
    AutotunePolicy,
    active_layers,
    asked_call,
    effective_policy,
    forward_autotune_only,
    policy_override,
)
from .decision import Answer, Decision, Miss, TierMiss
from .freshness import EntryState, can_be_continued, judge, made_by
from .hooks import job_agreement, measuring
from .outcome import Outcome, known_trials
from .persistent import PersistentCache, rebuild_or_warn
from .tiers.autotune import AutotuneTier
from .tiers.given import HeuristicsTier, MemoryTier, OverlayTier, OverrideTier
from .tiers.request import Request, Tier, TierHit
from .tiers.stored import BundleTier, NearTier, PersistentTier, StoredTier, shipped_entries

if TYPE_CHECKING:
    from ..tuner.tuner import Tuner

__all__ = [
    "AutotunePolicy",
    "ConfigSelectorChain",
    "Tuner",
    "forward_autotune_only",
    "overlay_cache",
    "policy_override",
]

logger = logging.getLogger(__name__)
C = TypeVar("C")
O = TypeVar("O")  # noqa: E741

_count = itertools.count(1)


def __getattr__(name: str) -> Any:
    if name == "Tuner":  # documented here; made where the measuring is
        return measuring().Tuner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Sources(enum.Enum):
    """Who may answer a question for a config."""

    ALL = "every tier that the policy allows, as for a call that runs"
    STORED = "memory, store and bundles, where nothing is unfinished or in doubt"
    MEASURED = "the same, and a tuning run, whatever the policy says"
    MEASURED_AGAIN = "a tuning run alone, which uses no timing of an earlier one"


class ConfigSelectorChain:
    """Asks override, overlay, memory, persistent, bundle, autotune, near, heuristics.

    In this order; the policy's `cache_miss_fallback` decides whether tuning comes before the last
    two or after them. When no tier has a config, `choose` raises a `RuntimeError` that lists each
    tier with its reason.

    Args:
      cache: the memory cache (a new one by default).
      policy: what is allowed on a miss; the default tunes, then falls back to heuristics.
      tuner: measures candidates; default `Tuner()`.
      persistent: a `PersistentCache`, or a path for one; None for no disk.
      persist_autotune: write tuned configs to `persistent`.
      on_event: called as `on_event(event, device=, op_id=, call_key=, cfg=, …)`.
      forbid_reautotune: tune each key once; asking again gives the known answer.
      autotune: shorthand for the policy.

    >>> from ejkernel.ops import ConfigCache, ConfigSelectorChain
    >>> selector = ConfigSelectorChain(ConfigCache(), autotune=False)
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persistent: PersistentCache | str | os.PathLike[str] | None = None,
        persist_autotune: bool = True,
        on_event: Callable[..., Any] | None = None,
        forbid_reautotune: bool = True,
        *,
        autotune: bool | None = None,
    ) -> None:
        if autotune is not None and policy is not None:
            raise TypeError(
                "ConfigSelectorChain: autotune= is a shorthand for policy=; give one of them"
            )
        if policy is not None and not isinstance(policy, AutotunePolicy):
            raise TypeError(
                f"ConfigSelectorChain: policy must be an AutotunePolicy, got {policy!r}"
            )
        if autotune is not None:
            policy = AutotunePolicy.tuning(autotune)
        self.cache = ConfigCache() if cache is None else cache
        self.policy = policy or AutotunePolicy()
        self.persistent = (
            PersistentCache(persistent)
            if isinstance(persistent, (str, os.PathLike))
            else persistent
        )
        self.persist_autotune = persist_autotune
        self.on_event = on_event
        # Part of jit keys, so a number that is never used again, not an address.
        self.selector_id = f"selector-{next(_count)}"
        self._tuner = tuner
        self._persistent = PersistentTier(self.persistent, self.cache)
        self._stored: list[Tier] = [
            MemoryTier(self.cache),
            self._persistent,
            BundleTier(self.cache),
        ]
        self._written: list[Tier] = [OverrideTier(), OverlayTier()]  # what the program itself says
        self._autotune = AutotuneTier(self._tune, self._store_outcome, forbid_reautotune)
        self._defaults: list[Tier] = [
            NearTier(self.persistent),
            HeuristicsTier(),
        ]

    @property
    def tuner(self) -> Tuner:
        """The tuner, made when first needed."""
        if self._tuner is None:
            self._tuner = measuring().Tuner()
        return self._tuner

    # --- asking ----------------------------------------------------------------------------------

    def choose(self, inv: Invocation[C, O], kernel: Kernel[C, O]) -> C:
        """The config for an invocation."""
        return self.decide(inv, kernel).cfg

    def decide(self, inv: Invocation[C, O], kernel: Kernel[C, O]) -> Decision[C]:
        """The config for an invocation with its reasons; a `ConfigMiss` if there is none."""
        answer = self.answer(inv, kernel)
        if isinstance(answer, Miss):
            raise answer.error()
        return answer

    def answer(
        self,
        inv: Invocation[C, O],
        kernel: Kernel[C, O],
        sources: Sources = Sources.ALL,
        tuner: Tuner | None = None,
    ) -> Decision[C] | Miss:
        """The config for an invocation with its reasons, or why there is none: every question.

        Args:
          inv: the call.
          kernel: its kernel.
          sources: who may answer.
          tuner: measures instead of the selector's own.
        """
        if inv.kernel is None:
            inv = dataclasses.replace(inv, kernel=kernel)
        if sources is Sources.ALL:
            return self._answer_call(self._request(inv, kernel))
        # An order to tune, not a call: overlays and the policy have no say.
        request = self._request(
            inv, kernel, allow_autotune=True, cache_miss_fallback="autotune", strict=False
        )
        again = sources is Sources.MEASURED_AGAIN
        request = dataclasses.replace(request, offline=True, tuner=tuner, again=again)
        answer: Answer = ()
        if again or sources is Sources.MEASURED:
            answer = self._settled(
                request,
                lambda request: self._ask(request, [*self._finished(request), self._autotune]),
            )
        elif job_agreement() is None:
            # With several processes, what this one holds is not for it alone to say.
            answer = self._ask(request, self._finished(request))
        return answer if isinstance(answer, Decision) else self._miss(request, answer)

    def _answer_call(self, request: Request) -> Decision[Any] | Miss:
        answer = self._ask(request, self._written)
        if not isinstance(answer, Decision):
            misses = answer
            answer = self._settled(
                request, lambda request: self._ask(request, self._tiers(request.policy), misses)
            )
        if not isinstance(answer, Decision):
            return self._miss(request, answer)
        # Whatever answers: if the cache learns better later, this program selects again.
        self.cache.mark_served(request.key)
        count_decision(answer)
        return answer

    def _miss(self, request: Request, misses: tuple[TierMiss, ...]) -> Miss:
        # Without its arrays: it may outlive the trace that they belong to.
        abstract = dataclasses.replace(request, inv=request.inv.abstract())
        return Miss(abstract, misses, self.persistent)

    def _settled(self, request: Request, ask: Callable[[Request], Answer]) -> Answer:
        """What `ask` says; with several processes, what one of them said, in all of them."""
        if not jax.distributed.is_initialized() or (agreement := job_agreement()) is None:
            return ask(request)
        answer = agreement.settle(request, self.cache.generation, ask)
        if isinstance(answer, Decision):
            default = answer.tier in [tier.name for tier in self._defaults]
            if not default or request.key in self.cache:  # memory never disagrees with what runs
                self.cache.put_quietly(request.key, answer.cfg)
        return answer

    def _ask(
        self, request: Request, tiers: Iterable[Tier], misses: tuple[TierMiss, ...] = ()
    ) -> Answer:
        """What the first tier with a config says; else why none has one.

        A config in doubt is used if tuning does not replace it.
        """
        doubtful: tuple[StoredTier, TierHit] | None = None
        for tier in tiers:
            answer = request.policy.reason_against(tier.name) or tier.look(request)
            if isinstance(answer, TierHit):
                if not answer.doubt or not isinstance(tier, StoredTier):
                    return _decision(request, tier, answer, misses)
                if not request.policy.tunes_first:
                    return _decision(request, tier, tier.use(request, answer), misses)
                doubtful = doubtful or (tier, answer)
                answer = f"{answer.doubt}; to be measured again"
            more = self._persistent.more_about_nothing if tier is self._persistent else None
            misses = (*misses, TierMiss(tier.name, answer, more and more(request)))
            if tier is self._autotune and doubtful is not None:
                source, found = doubtful
                return _decision(request, source, source.use(request, found), misses)
        return misses

    def known_config(self, op_id: str, call_key: str, device: str | None = None) -> Any:
        """What overlays, memory, disk and bundles hold for a label's operation; None if nothing."""
        key = ConfigKey(device or device_fingerprint(), op_id, call_key)
        for layer in active_layers(OverlayLayer):
            cfg = layer.find(key)
            if cfg is not None:
                return cfg
        cfg = self.cache.get(key)
        if cfg is not None:
            return cfg
        kernel = kernel_named(op_id)
        for entry in (
            None if self.persistent is None else self.persistent.entry(key),
            *(entry for entry, _ in shipped_entries(key)[:1]),
        ):
            if entry is None or entry["about"].get("estimated"):
                continue
            if kernel is None or judge(entry["about"], kernel, key).state is not EntryState.STALE:
                cfg = rebuild_or_warn(entry, kernel)
                if cfg is not None:
                    return cfg
        return None

    def _finished(self, request: Request) -> list[Tier]:
        """The tiers of what was tuned before; none if that was not finished, or does not count."""
        return [] if request.again or self._unfinished(request) else self._stored

    def _unfinished(self, request: Request) -> bool:
        """True if the stored result was interrupted, or lacks a candidate of today."""
        entry = None if self.persistent is None else self.persistent.entry(request.key)
        if entry is None or self.persistent is None:
            return False
        about = entry["about"]
        if judge(about, request.kernel, request.key).state is not EntryState.FRESH:
            return False  # the tier of the store deals with it
        trials = self.persistent.trials(request.key)
        if not trials:
            return False
        if about.get("incomplete"):
            return True
        candidates = request.kernel.candidates(request.inv)
        known = known_trials(candidates, trials)
        return len(known) < len(candidates) and len(trials) < len(candidates)

    def _request(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], **changes: Any
    ) -> Request:
        refuse_reference(inv)
        policy = dataclasses.replace(effective_policy(self.policy, self.selector_id), **changes)
        inv = asked_call(inv, policy)
        return Request(inv, kernel, inv.key, policy, self._emitter(inv.key))

    def _tiers(self, policy: AutotunePolicy) -> list[Tier]:
        if policy.strict:
            return self._stored
        if policy.cache_miss_fallback == "heuristics":
            return [*self._stored, *self._defaults, self._autotune]
        return [*self._stored, self._autotune, *self._defaults]

    # --- tuning ----------------------------------------------------------------------------------

    def _tune(self, request: Request) -> Outcome[Any]:
        earlier = self._earlier_trials(request)
        # What a kernel calls while it is measured is part of it, and need not be stored.
        with count_tuning(request.key.op_id), policy_override(strict=False):
            return measuring().tune_invocation(
                request.tuner or self.tuner, request.inv, request.kernel, stored=earlier
            )

    def _earlier_trials(self, request: Request) -> list[Any]:
        """What the store knows of an earlier run that measured the same thing."""
        if self.persistent is None or request.again:
            return []
        entry = self.persistent.entry(request.key)
        if entry is None:
            return []
        if not can_be_continued(entry["about"], request.kernel, request.measured):
            return []
        return self.persistent.trials(request.key)

    def _store_outcome(self, request: Request, outcome: Outcome[Any]) -> None:
        if request.offline or request.agreed:
            self.cache.put_quietly(request.key, outcome.best)
        else:
            self.cache.put(request.key, outcome.best)
        if self.persistent is None or not self.persist_autotune:
            return
        try:
            self.persistent.put(
                request.key,
                outcome.best,
                about={**made_by(request.inv, request.kernel), **outcome.about()},
            )
        except (OSError, TypeError) as error:  # no room, no right, or a config that is no data
            self.persistent.warn(
                error,
                f"the tuned config of {request.key} could not be written to "
                f"{self.persistent.path}: {error}",
            )

    # --- events ----------------------------------------------------------------------------------

    def _emitter(self, key: ConfigKey) -> Callable[..., None]:
        def emit(event: str, **data: Any) -> None:
            if self.on_event is None:
                return
            try:
                self.on_event(
                    event, device=key.device, op_id=key.op_id, call_key=key.call_key, **data
                )
            except Exception:
                # A listener is a guest: what it does wrong is said, and the call goes on.
                logger.exception("ejkernel: on_event raised for event %r of %s", event, key)

        return emit


def _decision(
    request: Request, tier: Tier, found: TierHit, misses: tuple[TierMiss, ...]
) -> Decision[Any]:
    return Decision(
        cfg=found.cfg,
        tier=tier.name,
        key=request.key,
        reason=found.reason,
        misses=misses,
        signature=request.inv.signature,
        about=found.about,
    )
