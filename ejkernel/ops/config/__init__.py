"""Which config: caches, overlays, policies and the chain that asks them."""

from typing import Any

from ..core.space import Space
from ..registry import Stats, reset_stats, stats
from .cache import ConfigCache, overlay_cache
from .context import AutotunePolicy, forward_autotune_only, policy_override
from .decision import ConfigMiss, Decision, StrictMiss
from .exchange import export_bundle, import_bundle, verify_bundle
from .hooks import measuring
from .persistent import PersistentCache
from .selection import ConfigSelectorChain

__all__ = [
    "AutotunePolicy",
    "ConfigCache",
    "ConfigMiss",
    "ConfigSelectorChain",
    "Decision",
    "PersistentCache",
    "Space",
    "Stats",
    "StrictMiss",
    "Tuner",
    "export_bundle",
    "forward_autotune_only",
    "import_bundle",
    "overlay_cache",
    "policy_override",
    "reset_stats",
    "stats",
    "verify_bundle",
]


def __getattr__(name: str) -> Any:
    if name == "Tuner":
        return measuring().Tuner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
