"""One operation of a report: its candidates as a plot, the refused ones, its space as a map."""

from __future__ import annotations

from collections.abc import Sequence

from ..markup import Markup, joined, tag
from .formatting import REJECTED, counted, duration, rounded, shortened, times
from .plots import axis_line, candidate_rows, heat_map, time_axis
from .record import Candidate, Operation
from .space import described, dimensions, maps

FOLDED_FROM = 24  # rows that are shown before "show all"
MOST_ROWS = 400  # of one kind, in a page that still opens at once
LONG_REASON = 140


def operation_card(operation: Operation, name: str, chip: Markup, is_open: bool) -> Markup:
    """Everything about one operation; `name` is what links call it."""
    gain = operation.gain
    faster = gain is not None and gain.low > 1
    summary = tag(
        "summary",
        tag(
            "span",
            tag("b", operation.name),
            tag("small", shortened(operation.signature)),
            class_="operation-name",
        ),
        tag(
            "span",
            chip,
            tag("b", times(gain.times), class_="up" if faster else None) if gain else None,
            class_="operation-gain",
        ),
    )
    return tag(
        "details",
        summary,
        _facts(operation),
        _plot(operation, name) if operation.candidates else _nothing(operation),
        _space(operation, name),
        class_="card operation",
        id=name,
        open=is_open,
    )


def _facts(operation: Operation) -> Markup:
    facts = [
        ("chosen", tag("code", described(operation.config))),
        ("time per call", duration(operation.seconds)),
        ("heuristic", tag("code", described(operation.heuristic)) if operation.heuristic else "–"),
        ("its time", duration(operation.heuristic_seconds)),
    ]
    return tag(
        "dl",
        *(joined([tag("div", tag("dt", name), tag("dd", value))]) for name, value in facts),
        class_="brief",
    )


def _nothing(operation: Operation) -> Markup:
    return tag(
        "p",
        "The candidates of this operation are not in the record: it was tuned in an earlier run. "
        "`Run.of(result, store=…)` reads them from the store.",
        class_="soft",
    )


def _plot(operation: Operation, name: str) -> Markup:
    measured = operation.with_verdict("measured")
    rejected = operation.with_verdict(*REJECTED)
    duplicates = operation.with_verdict("duplicate")
    known = {*REJECTED, "measured", "duplicate"}
    rest = tuple(c for c in operation.candidates if c.verdict not in known)
    axis = time_axis(measured)
    ticks = axis.ticks()
    rows = candidate_rows(operation, measured[:MOST_ROWS], axis)
    rows += _refused_rows(operation, rejected[:MOST_ROWS], "rejected")
    rows += _refused_rows(operation, duplicates[:MOST_ROWS], "duplicate")
    groups = (
        ("measured", len(measured), "measured"),
        ("rejected", len(rejected), "rejected"),
        ("duplicate", len(duplicates), "same program as another"),
    )
    filters = [
        tag(
            "button",
            f"{title} ",
            tag("b", number),
            type="button",
            data_filter=kind,
            aria_pressed="true",
        )
        for kind, number, title in groups
        if number
    ]
    folds = len(measured) > FOLDED_FROM
    more = tag("button", f"Show all {len(measured)} measured", type="button", class_="show-all")
    remarks = []
    if rest:
        remarks.append(
            f"{counted(len(rest), 'candidate')} not tried: {rest[0].reason or rest[0].verdict}."
        )
    remarks += [
        f"Of {len(group)} {title}, the first {MOST_ROWS} are listed."
        for group, title in ((measured, "measured"), (rejected, "rejected"), (duplicates, "equal"))
        if len(group) > MOST_ROWS
    ]
    return tag(
        "div",
        tag("div", *filters, class_="filters", role="group", aria_label="Which candidates to show"),
        axis_line(axis, [(tick, rounded(tick)) for tick in ticks], "time per call"),
        tag("ul", *rows, class_="rows", aria_label=f"Candidates of {operation.name}"),
        more if folds else None,
        *(tag("p", remark, class_="soft") for remark in remarks),
        _legend(),
        class_=f"plot candidates{' folded' if folds else ''}",
        id=f"{name}-plot",
    )


def _legend() -> Markup:
    return tag(
        "p",
        tag("span", class_="key mark"),
        "time per call ",
        tag("span", class_="key box"),
        "middle half of the samples ",
        tag("span", class_="key whisker"),
        "fastest to slowest",
        class_="legend soft",
        aria_hidden="true",
    )


def _refused_rows(operation: Operation, candidates: Sequence[Candidate], kind: str) -> list[Markup]:
    names = dimensions(operation)
    rows = []
    for candidate in candidates:
        reason = candidate.reason or candidate.verdict
        first = " ".join(reason.split())
        chip = tag(
            "span", candidate.verdict, class_=f"chip {'bad' if kind == 'rejected' else 'plain'}"
        )
        if len(first) > LONG_REASON or "\n" in reason:
            why = tag(
                "details",
                tag("summary", chip, " ", f"{first[:LONG_REASON]}…"),
                tag("pre", reason),
                class_="why",
            )
        else:
            why = tag("span", chip, " ", first, class_="why")
        rows.append(
            tag(
                "li",
                tag("span", tag("code", described(candidate.config, names)), class_="what"),
                why,
                class_=f"row {kind}",
                data_tip=f"{described(candidate.config)}\n{candidate.verdict}: {first[:600]}",
                tabindex="-1",
            )
        )
    return rows


def _space(operation: Operation, name: str) -> Markup | None:
    drawn = maps(operation)
    if not drawn:
        return None
    choices = [
        tag("option", f"{one.down} by {one.across}", value=str(i)) for i, one in enumerate(drawn)
    ]
    chooser = tag(
        "label",
        "Dimensions ",
        tag("select", *choices, data_maps=f"{name}-maps"),
        class_="chooser",
    )
    tables = [tag("div", heat_map(operation, one), data_map=str(i)) for i, one in enumerate(drawn)]
    return tag(
        "div",
        tag(
            "div",
            tag("h3", "The search space"),
            chooser if len(drawn) > 1 else None,
            class_="space-head",
        ),
        tag("div", *tables, id=f"{name}-maps", class_="maps"),
        tag(
            "p",
            tag("span", class_="key scale"),
            "slow to fast; the chosen config is framed, ✕ was rejected, · does not exist",
            class_="legend soft",
        ),
        class_="space",
    )
