"""The store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ...core.types import ConfigKey
from ..cache import ConfigCache
from ..persistent import PersistentCache
from .request import Request
from .stored import BOTH_PASSES, StoredTier


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
