"""Which config: caches, overlays, policies and the chain that asks them."""

from typing import Any

from .cache import ConfigCache, overlay_cache
from .decision import Decision
from .exchange import export_bundle, import_bundle, verify_bundle
from .miss import ConfigMiss, StrictMiss
from .persistent import PersistentCache
from .policy import AutotunePolicy, forward_autotune_only, policy_override
from .selection import ConfigSelectorChain
from .space import Space
from .statistics import Stats, reset_stats, stats
from .tuning import measuring

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
