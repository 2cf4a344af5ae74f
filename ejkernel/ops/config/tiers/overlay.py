"""Overlays and tuning results in force."""

from __future__ import annotations

from .. import context
from ..cache import OverlayLayer
from .request import Request, TierHit, refusal


class OverlayTier:
    """`overlay_cache` blocks and tuning results in force, innermost first."""

    name = "overlay"

    def look(self, request: Request) -> TierHit | str:
        count = 0
        refused = []
        for layer in context.layers_in_force(OverlayLayer):
            count += 1
            cfg = layer.find(request.key)
            if cfg is None:
                continue
            if reason := refusal(request, cfg, "an overlay"):
                refused.append(reason)
                continue
            request.emit("overlay_hit", cfg=cfg)
            return TierHit(cfg, f"an overlay in force holds it (number {count} from the inside)")
        if refused:
            return "; ".join(refused)
        return f"{count} in force, none has this call" if count else "none in force"
