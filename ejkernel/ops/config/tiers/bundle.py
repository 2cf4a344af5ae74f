"""Bundles that a team keeps in files and that libraries ship."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from ....markup import one_line
from ....store.bundle import Shipped
from ...utils import environment
from .request import Request
from .stored import StoredTier

logger = logging.getLogger(__name__)


class BundleTier(StoredTier):
    """Bundles that a team keeps in files and that libraries ship; see `ejkernel.store.bundle`."""

    name = "bundle"

    def entries(self, request: Request) -> list[tuple[Mapping[str, Any], str]] | str:
        bundles = shipped()
        if not bundles.bundles:
            return "there are no bundles"
        found = bundles.all_of(request.key)
        if not found:
            return f"nothing for this call in {len(bundles.bundles)} bundles"
        return [(entry, str(source.path)) for entry, source in found]


_lock = threading.Lock()
_loaded: dict[str, Shipped] = {}


def shipped() -> Shipped:
    """The bundles of this process: read when first needed, and again if the search path changes."""
    search_path = environment.CONFIG_PATH.read()
    with _lock:
        if search_path not in _loaded:
            found = Shipped(search_path)
            for problem in found.problems:
                said = one_line(problem)
                logger.warning("ejkernel: a bundle of configs is not used: %s", said)
            _loaded.clear()
            _loaded[search_path] = found
        return _loaded[search_path]


def reload_bundles() -> None:
    """Read the bundles again at the next need, because files changed."""
    with _lock:
        _loaded.clear()
