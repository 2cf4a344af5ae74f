"""`ejkernel bench --against plain`: each call in plain JAX, with heuristic and stored configs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..formatting import described, duration, shortened
from ..markup import one_line
from ..report.formatting import interval
from ..speedup import PlainJax, against_heuristic
from .output import State, fields_of, table

if TYPE_CHECKING:
    from ..ops import AutotuningResult, Invocation
    from ..ops.config.outcome import Outcome


def against_plain(
    state: State,
    store: str,
    result: AutotuningResult,
    invocations: list[Invocation[Any, Any]],
    rounds: int,
    seconds: float,
) -> None:
    """Time each call of a result in plain JAX, with its heuristic config and with its own."""
    from ..ops.config.outcome import TuningFailed
    from ..ops.utils.serialize import to_plain

    calls = {(inv.key.op_id, inv.key.call_key): inv for inv in invocations}
    rows, data, notes = [], [], [f"without: {skip.label}: {skip.reason}" for skip in result.skipped]
    share = max(seconds / len(result.entries), 1e-3)
    for entry in result:
        try:
            timed = _timed(calls[entry.op_id, entry.call_key], entry.cfg, rounds, share)
        except TuningFailed as error:
            notes.append(f"without: {entry.op_id}: {one_line(str(error))}")
            continue
        plain, tuned = timed.plain or PlainJax(), timed.seconds(entry.cfg)
        if timed.best != entry.cfg:  # they did not run interleaved
            plain = dataclasses.replace(plain, speedup=None)
        default = None if timed.heuristic is None else timed.seconds(timed.heuristic)
        gain = next((t.speedup for t in timed.trials if t.cfg == entry.cfg), None)
        ratio = default / tuned if default and tuned else None
        over_default = against_heuristic(gain, ratio, chosen=False)
        rows.append(
            (
                entry.op_id,
                shortened(entry.signature),
                *(duration(time) for time in (plain.seconds, default, tuned)),
                plain.faster(tuned),
                interval(plain.speedup) if plain.speedup and plain.speedup.high > 0 else "",
                *over_default,
                described(to_plain(entry.cfg)),
            )
        )
        reason = plain.reason or ("" if plain.name else "it has no reference in plain JAX")
        notes += [f"note: plain JAX: {entry.op_id}: {reason}"] if reason else []
        data.append(
            {
                **fields_of([entry], "op_id", "call_key", "signature")[0],
                "config": to_plain(entry.cfg),
                "plain": plain.to_plain(),
                "heuristic_seconds": default,
                "seconds": tuned,
                "speedup": None if gain is None else gain.to_plain(),
            }
        )
    header = (
        *("operation", "call", "plain JAX", "default", "tuned"),
        *("over plain", "between", "over default", "between", "config"),
    )
    answer = {"store": store, "operations": data, "not_stored": fields_of(result.skipped, "label")}
    state.result(answer, table(header, rows, right=(2, 3, 4, 5, 7)), *notes)


def _timed(inv: Invocation[Any, Any], cfg: Any, rounds: int, seconds: float) -> Outcome[Any]:
    """A call with the stored config, the heuristic one and in plain JAX, as a tuning run does it.

    Plain JAX runs interleaved with the stored config if that wins, else with the heuristic one.
    """
    from ..ops.tuner.search.effort import EFFORTS
    from ..ops.tuner.session import tune_invocation
    from ..ops.tuner.tuner import Tuner

    assert inv.kernel is not None
    effort = dataclasses.replace(
        EFFORTS["standard"], rounds=rounds, screening=min(3, rounds), share_of_build=10.0
    )
    tuner = Tuner(effort=effort, seconds=seconds, progress=False, prune=False)
    candidates = inv.kernel.with_heuristic(inv, [cfg])
    return tune_invocation(tuner, inv, inv.kernel, candidates=candidates)
