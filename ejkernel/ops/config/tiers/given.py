"""Configs that are there without a search: given with the call, in an overlay, in memory; and the
kernel's own default."""

from __future__ import annotations

from ..cache import ConfigCache, OverlayLayer
from ..context import active_layers
from .request import Request, TierHit, refusal


class OverrideTier:
    """The config that the caller gave with the call."""

    name = "override"

    def look(self, request: Request) -> TierHit | str:
        cfg = request.inv.override_cfg
        if cfg is None:
            return "the call gave no cfg"
        request.kernel.check_config(cfg, inv=request.inv)
        request.emit("override", cfg=cfg)
        return TierHit(cfg, "given with the call")


class OverlayTier:
    """Active `overlay_cache` blocks and tuning results, innermost first."""

    name = "overlay"

    def look(self, request: Request) -> TierHit | str:
        count = 0
        refused = []
        for layer in active_layers(OverlayLayer):
            count += 1
            cfg = layer.find(request.key)
            if cfg is None:
                continue
            if reason := refusal(request, cfg, "an overlay"):
                refused.append(reason)
                continue
            request.emit("overlay_hit", cfg=cfg)
            return TierHit(cfg, f"an active overlay holds it (number {count} from the inside)")
        if refused:
            return "; ".join(refused)
        return f"{count} active, none has this call" if count else "none is active"


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


class HeuristicsTier:
    """The kernel's default config. Never cached: it would stand in the way of tuning later."""

    name = "heuristics"

    def look(self, request: Request) -> TierHit | str:
        try:
            cfg = request.kernel.heuristic(request.inv)
        except NotImplementedError as error:
            return str(error)
        request.emit("heuristics", cfg=cfg)
        return TierHit(cfg, "the kernel's heuristic_cfg")
