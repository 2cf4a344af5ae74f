"""The kernel's default config."""

from __future__ import annotations

from .request import Request, TierHit


class HeuristicsTier:
    """The kernel's default config. Never kept: it would stand in the way of tuning later."""

    name = "heuristics"

    def look(self, request: Request) -> TierHit | str:
        if not request.policy.allow_heuristics:
            return "the policy does not allow it (allow_heuristics=False)"
        try:
            cfg = request.kernel.heuristic(request.inv)
        except NotImplementedError as error:
            return str(error)
        request.emit("heuristics", cfg=cfg)
        return TierHit(cfg, "the kernel's heuristic_cfg")
