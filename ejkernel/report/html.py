"""A run as one HTML page that needs nothing else: no network, no other file, not even scripts.

Scripts add tabs, tooltips and the choice of theme. The page's own policy lets no other script run
and nothing be loaded, so that a text that slipped through unescaped could not do anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from ..formatting import counted, described, duration, shortened, times
from ..markup import Markup, joined, tag
from .formatting import REJECTED, Finding, headline, how_sure, interval, time_spent
from .operations import operation_card
from .plots import axis_line, before_after_rows, gain_axis, gain_row, gain_ticks
from .record import BeforeAfter, Gain, Operation, Run
from .space import dimensions
from .widgets import card, chip, factor, facts, notes

OPEN_AT_FIRST = 2  # operations whose candidates are shown without a click

# Of the overview, with the class of their cells.
COLUMNS = (
    ("operation", None),
    ("before", "number"),
    ("after", "number"),
    ("speedup", "number"),
    ("how sure", None),
    ("config", "config"),
)


def page(run: Run) -> str:
    """The whole document."""
    style, script = _file("page.css"), _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="ejkernel"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Tuning report: {run.title}"),
        tag("style", Markup(style)),
    )
    panels = [
        ("summary", "Summary", _summary(run)),
        ("operations", "Operations", _operations(run)),
        ("sure", "How sure", _certainty(run)),
        ("environment", "Environment", _environment(run)),
    ]
    tabs = [
        tag(
            "button",
            title,
            type="button",
            role="tab",
            id=f"tab-{name}",
            aria_controls=name,
            aria_selected="true" if i == 0 else "false",
            tabindex="0" if i == 0 else "-1",
        )
        for i, (name, title, _) in enumerate(panels)
    ]
    version = run.environment.get("ejkernel", "")
    body = tag(
        "body",
        _head_of_page(run),
        tag("nav", tag("div", *tabs, role="tablist", aria_label="Parts of the report")),
        tag(
            "main",
            *(
                tag("section", content, id=name, role="tabpanel", aria_labelledby=f"tab-{name}")
                for name, _, content in panels
            ),
        ),
        tag("footer", " ".join(["Made by ejkernel", version, "·", run.created])),
        tag("div", id="tip", role="tooltip", hidden=True),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _head_of_page(run: Run) -> Markup:
    return tag(
        "header",
        tag(
            "div",
            tag("p", "ejkernel · tuning report", class_="brand"),
            tag("h1", run.title),
            tag("p", tag("code", run.device), " · ", run.created[:10], class_="soft"),
        ),
        tag(
            "button",
            "◐",
            type="button",
            id="theme",
            aria_label="Change between light and dark",
            title="Light or dark",
        ),
    )


# --- summary -------------------------------------------------------------------------------------


def _summary(run: Run) -> Markup:
    """What a manager wants to know, and each operation in a line."""
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


# --- operations ----------------------------------------------------------------------------------


def _operations(run: Run) -> Markup:
    if not run.operations:
        return card(None, tag("p", "No operation was tuned."))
    return joined(
        operation_card(operation, f"operation-{i + 1}", i < OPEN_AT_FIRST)
        for i, operation in enumerate(run.operations)
    )


# --- how sure ------------------------------------------------------------------------------------


def _certainty(run: Run) -> Markup:
    """How sure it is, and why."""
    shown: list[tuple[str, Gain | None, Finding]] = []
    if run.model is not None and run.model.gain.high > 0:
        shown.append((run.model.what, run.model.gain, headline(run).finding))
    shown += [(o.name, o.gain, how_sure(o)) for o in run.operations]
    axis = gain_axis([gain for _, gain, _ in shown if gain is not None])
    rows = [
        gain_row(name, gain, axis, chip(finding), _gain_tip(name, gain, finding), i == 0)
        for i, (name, gain, finding) in enumerate(shown)
    ]
    marks = [(tick, "as before" if tick == 1 else times(tick)) for tick in gain_ticks(axis)]
    plot = tag(
        "div",
        axis_line(axis, marks, "times faster"),
        tag(
            "ul",
            *rows,
            class_="rows",
            aria_label="How many times faster, with confidence intervals",
        ),
        class_="plot wide",
    )
    sentences = tag(
        "dl",
        *(
            joined([tag("dt", o.name, " ", chip(how_sure(o))), tag("dd", _why_sure(o))])
            for o in run.operations
        ),
    )
    return joined(
        [
            card("The speedup, and its confidence interval", plot),
            card("Is the chosen config the best one?", sentences),
            card("How it was measured", notes(_method(run))),
        ]
    )


def _gain_tip(name: str, gain: Gain | None, finding: Finding) -> str:
    if gain is None:
        return f"{name}: {finding.sentence}"
    if gain.high <= gain.low:
        return f"{name}: the heuristic config was chosen\n{finding.sentence}"
    return f"{name}: {times(gain.times)}, between {interval(gain, 'and')}\n{finding.sentence}"


def _why_sure(operation: Operation) -> str:
    words = how_sure(operation).sentence
    lead = operation.lead
    if lead is not None and lead.times >= 1:
        words += f" The best other candidate takes {times(lead.times)} its time ({interval(lead)})."
    if operation.measured:
        clock = "the device’s own" if operation.clock == "device" else "wall"
        words += f" Timed: {operation.measured}, {clock} clock."
    if operation.notes:
        words += f" {'; '.join(operation.notes)}."
    return words


def _method(run: Run) -> list[str]:
    method = [
        "Every config was compiled, run, and its output compared with the reference before its "
        "time counted; one that is wrong, fails or is non-deterministic is never chosen.",
        "The rest ran interleaved, in a changing order, so that a slow moment of the machine hits "
        "all of them alike. A time is the mean of the fastest two thirds of the samples.",
        "“Before” is the heuristic config, the one used without tuning. It ran in the same race to "
        "its end, and is replaced only by one that is faster by more than the noise.",
        "The confidence interval holds the ratio of times within rounds with 98 % certainty, "
        "whatever the noise is like; of fewer than seven rounds it is all that was seen.",
    ]
    if run.model is not None:
        method.append(
            "The whole model ran with the heuristic configs and with the tuned ones, "
            f"interleaved, {len(run.model.before)} times each, on the wall clock."
        )
    return method


# --- environment ---------------------------------------------------------------------------------


def _environment(run: Run) -> Markup:
    known = {"created": run.created, "command": run.command, "store": run.store, **run.environment}
    origins = [
        (joined([o.name, tag("small", o.call_key)]), _origin(o, run)) for o in run.operations
    ]
    return joined(
        [
            card(
                "Where it was done", facts((name, value) for name, value in known.items() if value)
            ),
            card("Where each result comes from", facts(origins)) if origins else None,
        ]
    )


def _origin(operation: Operation, run: Run) -> str:
    words = operation.origin or "in the store"
    if operation.when and operation.when not in words:
        words += f"; stored on {operation.when} by {operation.where or 'an unknown host'}"
    other = ", ".join(
        f"{name} {value}"
        for name, value in operation.versions.items()
        if value and run.environment.get(name) not in (None, value)
    )
    return f"{words}; measured with {other}" if other else words
