"""Candidates ranked by an estimate, as `ejkernel.targets.export` writes them into bundles.

Such an entry says `"estimated": true`. It is never served as a tuned config: it limits what a
tuning run on the device measures, and, where the policy allows estimates, its first candidate
serves before the heuristics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...markup import one_line
from ..core.types import ConfigKey
from ..utils.serialize import from_plain
from .freshness import State, judge
from .stored import shipped
from .tiers import Found, Request, refusal

if TYPE_CHECKING:
    from ..core.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Ranked:
    """What a bundle says about the candidates of a call, as plain data.

    Attributes:
      best: the best estimated configs, the best first.
      refused: configs that do not compile, with the compiler's reason.
      target: what they were compiled for.
      where: the file.
    """

    best: tuple[Any, ...]
    refused: tuple[tuple[Any, str], ...]
    target: str
    where: str


def ranked_in_bundles(key: ConfigKey, kernel: Kernel[Any, Any]) -> Ranked | None:
    """The ranked candidates of a call, unless the kernel changed since or there are none."""
    for entry, source in shipped().all_of(key):
        about = entry["about"]
        if not about.get("estimated") or judge(about, kernel, key).state is State.STALE:
            continue
        ranked = _read(about, str(source.path))
        if ranked is not None:
            return ranked
    return None


def _read(about: Mapping[str, Any], where: str) -> Ranked | None:
    best, refused = about.get("ranked"), about.get("refused", [])
    if not isinstance(best, list) or not best or not isinstance(refused, list):
        return None
    try:
        return Ranked(
            tuple(item["config"] for item in best),
            tuple((item["config"], one_line(item["reason"])) for item in refused),
            one_line(about.get("target", "?")),
            where,
        )
    except (KeyError, TypeError):
        return None  # written by hand, or by another version: as if it were not there


class EstimatedTier:
    """The best estimate of a bundle: a heuristic that says so. Never kept."""

    name = "estimated"

    def look(self, request: Request) -> Found | str:
        if not request.policy.allow_estimates:
            return "the policy does not allow it (allow_estimates=False)"
        ranked = ranked_in_bundles(request.key, request.kernel)
        if ranked is None:
            return "no bundle has ranked candidates for this call"
        try:
            cfg = from_plain(ranked.best[0], request.kernel.config_types[0])
            refused = refusal(request, cfg, ranked.where)
        except Exception as error:  # noqa: BLE001  a class may check its fields as it likes
            return f"its config in {ranked.where} does not fit the kernel's class: {error}"
        if refused:
            return refused
        request.emit("estimated", cfg=cfg)
        reason = f"an estimate for {ranked.target} in {ranked.where}; nothing was measured"
        return Found(cfg, reason, {"estimated": True, "target": ranked.target})
