"""Before anything is measured: which candidates are not worth it, and in which order to try.

Somebody else says so: a compiler that refuses a candidate, or a static ranking of them, computed
now (`ejkernel.targets.StaticPruner`) or earlier, on a machine without the device, and shipped in a
bundle (`ejkernel.targets.export`). The heuristic config is never left out: it is what the winner
must beat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....markup import one_line
from ...config.freshness import EntryState, judge
from ...config.outcome import Trial, TuningFailed, Verdict
from ...config.tiers.stored import shipped_entries
from ...utils.fingerprint import stable_json
from ...utils.serialize import to_plain

if TYPE_CHECKING:
    from ...core.invocation import Invocation
    from ...core.kernel import Kernel
    from ..tuner import Tuner


@dataclasses.dataclass(frozen=True)
class Pruned:
    """What somebody says about candidates before they are measured.

    Attributes:
      best: those worth measuring, the most promising first.
      refused: those that cannot work, with the reason.
      origin: who says so, for the notes of the outcome.

    What is in neither is not measured either, unless `best` holds none of the candidates.
    """

    best: Sequence[Any]
    refused: Sequence[tuple[Any, str]] = ()
    origin: str = "pruned"


Pruner = Callable[["Kernel[Any, Any]", "Invocation[Any, Any]", Sequence[Any]], Pruned | None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Candidates in the order to try them, and the fate of those that are not tried."""

    candidates: list[Any]
    trials: dict[str, Trial[Any]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def prune(
    tuner: Tuner,
    kernel: Kernel[Any, Any],
    inv: Invocation[Any, Any],
    candidates: list[Any],
    baseline: Any,
) -> Plan:
    """What a tuner's pruner, or else a bundle of ranked candidates, leaves of the candidates."""
    pruner: Any = getattr(tuner, "prune", False)
    if pruner is False:
        return Plan(candidates)
    if pruner is None:
        said = _said_by_bundles(kernel, inv, candidates)
    else:
        try:
            said = pruner(kernel, inv, candidates)
        except Exception as error:
            raise TuningFailed(
                f"{kernel.full_op_id}: the tuner's prune raised {type(error).__name__}: {error}"
            ) from error
    return Plan(candidates) if said is None else _plan(said, candidates, baseline)


def _plan(said: Pruned, candidates: list[Any], baseline: Any) -> Plan:
    left = {stable_json(cfg): cfg for cfg in candidates}
    spared = None if baseline is None else stable_json(baseline)
    # Each once, whatever a bundle repeats.
    order = list(dict.fromkeys(key for cfg in said.best if (key := stable_json(cfg)) in left))
    refused = {stable_json(cfg): reason for cfg, reason in said.refused}
    trials: dict[str, Trial[Any]] = {}
    for key, cfg in left.items():
        if key == spared or key in order:
            continue
        if key in refused:
            trials[key] = Trial(cfg, Verdict.UNSUPPORTED, reason=refused[key])
        elif order:
            trials[key] = Trial(
                cfg, Verdict.NOT_TRIED, reason=f"not among the best ({said.origin})"
            )
    if len(trials) == len(left):
        return Plan(candidates)  # nothing would be left to measure: let the device have its say
    first = [*order, *(key for key in left if key not in order)]
    skipped = sum(trial.verdict is Verdict.NOT_TRIED for trial in trials.values())
    note = (
        f"{said.origin}: {len(trials) - skipped} of {len(left)} candidates refused unmeasured, "
        f"{skipped} left out"
    )
    return Plan([left[key] for key in first], trials, (note,) if trials else ())


def _said_by_bundles(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], candidates: Sequence[Any]
) -> Pruned | None:
    """The first usable ranking in a bundle; not one of a kernel that has changed since."""
    for entry, source in shipped_entries(inv.key):
        about = entry["about"]
        if not about.get("estimated") or judge(about, kernel, inv.key).state is EntryState.STALE:
            continue
        said = _read_ranking(about, str(source.path), candidates)
        if said is not None:
            return said
    return None


def _read_ranking(about: Mapping[str, Any], where: str, candidates: Sequence[Any]) -> Pruned | None:
    """What a bundle says of these candidates: the best estimated ones, and what did not compile."""
    ranked, refused = about.get("ranked"), about.get("refused", [])
    if not isinstance(ranked, list) or not ranked or not isinstance(refused, list):
        return None
    known = {stable_json(to_plain(cfg)): cfg for cfg in candidates}
    try:
        best = [stable_json(item["config"]) for item in ranked]
        reasons = [(stable_json(item["config"]), one_line(item["reason"])) for item in refused]
    except (KeyError, TypeError):
        return None  # written by hand, or by another version: as if it were not there
    return Pruned(
        [known[key] for key in best if key in known],
        [(known[key], reason) for key, reason in reasons if key in known],
        f"estimated for {one_line(about.get('target', '?'))}, from {where}",
    )
