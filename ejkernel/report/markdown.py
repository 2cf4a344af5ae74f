"""A run as Markdown: for a pull request, a chat, a log."""

from __future__ import annotations

from collections.abc import Sequence

from ..formatting import counted, described, duration, shortened, times
from ..markup import escaped_markdown as escaped
from ..markup import markdown_table as table
from .formatting import (
    REJECTED,
    headline,
    how_sure,
    interval,
    peaks,
    rate,
    share_of_peak,
    time_spent,
)
from .record import BeforeAfter, Candidate, Operation, Roofline, Run
from .search import in_words
from .space import dimensions, importances
from .summary import part_of_the_step, verdict

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
    if said := verdict(run):
        lines += [f"{escaped(run.title)}: {escaped(said)}", ""]
    for compared in (run.plain, run.model):
        lines += [] if compared is None else _model(compared)
    if run.operations:
        lines += ["## Operations", "", *_overview(run.operations, run.roofline), ""]
    for operation in run.operations:
        lines += _operation(operation)
    if run.not_tuned:
        lines += ["## Not tuned", ""]
        lines += [f"- {escaped(item.label)}: {escaped(item.reason)}" for item in run.not_tuned]
        lines += [""]
    lines += ["## Environment", ""]
    facts = {"created": run.created, "store": run.store, "command": run.command, **run.environment}
    if run.roofline is not None:
        facts["peak of the machine"] = peaks(run.roofline)
    lines += table(
        ("", ""), [(escaped(name), escaped(value)) for name, value in facts.items() if value]
    )
    lines += ["", *(f"- {escaped(note)}" for note in run.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _model(model: BeforeAfter) -> list[str]:
    rows = [
        (name, *(duration(figure(samples)) for figure in (min, max)))
        for name, samples in ((model.baseline, model.before), ("tuned", model.after))
    ]
    lines = [f"## The whole model and {escaped(model.baseline)}", "", escaped(model.what), ""]
    lines += table(("", "fastest", "slowest"), rows, right=(1, 2))
    known = f", between {interval(model.gain, 'and')}" if model.gain.high > 0 else ""
    lines += ["", f"Speedup {times(model.gain.times)}{known}, within rounds."]
    if model.difference is not None:
        lines += ["", f"Largest difference of the outputs: {model.difference:.1e} of their size."]
    return [*lines, *(f"\n{escaped(note)}" for note in model.notes), ""]


def _overview(operations: Sequence[Operation], roofline: Roofline | None) -> list[str]:
    rates = [_rate(operation, roofline) for operation in operations]
    counts = any(rates)
    rows = [
        (
            escaped(operation.op_id),
            escaped(shortened(operation.signature) or operation.call_key),
            duration(None if (plain := operation.plain) is None else plain.seconds),
            duration(operation.heuristic_seconds),
            duration(operation.seconds),
            *([figures or "–"] if counts else []),
            "–" if plain is None else plain.faster(operation.seconds),
            times(gain.times) if (gain := operation.gain) else "–",
            interval(gain) if gain and not operation.heuristic_stays else "–",
            how_sure(operation).word,
            escaped(described(operation.config)),
        )
        for operation, figures in zip(operations, rates, strict=True)
    ]
    header = [
        *("operation", "call", "plain JAX", "default config", "tuned"),
        *("over plain", "over default", "between", "how sure", "config"),
    ]
    if counts:
        header.insert(5, "rate")
    return table(header, rows, right=(2, 3, 4, 5, 6))


def _rate(operation: Operation, roofline: Roofline | None) -> str:
    """The work of the chosen config per second, and its share of the machine's peak."""
    figures = rate(operation.work, operation.seconds)
    share = share_of_peak(roofline, operation.work, operation.seconds, short=True)
    return f"{figures} ({share})" if share else figures


def _operation(operation: Operation) -> list[str]:
    if not operation.candidates:
        return []
    names = dimensions(operation)
    measured = operation.with_verdict("measured")
    rejected = operation.with_verdict(*REJECTED)
    lines = [f"### {escaped(operation.op_id)}({escaped(shortened(operation.signature))})", ""]
    lines += [escaped(" ".join([how_sure(operation).sentence, in_words(operation)])), ""]
    if words := part_of_the_step(operation):
        lines += [f"In a run of the whole function: {escaped(words)}.", ""]
    if mattered := [(name, share) for name, share in importances(operation) or () if share > 0.005]:
        said = ", ".join(f"{escaped(name)} {100 * share:.0f} %" for name, share in mattered)
        lines += [f"Share of the differences in time that each parameter explains: {said}.", ""]
    if operation.plain is not None:
        words = operation.plain.sentence(operation.seconds, duration)
        lines += [escaped(f"{words[:1].upper()}{words[1:]}."), ""]
    rows = [_row(operation, candidate, names) for candidate in measured[:SHOWN]]
    header = ("config", "time", "speedup", "interval", "samples", "")
    lines += table(header, rows, right=(1, 2, 3, 4))
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
        *operation.against_heuristic(candidate),
        f"{duration(min(samples))} to {duration(max(samples))}" if samples else "–",
        ", ".join(mark for mark, config in marks if candidate.config == config),
    )
