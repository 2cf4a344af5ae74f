"""Entries that know what made them: what the tiers of the store and of bundles share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....markup import one_line
from ....store.reading import shown
from ....store.rows import sound_about
from ...utils.serialize import config_type_named, from_plain, qualified_name
from ..cache import ConfigCache
from ..freshness import EntryState, judge
from .request import Request, TierHit, refusal, warn_once

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
        found = rebuilt(request, entry, where)
        if isinstance(found, str):
            return found
        cfg, about = found
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


def rebuilt(
    request: Request, entry: Mapping[str, Any], where: str
) -> tuple[Any, Mapping[str, Any]] | str:
    """The config of an entry and what is known about it; or why it is none."""
    try:
        cfg = _config_of(entry, request)
        request.kernel.check_config_class(cfg)  # None is none, also where the class allows it
    except Exception as error:  # noqa: BLE001  a class may check its fields as it likes
        reason = f"its config in {where} does not fit the kernel's class: {error}"
        return warn_once(request, reason, f"{request.key}: {reason}")
    return cfg, sound_about(entry["about"])


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
