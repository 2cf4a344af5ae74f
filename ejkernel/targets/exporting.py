"""Feasible, ranked candidates as a bundle: a run on the device then races only the best few."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from typing import Any

from ..ops.config.explain import call_fields
from ..ops.core.invocation import Invocation
from ..ops.utils.provenance import source_hash
from ..ops.utils.serialize import qualified_name, to_plain
from ..store.bundle import Bundle
from .catalog import Target, TargetError
from .checking import COMPILE_SECONDS, CheckResult, check
from .compiler import compiler_versions

Call = Invocation[Any, Any] | CheckResult


def export(
    calls: Call | Iterable[Call],
    path: str | os.PathLike[str] | None = None,
    *,
    target: str | Target | None = None,
    best: int = 5,
    seconds: float = COMPILE_SECONDS,
    jobs: int | None = None,
) -> Bundle:
    """A bundle of the best estimated candidates of calls, written to `path` if one is given.

    Its entries are keyed for the target's device and say that they are estimates: no tier uses
    them as tuned. A tuning run on the device that finds the bundle (`EJKERNEL_CONFIG_PATH`)
    measures only these candidates and the heuristic one, and records those that do not compile
    with the compiler's reason.

    Args:
      calls: results of `check`, or calls (`kernel.bind(...)`, `get_invocations()`) to check now.
      path: a file, written whole or not at all.
      target: the device, for calls that are not checked yet.
      best: how many candidates to name for each call.
      seconds: as `check` takes it.
      jobs: as `check` takes it.
    """
    if not isinstance(best, int) or best < 1:
        raise ValueError(f"export: best={best!r} must be a whole number >= 1")
    listed = [calls] if isinstance(calls, (Invocation, CheckResult)) else list(calls)
    if not listed:
        raise ValueError("export: calls is empty; give results of check() or kernel.bind(...)")
    entries: dict[Any, dict[str, Any]] = {}
    for call in listed:
        if isinstance(call, CheckResult):
            result = call
        elif isinstance(call, Invocation):
            if target is None:
                raise TypeError("export: target= is needed for calls that are not checked yet")
            result = check(call, target=target, seconds=seconds, jobs=jobs)
        else:
            raise TypeError(
                f"export: calls holds {call!r} ({type(call).__name__}); it takes results of "
                "check() and invocations"
            )
        entries[result.key] = _entry(result, best)
    bundle = Bundle(entries.values())
    if path is not None:
        bundle.save(path)
    return bundle


def _entry(result: CheckResult, best: int) -> dict[str, Any]:
    inv = result.invocation
    name = f"{inv.full_op_id}({inv.signature})"
    if all(entry.seconds is None for entry in result.feasible) and result.feasible:
        raise TargetError(f"export: {name} was only lowered; check it with compile=True")
    if not result.feasible:
        reasons = "; ".join(f"{entry.cfg}: {entry.reason}" for entry in result.infeasible[:3])
        raise TargetError(
            f"export: no config of {name} compiles for {result.target.name}: {reasons}"
        )
    chosen = result.feasible[:best]
    return {
        "key": tuple(result.key),
        "config": to_plain(chosen[0].cfg),
        "config_type": qualified_name(type(chosen[0].cfg)),
        "about": {
            "estimated": True,
            "target": result.target.name,
            "compiled_with": compiler_versions(result.target.platform),
            "signature": inv.signature,
            "call": call_fields(inv),
            "source": source_hash(inv.kernel),
            "when": datetime.date.today().isoformat(),
            "ranked": [
                {
                    "config": to_plain(entry.cfg),
                    "estimated_seconds": entry.estimate.seconds if entry.estimate else None,
                    "bound": entry.estimate.bound if entry.estimate else "",
                }
                for entry in chosen
            ],
            "refused": [
                {"config": to_plain(entry.cfg), "reason": entry.reason}
                for entry in result.infeasible
            ],
        },
    }
