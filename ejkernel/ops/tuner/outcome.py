"""What a tuning run found: every candidate with its time, or with why it has none."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Generic

from ..core.types import Cfg
from ..utils.serialize import to_plain


class TuningFailed(RuntimeError):
    """No candidate could be used; the message lists each with its reason."""


class Verdict(enum.Enum):
    """What became of a candidate."""

    MEASURED = "measured"
    WRONG = "wrong"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Trial(Generic[Cfg]):
    """One candidate: its verdict, its time per call and the samples behind it, or the reason."""

    cfg: Cfg
    verdict: Verdict
    seconds: float | None = None
    samples: tuple[float, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[Cfg]):
    """The winner of a tuning run and all that is known about how it won."""

    best: Cfg
    trials: tuple[Trial[Cfg], ...] = ()
    heuristic: Cfg | None = None
    measured: str = "forward"
    notes: tuple[str, ...] = ()

    def seconds(self, cfg: Any) -> float | None:
        """The measured time per call of a config."""
        return next((trial.seconds for trial in self.trials if trial.cfg == cfg), None)

    @property
    def speedup(self) -> float | None:
        """How many times faster the winner is than the heuristic config."""
        best = self.seconds(self.best)
        heuristic = None if self.heuristic is None else self.seconds(self.heuristic)
        return heuristic / best if best and heuristic else None

    def summary(self) -> str:
        """One line: how many were measured, how fast the winner is."""
        measured = sum(trial.verdict is Verdict.MEASURED for trial in self.trials)
        text = f"measured {measured} of {len(self.trials)} candidates ({self.measured})"
        best = self.seconds(self.best)
        if best is not None:
            text += f", {best * 1e3:.4g} ms per call"
        if self.speedup is not None:
            text += f", {self.speedup:.2f}x the heuristic's speed"
        return "; ".join((text, *self.notes))

    def about(self) -> dict[str, Any]:
        """What is kept beside the config in a store, as plain data."""
        return {
            "measured": self.measured,
            "seconds": self.seconds(self.best),
            "heuristic_seconds": None if self.heuristic is None else self.seconds(self.heuristic),
            "notes": list(self.notes),
            "trials": [
                {
                    "config": to_plain(trial.cfg),
                    "verdict": trial.verdict.value,
                    "seconds": trial.seconds,
                    "reason": trial.reason,
                }
                for trial in self.trials
            ],
        }
