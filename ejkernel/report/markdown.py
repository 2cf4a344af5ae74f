"""A run as Markdown: for a pull request, a chat, a log."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..formatting import counted, described, duration, shortened, speedup, times
from ..markup import escaped_markdown as escaped
from ..markup import markdown_table as table
from .formatting import REJECTED, headline, how_sure, interval, time_spent
from .record import BeforeAfter, Candidate, Operation, Run
from .space import dimensions

SHOWN = 15  # candidates of one operation; the whole list is in the other formats


def page(run: Run) -> str:
    """The whole report."""
    top = headline(run)
    lines = [
        f"# Tuning report: {escaped(run.title)}",
        "",
        f"**{escaped(top.title)}.** {escaped(top.sentence)}",
        "",
        f"How sure: **{top.finding.word}**. {escaped(top.finding.sentence)}",
        "",
    ]
    spent, earlier = time_spent(run)
    took = "" if spent is None else f" Tuning took {duration(spent)}."
    if earlier:
        took += " Everything was measured in earlier runs and comes from the store."
    lines += [f"Device: {escaped(run.device)}.{took}", ""]
    if run.model is not None:
        lines += _model(run.model)
    if run.operations:
        lines += ["## Operations", "", *_overview(run.operations), ""]
    for operation in run.operations:
        lines += _operation(operation)
    if run.not_tuned:
        lines += ["## Not tuned", ""]
        lines += [f"- {escaped(item.label)}: {escaped(item.reason)}" for item in run.not_tuned]
        lines += [""]
    lines += ["## Environment", ""]
    facts = {"created": run.created, "store": run.store, "command": run.command, **run.environment}
    lines += table(
        ("", ""), [(escaped(name), escaped(value)) for name, value in facts.items() if value]
    )
    lines += ["", *(f"- {escaped(note)}" for note in run.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _model(model: BeforeAfter) -> list[str]:
    rows = [
        (name, *(duration(figure(samples)) for figure in (min, statistics.median_high, max)))
        for name, samples in (("before", model.before), ("after", model.after))
    ]
    lines = ["## The whole model", "", escaped(model.what), ""]
    lines += table(("", "fastest", "median", "slowest"), rows, right=(1, 2, 3))
    if model.difference is not None:
        lines += ["", f"Largest difference of the outputs: {model.difference:.1e} of their size."]
    return [*lines, *(f"\n{escaped(note)}" for note in model.notes), ""]


def _overview(operations: Sequence[Operation]) -> list[str]:
    rows = [
        (
            escaped(operation.op_id),
            escaped(shortened(operation.signature) or operation.call_key),
            duration(operation.heuristic_seconds),
            duration(operation.seconds),
            times(gain.times) if (gain := operation.gain) else "–",
            interval(gain) if gain and not operation.heuristic_stays else "–",
            how_sure(operation).word,
            escaped(described(operation.config)),
        )
        for operation in operations
    ]
    header = ("operation", "call", "before", "after", "speedup", "between", "how sure", "config")
    return table(header, rows, right=(2, 3, 4))


def _operation(operation: Operation) -> list[str]:
    if not operation.candidates:
        return []
    names = dimensions(operation)
    measured = operation.with_verdict("measured")
    rejected = operation.with_verdict(*REJECTED)
    lines = [f"### {escaped(operation.op_id)}({escaped(shortened(operation.signature))})", ""]
    lines += [escaped(how_sure(operation).sentence), ""]
    rows = [_row(operation, candidate, names) for candidate in measured[:SHOWN]]
    lines += table(("config", "time", "speedup", "fastest to slowest", ""), rows, right=(1, 2, 3))
    if len(measured) > SHOWN:
        lines += ["", f"… and {len(measured) - SHOWN} more that were measured."]
    if rejected:
        lines += ["", f"{counted(len(rejected), 'candidate')} rejected:", ""]
        lines += [
            f"- {escaped(described(c.config, names))}: "
            f"{escaped(c.verdict)}: {escaped(c.reason[:400])}"
            for c in rejected[:SHOWN]
        ]
    return [*lines, ""]


def _row(operation: Operation, candidate: Candidate, names: Sequence[str]) -> tuple[str, ...]:
    marks = (("chosen", operation.config), ("heuristic", operation.heuristic))
    samples = candidate.samples
    return (
        escaped(described(candidate.config, names)),
        duration(candidate.seconds),
        speedup(operation.heuristic_seconds, candidate.seconds),
        f"{duration(min(samples))} to {duration(max(samples))}" if samples else "–",
        ", ".join(mark for mark, config in marks if candidate.config == config),
    )
