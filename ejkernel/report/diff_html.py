"""Two runs compared, as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from ..formatting import described, duration, flat, times
from ..markup import Markup, joined, tag
from .diff import Diff, Pair
from .document import document
from .formatting import rate
from .plots import axis_line, gain_axis, gain_row, gain_ticks
from .record import Operation, Run
from .widgets import card, chip, factor, hero, notes

COLUMNS = (
    ("operation", None),
    ("A", "number"),
    ("B", "number"),
    ("speedup of B", "number"),
    ("difference", None),
)


def page(diff: Diff) -> str:
    """The whole document."""
    panels = [
        ("summary", "Summary", _summary(diff)),
        ("operations", "Operations", _operations(diff)),
        ("environment", "Environment", _environment(diff)),
    ]
    header = [
        tag("p", "ejkernel · two tuning runs compared", class_="brand"),
        tag("h1", diff.title),
        *(_run(name, run) for name, run in (("A", diff.a), ("B", diff.b))),
    ]
    return document(f"Two runs compared: {diff.title}", header, panels, "Made by ejkernel")


def _run(name: str, run: Run) -> Markup:
    made = f" · {run.created[:16].replace('T', ' ')}"
    return tag("p", tag("b", name), " ", tag("code", run.device), made, class_="soft")


def _summary(diff: Diff) -> Markup:
    return joined(
        [
            card(None, hero(diff.headline()), notes(diff.remarks())),
            _gains(diff),
            _changed(diff),
            _alone(diff),
        ]
    )


def _gains(diff: Diff) -> Markup | None:
    shown = [pair for pair in diff.pairs if pair.in_both]
    if not shown:
        return None
    axis = gain_axis([pair.gain for pair in shown if pair.gain is not None])
    rows = [
        gain_row(
            pair.shown.name,
            pair.gain,
            axis,
            joined([chip(pair.finding), tag("small", pair.call)]),
            f"{pair.shown.name}\n{pair.call}\n{pair.finding.sentence}",
            i == 0,
        )
        for i, pair in enumerate(shown)
    ]
    marks = [(tick, "as in A" if tick == 1 else times(tick)) for tick in gain_ticks(axis)]
    label = "Speedup of B over A, with confidence intervals"
    plot = tag(
        "div",
        axis_line(axis, marks, "times faster"),
        tag("ul", *rows, class_="rows", aria_label=label),
        class_="plot wide",
    )
    return card(label, plot)


def _changed(diff: Diff) -> Markup:
    changed = [pair for pair in diff.pairs if pair.config_changed]
    if not changed:
        return card("Configs that changed", tag("p", "None of those that both runs have."))
    rows = [_changed_row(pair) for pair in changed]
    return card("Configs that changed", tag("dl", *rows))


def _changed_row(pair: Pair) -> Markup:
    assert pair.a is not None
    assert pair.b is not None
    a, b = flat(pair.a.config), flat(pair.b.config)
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]
    changes = [
        tag("li", tag("code", name), " ", _value(a.get(name)), " → ", _value(b.get(name)))
        for name in names
    ]
    call = tag("small", pair.call)
    listed = tag("ul", *changes, class_="notes")
    return joined([tag("dt", pair.shown.name, call), tag("dd", listed)])


def _value(value: object) -> Markup:
    return tag("code", "–" if value is None else value)


def _alone(diff: Diff) -> Markup | None:
    lists = []
    for name, pairs in (
        ("A", [pair for pair in diff.pairs if pair.b is None]),
        ("B", [pair for pair in diff.pairs if pair.a is None]),
    ):
        items = [joined([tag("b", pair.shown.name), " ", tag("code", pair.call)]) for pair in pairs]
        if items:
            lists.append(card(f"Only in {name}", notes(items)))
    return joined(lists) if lists else None


# --- operations ----------------------------------------------------------------------------------


def _operations(diff: Diff) -> Markup:
    if not diff.pairs:
        return card(None, tag("p", "Neither run has tuned an operation."))
    head = tag("tr", *(tag("th", name, scope="col", class_=kind) for name, kind in COLUMNS))
    rows = [_row(pair) for pair in diff.pairs]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="overview")
    return card("Operation by operation", table)


def _row(pair: Pair) -> Markup:
    cells: Sequence[Markup] = (
        _side(pair.a),
        _side(pair.b),
        factor(pair.gain) if pair.in_both else tag("span", "–"),
        chip(pair.finding),
    )
    name = tag("th", pair.shown.name, tag("small", pair.call), scope="row")
    sides = [("A", pair.a), ("B", pair.b)]
    if pair.in_both and not pair.config_changed:
        sides = [("A and B", pair.b)]
    configs = [
        tag("small", tag("b", side), " ", tag("code", described(operation.config)))
        for side, operation in sides
        if operation is not None
    ]
    return joined(
        [
            tag(
                "tr",
                name,
                *(
                    tag("td", cell, class_=kind, data_label=label)
                    for cell, (label, kind) in zip(cells, COLUMNS[1:], strict=True)
                ),
            ),
            tag("tr", tag("td", *configs, colspan=len(COLUMNS)), class_="below"),
        ]
    )


def _side(operation: Operation | None) -> Markup:
    if operation is None:
        return tag("span", "–")
    figures = rate(operation.work, operation.seconds).partition(", ")[0]
    return joined([duration(operation.seconds), tag("small", figures) if figures else None])


# --- environment ---------------------------------------------------------------------------------


def _environment(diff: Diff) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in ("", "A", "B")))
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", a or "–", data_label="A"),
            tag("td", b or "–", data_label="B"),
            class_=None if a == b or name == "created" else "differs",
        )
        for name, a, b in diff.facts()
    ]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="facts both")
    return card("Machines, versions and commits: what differs is marked", table)
