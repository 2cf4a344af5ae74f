"""Tables for people: plain text, aligned, the same in a terminal and in a log file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def result_table(result: AutotuningResult) -> str:
    """An `AutotuningResult` as a table, one operation per row."""
    rows = [_row(entry) for entry in result.entries]
    header = ("operation", "call", "heuristic", "tuned", "ratio", "config")
    text = f"tuned for {result.device}\n" + text_table(header, rows, right=(2, 3, 4))
    for skipped in result.skipped:
        text += f"\nnot tuned: {skipped.label}: {skipped.reason}"
    return text


def _row(entry: Entry) -> tuple[str, ...]:
    outcome = entry.outcome
    heuristic = tuned = None
    if outcome is not None:
        tuned = outcome.seconds(outcome.best)
        heuristic = None if outcome.heuristic is None else outcome.seconds(outcome.heuristic)
    ratio = f"{tuned / heuristic:.2f}" if tuned and heuristic else "-"
    return (
        entry.op_id,
        entry.signature or entry.call_key,
        milliseconds(heuristic),
        milliseconds(tuned),
        ratio,
        str(entry.cfg),
    )


def milliseconds(seconds: float | None) -> str:
    """`1.234 ms`, or a dash for nothing measured."""
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"
