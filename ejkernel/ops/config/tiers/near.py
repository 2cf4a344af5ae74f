"""The config of the nearest tuned shape, where a kernel or the policy allows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ....store.rows import sound_about
from ...core.limits import reasons_against_config
from ...core.near import NearShapes
from ...core.static_part import split
from ...utils.stable import stable_json
from ..explain import call_fields
from ..freshness import EntryState, judge
from ..functions import call_with, function_maker
from ..persistent import PersistentCache
from .bundle import shipped
from .request import Request, TierHit


class NearTier:
    """Looks for tuned calls that differ only in sizes that do not matter much.

    It comes just before the heuristics, and like them is never kept: tuning the call itself is
    better.
    """

    name = "near"

    def __init__(self, store: PersistentCache | None) -> None:
        self.store = store

    def look(self, request: Request) -> TierHit | str:
        rule = _rule_of(request)
        if isinstance(rule, str):
            return rule
        asked = call_fields(request.inv)
        near = [
            (distance, str(entry["key"]), entry)
            for entry in self._entries(request)
            if not entry["about"].get("estimated")
            and (distance := rule.distance(asked, entry["about"].get("call") or {})) is not None
        ]
        reasons = []
        for _, _, entry in sorted(near, key=lambda item: item[:2]):
            cfg = self._usable(request, entry)
            if isinstance(cfg, _Unusable):
                reasons.append(cfg.reason)
                continue
            about = entry["about"]
            signature = about.get("signature", "?")
            request.emit("near_hit", cfg=cfg, near=signature)
            return TierHit(cfg, f"tuned for {signature}, the nearest of {len(near)}", about)
        if reasons:
            return f"of {len(near)} near calls none has a usable config: {reasons[0]}"
        return "no tuned call is near enough"

    def _entries(self, request: Request) -> Iterator[Mapping[str, Any]]:
        key = request.key
        if self.store is not None:
            for entry in self.store.related(limit=1000, op_id=key.op_id, device=key.device):
                yield {**entry, "about": sound_about(entry["about"])}
        yield from shipped().of_operation(key.op_id, key.device)

    def _usable(self, request: Request, entry: Mapping[str, Any]) -> Any:
        """The config of an entry if it is one for this call too."""
        if judge(entry["about"], request.kernel, request.key).state is EntryState.STALE:
            return _Unusable("it is stale")
        try:
            cfg = request.kernel.config_from_plain(entry["config"], entry["config_type"])
            request.kernel.check_config_class(cfg, "a near entry holds")
        except Exception as error:  # noqa: BLE001  a class may check its fields as it likes
            return _Unusable(f"{entry['config']} does not fit the kernel's class: {error}")
        reason = _reason_against(request, cfg)
        return cfg if reason is None else _Unusable(f"{cfg} {reason}")


class _Unusable:
    """Why a near config is of no use; not a config, whatever configs are."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _rule_of(request: Request) -> NearShapes | str:
    allowed, declared = request.policy.near_shapes, request.kernel.near_shapes
    if allowed is False:
        return "the policy does not allow it (near_shapes=False)"
    if declared is not None:
        return declared
    if allowed is None:
        return "the kernel does not declare near_shapes"
    return NearShapes()


def _reason_against(request: Request, cfg: Any) -> str | None:
    """Why a config is not valid for a call: it was chosen for another one."""
    kernel, inv = request.kernel, request.inv.abstract()
    if reasons := reasons_against_config(kernel, cfg, inv):
        return f"is not supported here: {'; '.join(reasons)}"
    if kernel.near_shapes is None:  # the author did not say that configs can be lent
        known = {stable_json(candidate) for candidate in kernel.candidates(inv)}
        if stable_json(cfg) not in known:
            return "is not among the candidates of this call"
    try:
        output = _output(request, cfg)
    except Exception as error:  # noqa: BLE001  whatever it is, another config is used
        return f"cannot be traced for this call: {type(error).__name__}: {error}"
    try:
        expected = _output(request, kernel.heuristic(inv))
    except Exception:  # noqa: BLE001  no heuristic, or a broken one: nothing to compare with
        return None
    return None if output == expected else "gives an output of another shape than the heuristic"


def _output(request: Request, cfg: Any) -> Any:
    """What a call with a config returns, as shapes."""
    inv = request.inv.abstract()
    function = function_maker(inv, request.kernel)(cfg)
    arrays, rest = split((inv.args, dict(inv.kwargs)))
    return jax.eval_shape(lambda *arrays: call_with(function, rest, arrays), *arrays)
