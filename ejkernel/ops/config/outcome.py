"""What a tuning run found: every candidate with its time, or with why it has none."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any, Generic

from ...formatting import described, duration, times
from ...markup import printable
from ...speedup import Gain, PlainJax, against_heuristic, interval
from ..core.types import Cfg
from ..utils.display import Displayed, Explanation, Shown, as_text
from ..utils.fingerprint import stable_json
from ..utils.serialize import to_plain


class TuningFailed(RuntimeError):
    """No candidate could be used; the message lists each with its reason."""


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C while tuning; `outcome` holds what was measured so far, if anything was."""

    def __init__(self, outcome: Outcome[Any] | None) -> None:
        super().__init__("tuning was interrupted")
        self.outcome = outcome


class Verdict(enum.Enum):
    """What became of a candidate."""

    MEASURED = "measured"
    WRONG = "wrong"
    NON_DETERMINISTIC = "non-deterministic"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    DUPLICATE = "duplicate"
    NOT_TRIED = "not tried"


@dataclasses.dataclass(frozen=True)
class Trial(Generic[Cfg]):
    """One candidate: its verdict, its time per call and the samples behind it, or the reason.

    `order` is its place among those that were tried, earlier runs included; None if it was not.
    `speedup` is how many times faster it is than the heuristic config, by the rounds of the race
    that decided about it; None if they did not run interleaved. The time is then the heuristic
    config's divided by it: the two never contradict each other.
    """

    cfg: Cfg
    verdict: Verdict
    seconds: float | None = None
    samples: tuple[float, ...] = ()
    reason: str = ""
    order: int | None = None
    speedup: Gain | None = None

    def to_plain(self) -> dict[str, Any]:
        """The trial as a store has it; samples in whole nanoseconds, which are short."""
        return {
            "config": to_plain(self.cfg),
            "verdict": self.verdict.value,
            "seconds": self.seconds,
            "samples_ns": [round(sample * 1e9) for sample in self.samples],
            "reason": self.reason,
            **({} if self.order is None else {"order": self.order}),
            "speedup": None if self.speedup is None else self.speedup.to_plain(),
        }


@dataclasses.dataclass(frozen=True)
class Outcome(Displayed, Generic[Cfg]):
    """The winner of a tuning run and all that is known about how it won.

    Attributes:
      best: the winner.
      trials: every candidate.
      heuristic: the heuristic config, if the kernel has one.
      measured: what was timed: `forward`, or `forward and backward`.
      notes: remarks, such as why something was not measured.
      clock: whose time that is: the `"device"`'s own, or the `"wall"` clock's.
      sure: the race ended because the winner was sure, not because rounds ran out.
      incomplete: why the run was interrupted, or an empty string.
      took: seconds that the run took, compiling included.
      work: what a call has to do: its `flops`, its `bytes` and the `dtype` of both, if known.
      plain: the same call in plain JAX; None if the kernel has neither `plain` nor `reference`.
    """

    best: Cfg
    trials: tuple[Trial[Cfg], ...] = ()
    heuristic: Cfg | None = None
    measured: str = "forward"
    notes: tuple[str, ...] = ()
    clock: str = "wall"
    sure: bool = False
    incomplete: str = ""
    took: float | None = None
    work: Mapping[str, Any] | None = None
    plain: PlainJax | None = None

    def seconds(self, cfg: Any) -> float | None:
        """The measured time per call of a config."""
        return next((trial.seconds for trial in self.trials if trial.cfg == cfg), None)

    @property
    def speedup(self) -> float | None:
        """How many times faster the winner is than the heuristic config."""
        best = self.seconds(self.best)
        heuristic = None if self.heuristic is None else self.seconds(self.heuristic)
        return heuristic / best if best and heuristic else None

    @property
    def gain(self) -> Gain | None:
        """The same with its confidence interval, as the race decided by it; None if it did not."""
        return next((trial.speedup for trial in self.trials if trial.cfg == self.best), None)

    def count(self, verdict: Verdict) -> int:
        """How many candidates met this fate."""
        return sum(trial.verdict is verdict for trial in self.trials)

    def summary(self) -> str:
        """One line: how many were measured, how fast the winner is."""
        measured = self.count(Verdict.MEASURED)
        text = f"measured {measured} of {len(self.trials)} candidates ({self.measured})"
        best = self.seconds(self.best)
        if best is not None:
            text += f", {duration(best)} per call"
        if self.heuristic is not None and self.best == self.heuristic:
            text += ", the heuristic config stays"
        elif self.speedup is not None:
            text += f", speedup {times(self.speedup)} over the heuristic config"
            if self.gain is not None and self.gain.high > self.gain.low:
                text += f" ({interval(self.gain)})"
        if self.plain is not None and (factor := self.plain.faster(best)) != "–":
            text += f", speedup {factor} over plain JAX"
        if self.incomplete:
            text += f"; incomplete: {self.incomplete}"
        return "; ".join((text, *self.notes))

    def about(self) -> dict[str, Any]:
        """What is stored with the config in a store, as plain data."""
        return {
            "measured": self.measured,
            "clock": self.clock,
            "seconds": self.seconds(self.best),
            "heuristic_seconds": None if self.heuristic is None else self.seconds(self.heuristic),
            "speedup": None if self.gain is None else self.gain.to_plain(),
            "plain": None if self.plain is None else self.plain.to_plain(),
            "notes": list(self.notes),
            "sure": self.sure,
            "incomplete": self.incomplete,
            "took": self.took,
            "work": None if self.work is None else dict(self.work),
            "heuristic": None if self.heuristic is None else to_plain(self.heuristic),
            "trials": [trial.to_plain() for trial in self.trials],
        }

    def explain(self) -> Explanation:
        """Every candidate with its time or its reason, the fastest first."""
        table = _table(self)
        return Explanation(as_text(table), table)

    def _shown(self) -> Shown:
        return _table(self, self.summary())

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.explain()}"


