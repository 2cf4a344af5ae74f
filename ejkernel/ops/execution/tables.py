"""Tables for people: plain text, aligned, the same in a terminal and in a log file."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...markup import one_line
from ..utils.display import Shown

if TYPE_CHECKING:
    from ..config.outcome import Outcome, Trial
    from .results import AutotuningResult, Entry


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> str:
    """Columns as wide as their content; those numbered in `right` are aligned to the right."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def as_text(shown: Shown) -> str:
    """A table for a terminal or a log file."""
    rows = [[one_line(cell) for cell in row] for row in shown.rows]
    title = [one_line(shown.title)] if shown.title else []
    table = text_table(shown.header, rows, shown.right)
    return "\n".join([*title, table, *map(one_line, shown.notes)])


def result_table(result: AutotuningResult) -> Shown:
    """An `AutotuningResult` as a table, one operation per row."""
    return Shown(
        f"tuned for {result.device}",
        ("operation", "shapes", "heuristic", "tuned", "ratio", "config"),
        [_row(entry) for entry in result.entries],
        right=(2, 3, 4),
        notes=[f"not tuned: {skipped.label}: {skipped.reason}" for skipped in result.skipped],
    )


def outcome_table(outcome: Outcome[Any], title: str = "") -> Shown:
    """Every candidate of a tuning run with its time or its reason, the fastest first."""
    from ..config.outcome import Verdict

    fastest = outcome.seconds(outcome.best)

    def row(trial: Trial[Any]) -> tuple[str, ...]:
        marks = []
        if trial.cfg == outcome.best:
            marks.append("best")
        if trial.cfg == outcome.heuristic:
            marks.append("heuristic")
        if trial.reason and trial.verdict is Verdict.MEASURED:
            marks.append(trial.reason)
        if trial.seconds is None:
            return (brief(trial.cfg), trial.verdict.value, "", "", trial.reason)
        ratio = f"{trial.seconds / fastest:.3f}" if fastest else "-"
        taken = f"{len(trial.samples)} samples"
        return (brief(trial.cfg), milliseconds(trial.seconds), ratio, taken, ", ".join(marks))

    ranked = sorted(outcome.trials, key=lambda trial: trial.seconds or float("inf"))
    header = ("config", "time", "ratio", "", "")
    return Shown(title, header, [row(trial) for trial in ranked], right=(1, 2))


def _row(entry: Entry) -> tuple[str, ...]:
    heuristic, tuned = entry.heuristic_seconds, entry.seconds
    ratio = f"{tuned / heuristic:.2f}" if tuned and heuristic else "-"
    return (
        entry.op_id,
        _short(entry.signature) or entry.call_key,
        milliseconds(heuristic),
        milliseconds(tuned),
        ratio,
        brief(entry.cfg),
    )


def _short(signature: str) -> str:
    """A signature with repeated arguments counted: `3 × float32[1,1024,8,64], causal=True`."""
    parts = [(part, len(list(run))) for part, run in itertools.groupby(signature.split(", "))]
    return ", ".join(part if count == 1 else f"{count} × {part}" for part, count in parts)


def brief(cfg: Any) -> str:
    """A config without the fields that are None and without class names: `block=64`."""
    if not dataclasses.is_dataclass(cfg) or isinstance(cfg, type):
        return str(cfg)
    shown = []
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            shown.append(f"{field.name}({brief(value)})")
        elif value is not None:
            shown.append(f"{field.name}={value}")
    return " ".join(shown)


def milliseconds(seconds: float | None) -> str:
    """`1.234 ms`, or a dash for nothing measured."""
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"
