"""The first part of the page: what a manager wants to know, and each operation in a line."""

from __future__ import annotations

from collections.abc import Sequence

from ..markup import Markup, joined, tag
from .formatting import (
    REJECTED,
    counted,
    described,
    duration,
    headline,
    how_sure,
    shortened,
    time_spent,
)
from .plots import before_after_rows
from .record import BeforeAfter, Operation, Run
from .space import dimensions
from .widgets import card, chip, factor, notes

# Of the overview, with the class of their cells.
COLUMNS = (
    ("operation", None),
    ("before", "number"),
    ("after", "number"),
    ("speedup", "number"),
    ("how sure", None),
    ("config", "config"),
)


def summary(run: Run) -> Markup:
    """The part as a whole."""
    top = headline(run)
    hero = tag(
        "div",
        tag("p", top.figure, class_=f"figure {top.finding.level}", aria_hidden="true"),
        tag(
            "div",
            tag("h2", top.title),
            tag("p", top.sentence),
            tag("p", chip(top.finding), " ", top.finding.sentence, class_="soft"),
        ),
        class_="hero",
    )
    return joined(
        [
            card(None, hero, *_model(run.model)),
            tag("div", *_tiles(run), class_="tiles"),
            _overview(run.operations),
            _not_tuned(run),
            card(None, notes(run.notes)) if run.notes else None,
        ]
    )


def _model(model: BeforeAfter | None) -> list[Markup | None]:
    if model is None:
        return []
    remarks = list(model.notes)
    if model.difference is not None:
        size = f"{model.difference:.1e} of their size"
        remarks.insert(
            0,
            f"The outputs before and after agree: their largest difference is {size}."
            if model.difference < 1e-2
            else f"The outputs before and after differ by up to {size}: look into it.",
        )
    return [before_after_rows(model), notes(remarks)]


def _tiles(run: Run) -> list[Markup]:
    measured = sum(len(o.with_verdict("measured")) for o in run.operations)
    rejected = sum(len(o.with_verdict(*REJECTED)) for o in run.operations)
    changed = sum(not o.heuristic_stays for o in run.operations)
    count = len(run.operations)
    spent, earlier = time_spent(run)
    origin = (
        "in an earlier run; this one read it all from the store"
        if earlier
        else "compiling, checking and measuring"
    )
    other = f"{changed} with another config than the heuristic one"
    tiles = (
        (count, "operation tuned" if count == 1 else "operations tuned", other),
        (measured, "configs measured", "each compared with the reference first"),
        (rejected, "configs rejected", "wrong, failing or not supported"),
        (duration(spent), "spent on tuning", origin),
    )
    return [
        tag("div", tag("b", figure), tag("span", name), tag("small", more), class_="tile")
        for figure, name, more in tiles
    ]


def _overview(operations: Sequence[Operation]) -> Markup | None:
    if not operations:
        return None
    total = sum(o.heuristic_seconds or 0.0 for o in operations)
    rows = [_overview_row(i, o, total) for i, o in enumerate(operations)]
    head = tag("tr", *(tag("th", name, scope="col", class_=kind) for name, kind in COLUMNS))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="overview")
    return card("Operation by operation", table)


def _overview_row(index: int, operation: Operation, total: float) -> Markup:
    share = (operation.heuristic_seconds or 0.0) / total if total else 0.0
    bar = tag("span", class_="bar", style=f"--share:{100 * share:.0f}%", aria_hidden="true")
    name = tag("a", operation.name, href=f"#operation-{index + 1}")
    config = described(operation.config, dimensions(operation) or None)
    cells = (
        joined([duration(operation.heuristic_seconds), bar]),
        duration(operation.seconds),
        factor(operation.gain),
        chip(how_sure(operation)),
        tag("code", config),
    )
    return tag(
        "tr",
        tag("th", name, tag("small", shortened(operation.signature)), scope="row"),
        *(
            tag("td", cell, class_=kind, data_label=label)
            for cell, (label, kind) in zip(cells, COLUMNS[1:], strict=True)
        ),
    )


def _not_tuned(run: Run) -> Markup | None:
    if not run.not_tuned:
        return None
    items = [joined([tag("code", item.label), ": ", item.reason]) for item in run.not_tuned]
    return card(f"Not tuned: {counted(len(items), 'operation')}", notes(items))
