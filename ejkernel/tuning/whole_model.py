"""The whole function before and after tuning, and in plain JAX: which is faster, and how sure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..ops.core.types import ConfigKey
from ..ops.execution.results import AutotuningResult
from ..ops.execution.whole_function import WholeFunction
from ..ops.tuner.clock import typical
from ..report.before_after import (
    MOST_ROUNDS,
    difference_of,
    heuristic_configs,
    interleaved,
    is_settled,
    run,
    without_before,
)
from ..report.record import BeforeAfter
from ..speedup import gain_of

COMPARE_SECONDS = 20.0  # most time for comparing, after the programs are compiled
STEP_SECONDS = 3.0  # most time for timing a function that there is nothing to compare with
STEP_ROUNDS = 9
LEAST_TO_REJECT = 7  # rounds; of fewer, an interval is only what was seen
SAME_COMPUTATION = 0.05  # outputs that differ more, relative to their size, are something else's

Configs = Mapping[ConfigKey, Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What running the whole function showed.

    Attributes:
      model: with the earlier configs and with the tuned ones, if they differ.
      plain: in plain JAX and with the tuned configs, if a version in plain JAX was given.
      step_seconds: the time of a run with the tuned configs.
      notes: remarks.
      decides: `model` compares with what was in force, so it says whether to change that.
    """

    model: BeforeAfter | None = None
    plain: BeforeAfter | None = None
    step_seconds: float | None = None
    notes: tuple[str, ...] = ()
    decides: bool = False

    @property
    def is_slower(self) -> bool:
        """True if the tuned configs make the whole function slower, by more than the noise."""
        model = self.model
        if model is None or not self.decides or len(model.after) < LEAST_TO_REJECT:
            return False
        return 0 < model.gain.high < 1


def compare(
    whole: WholeFunction,
    against: WholeFunction | None,
    found: AutotuningResult,
    before: Configs,
    seconds: float = COMPARE_SECONDS,
) -> Comparison:
    """Run the function with what was in force and with what was found, interleaved.

    It runs until the confidence interval of each speedup is narrower than the change that it shows,
    or for `seconds`.

    Args:
      whole: the function.
      against: the same function in plain JAX.
      found: the tuned configs.
      before: what the calls ran with before.
      seconds: most time, compiling apart.
    """
    tuned = found.as_mapping()
    defaults, notes = heuristic_configs(found)
    other, decides = _to_compare_with(tuned, before, defaults, against is not None)
    if not other:
        notes = []
    elif unknown := [key.op_id for key in tuned if key not in other]:
        notes = without_before(unknown)
    runs: list[Callable[[], float]] = [lambda: run(whole, tuned)[0]]
    output = run(whole, tuned)[1]
    names, differences = [], []
    if other:
        baseline = "default configs" if _alike(other, defaults) else "the configs before"
        names.append(baseline)
        differences.append(difference_of(run(whole, other)[1], output))
        runs.append(lambda: run(whole, other)[0])
    if against is not None:
        difference = _difference(against, output)
        if isinstance(difference, str):
            notes.append(difference)
        else:
            names.append("plain JAX")
            differences.append(difference)
            runs.append(lambda: against.timed()[0])
    del output

    def enough(samples: list[list[float]]) -> bool:
        after, *others = samples
        return all(is_settled(gain_of(before, after), len(after)) for before in others)

    if names:
        after, *others = interleaved(runs, seconds=seconds, enough=enough)
    else:
        notes.append(_nothing_to_compare(tuned, defaults))
        limit = min(seconds, STEP_SECONDS)
        after, *others = interleaved(runs, seconds=limit, rounds=STEP_ROUNDS)
    compared = {
        name: BeforeAfter(
            whole.name,
            tuple(samples),
            tuple(after),
            gain_of(samples, after),
            difference,
            baseline=name,
        )
        for name, samples, difference in zip(names, others, differences, strict=True)
    }
    if others and not enough([after, *others]):
        limit_of = f"{len(after)} rounds" if len(after) >= MOST_ROUNDS else f"{seconds:g} s"
        notes.append(
            f"the comparison ended at its limit of {limit_of}: an interval is still wider than "
            "the change it shows"
        )
    plain = compared.pop("plain JAX", None)
    model = next(iter(compared.values()), None)
    return Comparison(model, plain, typical(after), tuple(notes), decides)


def _to_compare_with(
    tuned: Configs, before: Configs, defaults: Configs, defaults_too: bool
) -> tuple[Configs, bool]:
    """The configs to compare with, if any, and whether they are those that were in force."""
    if not _alike(tuned, before):
        return before, True
    return (defaults if defaults_too and not _alike(tuned, defaults) else {}), False


def _alike(tuned: Configs, others: Configs) -> bool:
    return all(others.get(key, cfg) == cfg for key, cfg in tuned.items())


def _nothing_to_compare(tuned: Configs, defaults: Configs) -> str:
    if _alike(tuned, defaults):
        return "default configs were best already; nothing to compare"
    return "the same configs were in force before; nothing to compare"


def _difference(against: WholeFunction, output: Any) -> float | str | None:
    """How far a version in plain JAX is from ours; or why it is no version of it."""
    where = f"not compared with plain JAX: {against.name}"
    try:
        other = against.timed()[1]
    except Exception as error:  # noqa: BLE001  ours is compared with what was in force all the same
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{where} raised {type(error).__name__}: {first}"
    try:
        difference = difference_of(other, output)
    except (ValueError, TypeError) as error:
        return f"{where} returns something else ({error})"
    if difference is not None and not difference <= SAME_COMPUTATION:
        return f"{where} gives outputs that differ by up to {difference:.2g} of their size"
    return difference
