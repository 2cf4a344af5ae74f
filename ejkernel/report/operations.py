"""One operation of a report: its candidates as a plot, the refused ones, its space as a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..formatting import counted, described, duration, shortened
from ..markup import Markup, tag
from .formatting import REJECTED, how_sure, rate, rounded, share_of_peak
from .plots import axis_line, candidate_rows, heat_map, time_axis
from .record import Candidate, Operation, Roofline
from .search import search_section
from .space import dimensions, maps
from .widgets import chip, factor

FOLDED_FROM = 24  # rows that are shown before "show all"
MOST_ROWS = 400  # of one kind, in a page that still opens at once
LONG_REASON = 140

LEGEND = tag(
    "p",
    tag("span", class_="key mark"),
    "time per call ",
    tag("span", class_="key box"),
    "middle half of the samples ",
    tag("span", class_="key whisker"),
    "fastest to slowest; » a sample lies beyond the plot",
    class_="legend soft",
    aria_hidden="true",
)


def operation_card(
    operation: Operation, name: str, is_open: bool, roofline: Roofline | None = None
) -> Markup:
    """Everything about one operation; `name` is what links call it."""
    call = tag("small", shortened(operation.signature))
    gain = factor(operation.gain) if operation.gain else None
    known = (
        ("chosen", tag("code", described(operation.config))),
        ("time per call", duration(operation.seconds)),
        ("heuristic", tag("code", described(operation.heuristic)) if operation.heuristic else "–"),
        ("its time", duration(operation.heuristic_seconds)),
        *_rate(operation, roofline),
        *_plain_facts(operation),
    )
    unknown = (
        "The candidates of this operation are not in the record: it was tuned in an earlier run. "
        "`Run.of(result, store=…)` reads them from the store."
    )
    return tag(
        "details",
        tag(
            "summary",
            tag("span", tag("b", operation.name), call, class_="operation-name"),
            tag("span", chip(how_sure(operation)), gain, class_="operation-gain"),
        ),
        tag(
            "dl",
            *(tag("div", tag("dt", title), tag("dd", value)) for title, value in known),
            class_="brief",
        ),
        _plot(operation, name) if operation.candidates else tag("p", unknown, class_="soft"),
        search_section(operation),
        _space(operation, name),
        class_="card operation",
        id=name,
        open=is_open,
    )


def _rate(operation: Operation, roofline: Roofline | None) -> list[tuple[str, str]]:
    """The work of the chosen config per second, and how much that is of what can be had."""
    figures = rate(operation.work, operation.seconds)
    share = share_of_peak(roofline, operation.work, operation.seconds)
    if not figures:
        return []
    return [("efficiency", share or "not compared with the peak"), ("rate", figures)]


def _plain_facts(operation: Operation) -> list[tuple[str, Any]]:
    """Plain JAX, if it was timed: what the operation itself is worth."""
    plain = operation.plain
    if plain is None:
        return []
    name = f"plain JAX: {plain.name}" if plain.name else "plain JAX"
    return [(name, plain.sentence(operation.seconds, duration).partition(": ")[2])]


def _plot(operation: Operation, name: str) -> Markup:
    groups = {
        "measured": operation.with_verdict("measured"),
        "rejected": operation.with_verdict(*REJECTED),
        "duplicate": operation.with_verdict("duplicate"),
    }
    measured = groups["measured"]
    axis = time_axis(measured)
    rows = candidate_rows(operation, measured[:MOST_ROWS], axis)
    for kind in ("rejected", "duplicate"):
        rows += _refused_rows(operation, groups[kind][:MOST_ROWS], kind)
    filters = [
        tag(
            "button",
            "same program as another " if kind == "duplicate" else f"{kind} ",
            tag("b", len(group)),
            type="button",
            data_filter=kind,
            aria_pressed="true",
        )
        for kind, group in groups.items()
        if group
    ]
    folds = len(measured) > FOLDED_FROM
    more = tag("button", f"Show all {len(measured)} measured", type="button", class_="show-all")
    rest = [c for c in operation.candidates if c.verdict not in (*groups, *REJECTED)]
    remarks = [
        f"{counted(len(rest), 'candidate')} not tried: {first.reason or first.verdict}."
        for first in rest[:1]
    ]
    remarks += [
        f"Of {len(group)} {kind}, the first {MOST_ROWS} are listed."
        for kind, group in groups.items()
        if len(group) > MOST_ROWS
    ]
    return tag(
        "div",
        tag("div", *filters, class_="filters", role="group", aria_label="Which candidates to show"),
        axis_line(axis, [(tick, rounded(tick)) for tick in axis.ticks()], "time per call"),
        tag("ul", *rows, class_="rows", aria_label=f"Candidates of {operation.name}"),
        more if folds else None,
        *(tag("p", remark, class_="soft") for remark in remarks),
        LEGEND,
        class_=f"plot candidates{' folded' if folds else ''}",
        id=f"{name}-plot",
    )


def _refused_rows(operation: Operation, candidates: Sequence[Candidate], kind: str) -> list[Markup]:
    names, rows = dimensions(operation), []
    colour = f"chip {'bad' if kind == 'rejected' else 'plain'}"
    for candidate in candidates:
        reason = candidate.reason or candidate.verdict
        first = " ".join(reason.split())
        label = tag("span", candidate.verdict, class_=colour)
        if len(first) > LONG_REASON or "\n" in reason:
            head = tag("summary", label, " ", f"{first[:LONG_REASON]}…")
            why = tag("details", head, tag("pre", reason), class_="why")
        else:
            why = tag("span", label, " ", first, class_="why")
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
    choices = [tag("option", f"{m.down} by {m.across}", value=i) for i, m in enumerate(drawn)]
    select = tag("select", *choices, data_maps=f"{name}-maps")
    chooser = tag("label", "Dimensions ", select, class_="chooser") if len(drawn) > 1 else None
    tables = [tag("div", heat_map(operation, m), data_map=i) for i, m in enumerate(drawn)]
    return tag(
        "div",
        tag("div", tag("h3", "The search space"), chooser, class_="space-head"),
        tag("div", *tables, id=f"{name}-maps", class_="maps"),
        tag(
            "p",
            tag("span", class_="key scale"),
            "slow to fast; the chosen config is framed, ✕ was rejected, · does not exist",
            class_="legend soft",
        ),
        class_="space",
    )
