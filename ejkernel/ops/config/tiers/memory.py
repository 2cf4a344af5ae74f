"""The selector's memory cache."""

from __future__ import annotations

from ..cache import ConfigCache
from .request import Request, TierHit, refusal


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
