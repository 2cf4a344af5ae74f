"""A run as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from ..formatting import counted, described, duration, shortened, times
from ..markup import Markup, joined, tag
from .document import document
from .formatting import (
    REJECTED,
    Finding,
    headline,
    how_sure,
    interval,
    peaks,
    rate,
    share_of_peak,
    time_spent,
)
from .operations import operation_card
from .plots import axis_line, before_after_rows, gain_axis, gain_row, gain_ticks
from .record import BeforeAfter, Gain, Operation, Roofline, Run
from .space import dimensions
from .summary import part_of_the_step, verdict
from .widgets import card, chip, factor, facts, hero, notes

OPEN_AT_FIRST = 2  # operations whose candidates are shown without a click

# Of the overview, with the class of their cells.
COLUMNS = (
    ("operation", None),
    ("plain JAX", "number"),
    ("default config", "number"),
    ("tuned", "number"),
    ("over plain", "number"),
    ("over default", "number"),
    ("how sure", None),
    ("config", "config"),
)


def page(run: Run) -> str:
    """The whole document."""
    panels = [
        ("summary", "Summary", _summary(run)),
        ("operations", "Operations", _operations(run)),
        ("sure", "How sure", _certainty(run)),
        ("environment", "Environment", _environment(run)),
    ]
    version = run.environment.get("ejkernel", "")
    return document(
        f"Tuning report: {run.title}",
        [
            tag("p", "ejkernel · tuning report", class_="brand"),
            tag("h1", run.title),
            tag("p", tag("code", run.device), " · ", run.created[:10], class_="soft"),
        ],
        panels,
        " ".join(["Made by ejkernel", version, "·", run.created]),
    )


# --- summary -------------------------------------------------------------------------------------


def _summary(run: Run) -> Markup:
    """What a manager wants to know, and each operation in a line."""
    return joined(
        [
            card(None, hero(headline(run)), _verdict(run), *_model(run.plain), *_model(run.model)),
            tag("div", *_tiles(run), class_="tiles"),
            _overview(run.operations, run.roofline),
            _not_tuned(run),
            card(None, notes(run.notes)) if run.notes else None,
        ]
    )


def _verdict(run: Run) -> Markup | None:
    """The whole function against everything it was compared with, as the terminal says it."""
    said = verdict(run)
    return tag("p", tag("b", f"{run.title}: {said}"), class_="verdict") if said else None


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


def _overview(operations: Sequence[Operation], roofline: Roofline | None) -> Markup | None:
    if not operations:
        return None
    total = sum(o.heuristic_seconds or 0.0 for o in operations)
    rows = [_overview_row(i, o, total, roofline) for i, o in enumerate(operations)]
    head = tag("tr", *(tag("th", name, scope="col", class_=kind) for name, kind in COLUMNS))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="overview")
    return card("Operation by operation", table)


def _overview_row(
    index: int, operation: Operation, total: float, roofline: Roofline | None
) -> Markup:
    share = (operation.heuristic_seconds or 0.0) / total if total else 0.0
    bar = tag("span", class_="bar", style=f"--share:{100 * share:.0f}%", aria_hidden="true")
    name = tag("a", operation.name, href=f"#operation-{index + 1}")
    in_the_step = [tag("small", words)] if (words := part_of_the_step(operation)) else []
    config = described(operation.config, dimensions(operation) or None)
    rates = (
        rate(operation.work, operation.seconds).partition(", ")[0],
        share_of_peak(roofline, operation.work, operation.seconds, short=True),
    )
    plain = operation.plain
    cells = (
        "–" if plain is None else tag("span", duration(plain.seconds), title=plain.reason or None),
        joined([duration(operation.heuristic_seconds), bar]),
        joined([duration(operation.seconds), *(tag("small", text) for text in rates if text)]),
        "–" if plain is None else tag("b", plain.faster(operation.seconds)),
        factor(operation.gain),
        chip(how_sure(operation)),
        tag("code", config),
    )
    return tag(
        "tr",
        tag("th", name, tag("small", shortened(operation.signature)), *in_the_step, scope="row"),
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
        operation_card(operation, f"operation-{i + 1}", i < OPEN_AT_FIRST, run.roofline)
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
        "The default config is the heuristic one, used without tuning. It ran in the same race to "
        "its end, and is replaced only by one that is faster by more than the noise.",
        "A speedup is old time / new time, within rounds. That of a candidate is the figure that "
        "decided in the race; its time is the default config’s divided by it. “Undecided” says "
        "that no difference lies within the interval.",
        "Plain JAX is the same call as users would write it, or the reference. It ran interleaved "
        "with the winner when that was decided, so it had no influence on the choice.",
        "The confidence interval holds the ratio of times within rounds with 98 % certainty, "
        "whatever the noise is like; of fewer than seven rounds it is all that was seen.",
    ]
    if run.model is not None:
        method.append(
            "The whole model ran with the heuristic configs and with the tuned ones, "
            f"interleaved, {len(run.model.before)} times each, on the wall clock."
        )
    if run.roofline is not None:
        method.append(
            "GFLOP/s and GB/s count what an operation’s definition needs once, whatever a config "
            "computes or reads again. The machine’s peak is what large matrix products and passes "
            "over a large array reached here; the share of it is the least time that these allow, "
            "over the measured one."
        )
    return method


# --- environment ---------------------------------------------------------------------------------


def _environment(run: Run) -> Markup:
    known = {"created": run.created, "command": run.command, "store": run.store, **run.environment}
    if run.roofline is not None:
        known["peak of the machine"] = peaks(run.roofline)
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
