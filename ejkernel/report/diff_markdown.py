"""Two runs compared, as Markdown."""

from __future__ import annotations

from ..formatting import described, duration, times
from ..markup import escaped_markdown as escaped
from ..markup import markdown_table as table
from .diff import Diff, Pair
from .formatting import interval


def page(diff: Diff) -> str:
    """The whole page."""
    top = diff.headline()
    lines = [
        f"# Two runs compared: {escaped(diff.title)}",
        "",
        f"**{escaped(top.title)}.** {escaped(top.sentence)} {escaped(top.finding.sentence)}",
        "",
        *(f"- {escaped(remark)}" for remark in diff.remarks()),
        "",
    ]
    if both := [pair for pair in diff.pairs if pair.in_both]:
        header = ("operation", "call", "A", "B", "speedup of B", "between", "difference")
        lines += ["## Operations", ""]
        lines += [*table(header, [_row(pair) for pair in both], right=(2, 3, 4)), ""]
    if changed := [pair for pair in diff.pairs if pair.config_changed]:
        lines += ["## Configs that changed", ""]
        lines += [*table(("operation", "call", "A", "B"), [_configs(p) for p in changed]), ""]
    for name, alone in (
        ("A", [pair for pair in diff.pairs if pair.b is None]),
        ("B", [pair for pair in diff.pairs if pair.a is None]),
    ):
        if alone:
            lines += [f"## Only in {name}", ""]
            lines += [f"- {escaped(pair.shown.op_id)}: {escaped(pair.call)}" for pair in alone]
            lines += [""]
    lines += ["## Machines, versions and commits", ""]
    rows = [
        (escaped(name), escaped(a) or "–", escaped(b) or "–", "" if a == b else "differs")
        for name, a, b in diff.facts()
    ]
    lines += table(("", "A", "B", ""), rows)
    return "\n".join(lines).rstrip() + "\n"


def _row(pair: Pair) -> tuple[str, ...]:
    assert pair.a is not None
    assert pair.b is not None
    gain = pair.gain
    return (
        escaped(pair.shown.name),
        escaped(pair.call),
        duration(pair.a.seconds),
        duration(pair.b.seconds),
        "–" if gain is None else times(gain.times),
        "–" if gain is None or gain.high <= 0 else interval(gain),
        pair.finding.word,
    )


def _configs(pair: Pair) -> tuple[str, ...]:
    assert pair.a is not None
    assert pair.b is not None
    return (
        escaped(pair.shown.name),
        escaped(pair.call),
        escaped(described(pair.a.config)),
        escaped(described(pair.b.config)),
    )
