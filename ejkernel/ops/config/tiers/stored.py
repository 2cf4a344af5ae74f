"""Configs that were tuned before: for this call, in the store and in bundles; for one near it."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ....markup import one_line
from ....store.bundle import GROUP, Shipped
from ....store.reading import shown
from ....store.rows import sound_about
from ...core.invocation import split
from ...core.near import NearShapes
from ...core.requirements import reasons_against_config
from ...core.types import ConfigKey
from ...utils import environment
from ...utils.fingerprint import stable_json
from ...utils.serialize import config_type_named, from_plain, qualified_name
from ..cache import ConfigCache
from ..explain import call_fields
from ..freshness import EntryState, judge
from ..functions import call_with, function_maker
from ..persistent import PersistentCache
from .request import Request, TierHit, refusal, warn_once

logger = logging.getLogger(__name__)

BOTH_PASSES = "forward and backward"


class StoredTier:
    """Entries that know what made them; what is used of them is cached in memory too."""

    name = ""

    def __init__(self, cache: ConfigCache) -> None:
        self.cache = cache

    def entries(self, request: Request) -> list[tuple[Mapping[str, Any], str]] | str:
        """The entries of a call, each with where it is, the best first; or why there is none."""
        raise NotImplementedError

    def look(self, request: Request) -> TierHit | str:
        """The first entry that fits; one in doubt is not used yet: see `use`."""
        entries = self.entries(request)
        if isinstance(entries, str):
            return entries
        reasons = []
        for entry, where in entries:
            answer = self._judged(request, entry, where)
            if isinstance(answer, TierHit):
                return answer if answer.doubt else self.use(request, answer)
            reasons.append(answer)
        return "; ".join(reasons)

    def _judged(self, request: Request, entry: Mapping[str, Any], where: str) -> TierHit | str:
        try:
            cfg = _config_of(entry, request)
            request.kernel.check_config_class(cfg)  # None is none, also where the class allows it
        except Exception as error:  # noqa: BLE001  a class may check its fields as it likes
            reason = f"its config in {where} does not fit the kernel's class: {error}"
            return warn_once(request, reason, f"{request.key}: {reason}")
        about = sound_about(entry["about"])
        if about.get("estimated"):
            return f"{where} has an estimate for this call, and nothing measured"
        if about.get("measured") == BOTH_PASSES and not request.inv.differentiated:
            return f"{where} has it measured forward and backward, and this program runs it forward"
        freshness = judge(about, request.kernel, request.key)
        if freshness.state is EntryState.STALE:
            return freshness.reason
        if refused := refusal(request, cfg, where):
            return refused
        reason = f"stored{_when(about)} in {where}"
        if freshness.state is EntryState.SUSPECT:
            about = {**about, "suspect": freshness.reason}
            return TierHit(cfg, f"{reason}; {freshness.reason}", about, doubt=freshness.reason)
        return TierHit(cfg, reason, about)

    def use(self, request: Request, found: TierHit) -> TierHit:
        """Say that a config is used, and remember it unless it may be replaced any time."""
        if not found.doubt:
            self.cache.put_quietly(request.key, found.cfg)
        request.emit("cache_hit", level=self.name, cfg=found.cfg)
        return found


def _config_of(entry: Mapping[str, Any], request: Request) -> Any:
    """The config of an entry: of a class of the kernel, whatever the entry says.

    For a kernel that declares none, the class of one of its own candidates; plain data stays plain.
    """
    kernel, named = request.kernel, entry["config_type"]
    if kernel.config_types:
        return kernel.config_from_plain(entry["config"], named)
    classes = {type(candidate) for candidate in kernel.candidates(request.inv.abstract())}
    for known in classes or {config_type_named(named)} - {Any}:
        if qualified_name(known) == named:
            return from_plain(entry["config"], known)
    raise TypeError(
        f"the kernel {kernel.full_op_id} declares no config class, and none of its candidates is a "
        f"{shown(named)}; declare it as Kernel[Config, Output]"
    )


def _when(about: Mapping[str, Any]) -> str:
    return one_line(f" on {about['when']} by {about.get('where', '?')}") if "when" in about else ""


class PersistentTier(StoredTier):
    """The store."""

    name = "persistent"

    def __init__(self, store: PersistentCache | None, cache: ConfigCache) -> None:
        super().__init__(cache)
        self.store = store

    def entries(self, request: Request) -> list[tuple[Mapping[str, Any], str]] | str:
        if self.store is None:
            return "no persistent cache is set"
        entry = self.store.entry(request.key)
        if entry is None and (earlier := earlier_key(request)) is not None:
            entry = self.store.entry(earlier)
            entry = entry if entry and entry["about"].get("measured") == BOTH_PASSES else None
        if entry is None:
            return f"nothing for this call in {self.store.path}"
        return [(entry, str(self.store.path))]

    def more_about_nothing(self, request: Request) -> Callable[[], str] | None:
        """How to find out why there is nothing; it searches the store, so only when asked."""
        if self.store is None:
            return None
        # Without its arrays: the explanation may outlive the trace that they belong to.
        return functools.partial(self.store.explain_miss, request.inv.abstract())


def earlier_key(request: Request) -> ConfigKey | None:
    """Where older stores have what was measured forward and backward: at the call alone."""
    inv = request.inv
    whole = inv.differentiated and inv.differentiated == inv.differentiable
    return inv.forward().key if whole else None


class BundleTier(StoredTier):
    """Bundles that a team has in files and that libraries ship; see `ejkernel.store.bundle`."""

    name = "bundle"

    def entries(self, request: Request) -> list[tuple[Mapping[str, Any], str]] | str:
        bundles = shipped()
        if bundles is None or not bundles.bundles:
            return "there are no bundles"
        found = shipped_entries(request.key)
        if not found:
            return f"nothing for this call in {len(bundles.bundles)} bundles"
        return [(entry, str(source.path)) for entry, source in found]


_lock = threading.Lock()
_loaded: dict[str, Shipped | None] = {}


def shipped() -> Shipped | None:
    """The bundles of this process, None if nothing says that there are any.

    They are read when first needed, and again if the search path changes.
    """
    search_path = environment.CONFIG_PATH.read()
    with _lock:
        if search_path not in _loaded:
            found = Shipped(search_path) if search_path or _packages_ship() else None
            for problem in () if found is None else found.problems:
                said = one_line(problem)
                logger.warning("ejkernel: a bundle of configs is not used: %s", said)
            _loaded.clear()
            _loaded[search_path] = found
        return _loaded[search_path]


def shipped_entries(key: ConfigKey) -> list[tuple[Mapping[str, Any], Any]]:
    """The entries of a call in all bundles, each with its file; those that were measured first."""
    bundles = shipped()
    return [] if bundles is None else [*bundles.all_of(key)]


def _packages_ship() -> bool:
    """Whether an installed package ships bundles, or is so damaged that it has to be said."""
    try:
        return bool(importlib.metadata.entry_points(group=GROUP))
    except Exception:  # noqa: BLE001  `Shipped` finds out which package it is
        return True


def reload_bundles() -> None:
    """Read the bundles again at the next need, because files changed."""
    with _lock:
        _loaded.clear()


class NearTier:
    """Looks for tuned calls that differ only in sizes that do not matter much.

    It comes just before the heuristics, and like them is never cached: tuning the call itself is
    better.
    """

    name = "near"

    def __init__(self, store: PersistentCache | None) -> None:
        self.store = store

    def look(self, request: Request) -> TierHit | str:
        rule = request.kernel.near_shapes
        if rule is None:
            if request.policy.near_shapes is None:
                return "the kernel does not declare near_shapes"
            rule = NearShapes()
        asked = call_fields(request.inv)
        near = [
            (distance, str(entry["key"]), entry)
            for entry in self._entries(request)
            if not entry["about"].get("estimated")
            and (distance := rule.distance(asked, entry["about"].get("call") or {})) is not None
        ]
        reasons = []
        for _, _, entry in sorted(near, key=lambda item: item[:2]):
            try:
                cfg = self._usable(request, entry)
            except _Unusable as why:
                reasons.append(str(why))
                continue
            about = entry["about"]
            signature = about.get("signature", "?")
            request.emit("near_hit", cfg=cfg, near=signature)
            return TierHit(cfg, f"tuned for {signature}, the nearest of {len(near)}", about)
        if reasons:
            return f"of {len(near)} near calls none has a usable config: {reasons[0]}"
        return "no tuned call is near enough"

    def _entries(self, request: Request) -> Iterator[Mapping[str, Any]]:
        key = request.key
        if self.store is not None:
            for entry in self.store.related(limit=1000, op_id=key.op_id, device=key.device):
                yield {**entry, "about": sound_about(entry["about"])}
        if (bundles := shipped()) is not None:
            yield from bundles.of_operation(key.op_id, key.device)

    def _usable(self, request: Request, entry: Mapping[str, Any]) -> Any:
        """The config of an entry, if it is one for this call too; else `_Unusable` is raised."""
        if judge(entry["about"], request.kernel, request.key).state is EntryState.STALE:
            raise _Unusable("it is stale")
        try:
            cfg = request.kernel.config_from_plain(entry["config"], entry["config_type"])
            request.kernel.check_config_class(cfg, "a near entry holds")
        except Exception as error:  # noqa: BLE001  a class may check its fields as it likes
            said = f"{entry['config']} does not fit the kernel's class: {error}"
            raise _Unusable(said) from None
        if (reason := _reason_against(request, cfg)) is not None:
            raise _Unusable(f"{cfg} {reason}")
        return cfg


class _Unusable(Exception):
    """Why a config of a near call is of no use for this one."""


def _reason_against(request: Request, cfg: Any) -> str | None:
    """Why a config is not valid for a call: it was chosen for another one."""
    kernel, inv = request.kernel, request.inv.abstract()
    if reasons := reasons_against_config(kernel, cfg, inv):
        return f"is not supported here: {'; '.join(reasons)}"
    if kernel.near_shapes is None:  # the author did not say that configs can be lent
        known = {stable_json(candidate) for candidate in kernel.candidates(inv)}
        if stable_json(cfg) not in known:
            return "is not among the candidates of this call"
    try:
        output = _output(request, cfg)
    except Exception as error:  # noqa: BLE001  whatever it is, another config is used
        return f"cannot be traced for this call: {type(error).__name__}: {error}"
    try:
        expected = _output(request, kernel.heuristic(inv))
    except Exception:  # noqa: BLE001  no heuristic, or a broken one: nothing to compare with
        return None
    return None if output == expected else "gives an output of another shape than the heuristic"


def _output(request: Request, cfg: Any) -> Any:
    """What a call with a config returns, as shapes."""
    inv = request.inv.abstract()
    function = function_maker(inv, request.kernel)(cfg)
    arrays, rest = split((inv.args, dict(inv.kwargs)))
    return jax.eval_shape(lambda *arrays: call_with(function, rest, arrays), *arrays)
