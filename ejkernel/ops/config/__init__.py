"""Which config: caches, overlays, policies and the chain that asks them."""

from typing import Any

from .cache import ConfigCache, overlay_cache
from .decision import Decision
from .persistent import PersistentCache
from .policy import AutotunePolicy, forward_autotune_only, policy_override
from .selection import ConfigSelectorChain
from .space import Space

__all__ = [
    "AutotunePolicy",
    "ConfigCache",
    "ConfigSelectorChain",
    "Decision",
    "PersistentCache",
    "Space",
    "Tuner",
    "forward_autotune_only",
    "overlay_cache",
    "policy_override",
]


def __getattr__(name: str) -> Any:
    if name == "Tuner":
        from ..tuner.tuner import Tuner

        return Tuner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
