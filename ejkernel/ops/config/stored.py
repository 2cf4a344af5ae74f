"""What was tuned earlier: the tier of the store, and the one of shipped bundles."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...store.sources import Shipped
from ..utils import environment
from ..utils.serialize import from_plain
from .cache import ConfigCache
from .freshness import State, judge
from .persistent import PersistentCache
from .tiers import Found, Request

logger = logging.getLogger(__name__)


class StoredTier:
    """Entries that know what made them; what is served from them is kept in memory too."""

    name = ""

    def __init__(self, cache: ConfigCache) -> None:
        self.cache = cache

    def find(self, request: Request) -> tuple[Any, Mapping[str, Any], str] | str:
        """Config, what is known about it, and where it is; or why there is none."""
        raise NotImplementedError

    def look(self, request: Request) -> Found | str:
        """A config in doubt is not served yet: see `serve`."""
        found = self.find(request)
        if isinstance(found, str):
            return found
        cfg, about, where = found
        if about.get("estimated"):
            return f"{where} has an estimate for this call, and nothing measured"
        freshness = judge(about, request.kernel, request.key)
        if freshness.state is State.STALE:
            return freshness.reason
        request.kernel.check_config(cfg, f"{where} holds")
        reason = f"stored{_when(about)} in {where}"
        if freshness.state is State.SUSPECT:
            about = {**about, "suspect": freshness.reason}
            return Found(cfg, f"{reason}; {freshness.reason}", about, doubt=freshness.reason)
        return self.serve(request, Found(cfg, reason, about))

    def serve(self, request: Request, found: Found) -> Found:
        """Say that a config is used, and remember it unless it may be replaced any time."""
        if not found.doubt:
            self.cache.put_quietly(request.key, found.cfg)
        request.emit("cache_hit", level=self.name, cfg=found.cfg)
        return found


class PersistentTier(StoredTier):
    """The store."""

    name = "persistent"

    def __init__(self, store: PersistentCache | None, cache: ConfigCache) -> None:
        super().__init__(cache)
        self.store = store

    def find(self, request: Request) -> tuple[Any, Mapping[str, Any], str] | str:
        if self.store is None:
            return "no persistent cache is set"
        entry = self.store.entry(request.key)
        cfg = None if entry is None else self.store.rebuild(entry, request.kernel.config_type)
        if entry is None or cfg is None:
            return f"nothing for this call in {self.store.path}"
        return cfg, entry["about"], str(self.store.path)

    def more_about_nothing(self, request: Request) -> Callable[[], str] | None:
        """How to find out why there is nothing; it searches the store, so only when asked."""
        if self.store is None:
            return None
        # Without its arrays: the explanation may outlive the trace that they belong to.
        return functools.partial(self.store.explain_miss, request.inv.abstract())


class BundleTier(StoredTier):
    """Bundles that a team keeps in files and that libraries ship; see `ejkernel.store.sources`."""

    name = "bundle"

    def find(self, request: Request) -> tuple[Any, Mapping[str, Any], str] | str:
        bundles = shipped()
        if not bundles.bundles:
            return "there are no bundles"
        found = bundles.find(request.key)
        if found is None:
            return f"nothing for this call in {len(bundles.bundles)} bundles"
        entry, source = found
        try:
            cfg = from_plain(entry["config"], request.kernel.config_type)
        except Exception as error:  # noqa: BLE001  a class may check its fields as it likes
            reason = f"its config in {source.path} does not fit the kernel's class: {error}"
            logger.warning("ejkernel: %s: %s", request.key, reason)
            return reason
        return cfg, entry["about"], str(source.path)


_lock = threading.Lock()
_loaded: dict[str, Shipped] = {}


def shipped() -> Shipped:
    """The bundles of this process: read when first needed, and again if the search path changes."""
    search_path = environment.CONFIG_PATH.read()
    with _lock:
        if search_path not in _loaded:
            found = Shipped(search_path)
            for trouble in found.troubles:
                logger.warning("ejkernel: a bundle of configs is not used: %s", trouble)
            _loaded.clear()
            _loaded[search_path] = found
        return _loaded[search_path]


def reload_bundles() -> None:
    """Read the bundles again at the next need, because files changed."""
    with _lock:
        _loaded.clear()


def _when(about: Mapping[str, Any]) -> str:
    return f" on {about['when']} by {about.get('where', '?')}" if "when" in about else ""
