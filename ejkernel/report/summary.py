"""A run in a terminal: a row for each operation, and a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

from ..formatting import counted, described, duration, shortened, speedup, times
from ..speedup import Gain
from .record import BeforeAfter, Operation, Run

Table = tuple[Sequence[str], list[tuple[str, ...]], Sequence[int], int]


def table(run: Run) -> Table:
    """The header, the rows, which columns are numbers, and how many are details at the end.

    What is known of no operation has no column: calls and shares need the function itself.
    """
    columns: dict[str, list[str]] = {
        "operation": [o.op_id for o in run.operations],
        "plain JAX": [duration(o.plain.seconds if o.plain else None) for o in run.operations],
        "default": [duration(o.heuristic_seconds) for o in run.operations],
        "tuned": [duration(o.seconds) for o in run.operations],
        "over plain": [o.plain.faster(o.seconds) if o.plain else "–" for o in run.operations],
        "over default": [speedup(o.heuristic_seconds, o.seconds) for o in run.operations],
    }
    details = {
        "config": [described(o.config) for o in run.operations],
        "call": [shortened(o.signature) or o.call_key for o in run.operations],
    }
    if any(o.calls is not None for o in run.operations):
        details["in the step"] = [part_of_the_step(o) for o in run.operations]
    if any(o.incomplete for o in run.operations):
        details[""] = ["interrupted" if o.incomplete else "" for o in run.operations]
    right = list(range(1, len(columns)))
    columns |= details
    return list(columns), list(zip(*columns.values(), strict=True)), right, len(details)


def sentences(run: Run) -> list[str]:
    """What the table does not say; the verdict about the whole function last."""
    lines = [f"not tuned: {item.label}: {item.reason}" for item in run.not_tuned]
    if any(o.most_gain for o in run.operations):
        lines.append(
            "of the step: tuned time × calls / time of a step; at most: what a step would gain if "
            "the operation took no time"
        )
    lines += run.notes
    if (last := verdict(run)) and (rounds := _rounds(run)):
        lines.append(f"{run.title}: {last} ({counted(rounds, 'round')} of each, interleaved)")
    return lines


def percent(share: float | None) -> str:
    """A share as `37 %`; more than everything is measurement, not truth.

    >>> percent(0.368), percent(1.2), percent(None)
    ('37 %', '100 %', '–')
    """
    return "–" if share is None else f"{min(1.0, share):.0%}".replace("%", " %")


def part_of_the_step(operation: Operation) -> str:
    """What an operation is in a run of the whole function: `4 calls, 37 % of the step, …`."""
    if operation.calls is None:
        return ""
    words = counted(operation.calls, "call")
    if operation.share is not None:
        words += f", {percent(operation.share)} of the step"
    if operation.most_gain is not None:
        words += f", {times(operation.most_gain)} to gain at most"
    return words


def verdict(run: Run) -> str:
    """What tuning was worth: `2.10× faster than plain JAX (1.90–2.40), 1.04× than default configs`.

    Nothing if the whole function was compared with nothing.
    """
    parts = [compared for compared in (run.plain, run.model) if compared is not None]
    said = [_versus(compared, first=i == 0) for i, compared in enumerate(parts)]
    if run.plain is not None and run.model is None:
        said.append("default configs were best already")
    return ", ".join(said)


def _versus(compared: BeforeAfter, *, first: bool) -> str:
    gain, other = compared.gain, compared.baseline
    if not gain.is_real:
        return f"as fast as {other}, as far as can be measured ({span(gain)})"
    if gain.times < 1:
        return f"slower than {other}: {times(gain.times)} ({span(gain)})"
    faster = " faster" if first else ""
    return f"{times(gain.times)}{faster} than {other} ({span(gain)})"


def span(gain: Gain) -> str:
    """The confidence interval of a speedup in a few characters.

    >>> span(Gain(2.1, 1.9, 2.44))
    '1.90–2.44'
    """
    return f"{times(gain.low)[:-1]}–{times(gain.high)[:-1]}"


def _rounds(run: Run) -> int:
    compared = run.plain or run.model
    return 0 if compared is None else len(compared.after)
