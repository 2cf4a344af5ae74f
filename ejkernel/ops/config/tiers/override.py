"""The config that the caller gave with the call."""

from __future__ import annotations

from .request import Request, TierHit


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