def _table(outcome: Outcome[Any], title: str = "") -> Shown:
    """Every candidate of a tuning run with its time or its reason, the fastest first."""
    heuristic = None if outcome.heuristic is None else outcome.seconds(outcome.heuristic)

    def row(trial: Trial[Any]) -> tuple[str, ...]:
        is_best, is_heuristic = trial.cfg == outcome.best, trial.cfg == outcome.heuristic
        marks = ["best"] * is_best + ["heuristic"] * is_heuristic
        if trial.reason and trial.verdict is Verdict.MEASURED:
            marks.append(trial.reason)
        if trial.seconds is None:
            return (described(trial.cfg), trial.verdict.value, "", "", "", trial.reason)
        ratio = heuristic / trial.seconds if heuristic else None
        gain = Gain(1.0, 1.0, 1.0) if is_heuristic else trial.speedup
        speedup = against_heuristic(gain, ratio, chosen=is_best)
        taken = f"{len(trial.samples)} samples"
        return (
            described(trial.cfg),
            duration(trial.seconds),
            *speedup,
            taken,
            ", ".join(marks),
        )

    ranked = sorted(outcome.trials, key=lambda trial: trial.seconds or float("inf"))
    header = ("config", "time", "speedup", "interval", "", "")
    best, plain = outcome.seconds(outcome.best), outcome.plain
    notes = [] if plain is None else [plain.sentence(best, duration)]
    return Shown(title, header, [row(trial) for trial in ranked], right=(1, 2), notes=notes)


def known_trials(
    candidates: Iterable[Any], stored: Iterable[Mapping[str, Any]]
) -> dict[str, Trial[Any]]:
    """Stored trials of these candidates, by the candidate's `stable_json`.

    A trial that says nothing final (not tried, or a damaged record) is left out.
    """
    stored = list(stored)
    if not stored:
        return {}
    by_plain = {stable_json(to_plain(cfg)): cfg for cfg in candidates}
    found: dict[str, Trial[Any]] = {}
    for record in stored:
        cfg = by_plain.get(stable_json(record.get("config")))
        if cfg is None:
            continue
        try:
            verdict = Verdict(record["verdict"])
            seconds, samples_ns = record.get("seconds"), record.get("samples_ns", ())
            if not all(_is_time(ns) for ns in samples_ns) or not (
                seconds is None or _is_time(seconds * 1e9)
            ):
                continue
            samples = tuple(int(ns) * 1e-9 for ns in samples_ns)
            reason = printable(str(record.get("reason", "")), keep="\n")
            order = record.get("order")
            order = order if type(order) is int else None
            speedup = Gain.from_plain(record.get("speedup"))
            trial = Trial(cfg, verdict, seconds, samples, reason, order, speedup)
        except (KeyError, ValueError, TypeError, OverflowError):
            continue  # measured again instead
        if verdict is Verdict.NOT_TRIED or (verdict is Verdict.MEASURED and not seconds):
            continue
        found[stable_json(cfg)] = trial
    return found


def _is_time(nanoseconds: Any) -> bool:
    """True if a clock can have said so: a store may hold any number, and a race takes logarithms.

    >>> _is_time(1200), _is_time(0), _is_time(-5), _is_time(float("inf")), _is_time(True)
    (True, False, False, False, False)
    """
    return type(nanoseconds) in (int, float) and 1 <= nanoseconds < 1e21
