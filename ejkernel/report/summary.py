"""The first part of the page: what a manager wants to know, and each operation in a line."""

from __future__ import annotations

from ..markup import Markup, joined, tag
from .formatting import (
    REJECTED,
    counted,
    duration,
    headline,
    how_sure,
    shortened,
    time_spent,
    times,
)
from .plots import before_after_rows
from .record import Operation, Run
from .space import described, dimensions
from .widgets import chip, notes


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
    plot = before_after_rows(run.model) if run.model is not None else None
    remarks = notes(run.notes)
    return joined(
        [
            tag("div", hero, plot, _model_remarks(run), class_="card"),
            tag("div", *_tiles(run), class_="tiles"),
            _overview(run),
            _not_tuned(run),
            tag("div", remarks, class_="card") if remarks else None,
        ]
    )


def _model_remarks(run: Run) -> Markup | None:
    if run.model is None:
        return None
    remarks = list(run.model.notes)
    if run.model.difference is not None:
        remarks.insert(
            0,
            "The outputs before and after agree: their largest difference is "
            f"{run.model.difference:.1e} of their size."
            if run.model.difference < 1e-2
            else "The outputs before and after differ by up to "
            f"{run.model.difference:.1e} of their size: look into it.",
        )
    return notes(remarks)


def _tiles(run: Run) -> list[Markup]:
    measured = sum(len(o.with_verdict("measured")) for o in run.operations)
    rejected = sum(len(o.with_verdict(*REJECTED)) for o in run.operations)
    changed = sum(not o.kept for o in run.operations)
    count = len(run.operations)
    spent, earlier = time_spent(run)
    origin = (
        "in an earlier run; this one found all in the store"
        if earlier
        else "compiling, checking and measuring"
    )
    other = f"{changed} with another config than the heuristic one"
    return [
        _tile(str(count), "operation tuned" if count == 1 else "operations tuned", other),
        _tile(str(measured), "configs measured", "each compared with the reference first"),
        _tile(str(rejected), "configs rejected", "wrong, failing or not supported"),
        _tile(duration(spent), "spent on tuning", origin),
    ]


def _tile(figure: str, name: str, more: str) -> Markup:
    return tag("div", tag("b", figure), tag("span", name), tag("small", more), class_="tile")


def _overview(run: Run) -> Markup | None:
    if not run.operations:
        return None
    total = sum(o.heuristic_seconds or 0.0 for o in run.operations)
    rows = [_overview_row(i, o, total) for i, o in enumerate(run.operations)]
    head = tag(
        "tr",
        *(
            tag("th", name, scope="col", class_="number" if number else None)
            for name, number in (
                ("operation", False),
                ("before", True),
                ("after", True),
                ("gain", True),
                ("how sure", False),
                ("config", False),
            )
        ),
    )
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="overview")
    return tag("div", tag("h2", "Operation by operation"), table, class_="card")


def _overview_row(index: int, operation: Operation, total: float) -> Markup:
    share = (operation.heuristic_seconds or 0.0) / total if total else 0.0
    gain = operation.gain
    faster = gain is not None and gain.low > 1
    return tag(
        "tr",
        tag(
            "th",
            tag("a", operation.name, href=f"#operation-{index + 1}"),
            tag("small", shortened(operation.signature)),
            scope="row",
        ),
        tag(
            "td",
            duration(operation.heuristic_seconds),
            tag("span", class_="bar", style=f"--share:{100 * share:.0f}%", aria_hidden="true"),
            class_="number",
            data_label="before",
        ),
        tag("td", duration(operation.seconds), class_="number", data_label="after"),
        tag(
            "td",
            tag("b", "–" if gain is None else times(gain.times), class_="up" if faster else None),
            class_="number",
            data_label="gain",
        ),
        tag("td", chip(how_sure(operation)), data_label="how sure"),
        tag("td", tag("code", _config(operation)), data_label="config", class_="config"),
    )


def _config(operation: Operation) -> str:
    return described(operation.config, dimensions(operation) or None)


def _not_tuned(run: Run) -> Markup | None:
    if not run.not_tuned:
        return None
    items = [tag("li", tag("code", item.label), ": ", item.reason) for item in run.not_tuned]
    title = tag("h2", f"Not tuned: {counted(len(items), 'operation')}")
    return tag("div", title, tag("ul", *items, class_="notes"), class_="card")
