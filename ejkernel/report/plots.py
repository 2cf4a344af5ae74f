"""Plots as HTML and SVG with positions in percent: sharp at every width, and drawn without scripts.

A plot is a list of rows on one axis. Each row is text next to a strip of SVG, so that a screen
reader hears the same figures that the eye sees.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..markup import Markup, joined, tag
from .axis import Axis
from .formatting import duration, limits, rounded, times
from .record import BeforeAfter, Candidate, Gain, Operation
from .space import Map, Value, described, dimensions

HEIGHT = 28
MOST_DOTS = 40
SLOWEST_SHADE = 3.0  # candidates this many times slower than the best one have the palest colour


def percent(value: float) -> str:
    """`12.5%`."""
    return f"{value:g}%"


def axis_line(axis: Axis, shown: Sequence[tuple[float, str]], title: str) -> Markup:
    """The axis above the rows: its values, and what they are."""
    marks = [
        tag(
            "span",
            label,
            style=f"left:{percent(axis.at(value))}",
            class_="first" if axis.at(value) < 8 else "last" if axis.at(value) > 92 else None,
        )
        for value, label in shown
    ]
    return tag(
        "div",
        tag("span", title, class_="axis-title"),
        tag("div", *marks, class_="axis-marks", aria_hidden="true"),
        class_="axis",
    )


def strip(axis: Axis, ticks: Sequence[float], *marks: Markup) -> Markup:
    """One row's drawing area, with the grid."""
    grid = [
        tag("line", class_="grid", x1=at, x2=at, y1="0", y2=str(HEIGHT))
        for at in (percent(axis.at(tick)) for tick in ticks)
    ]
    return tag(
        "svg", *grid, *marks, class_="strip", width="100%", height=str(HEIGHT), aria_hidden="true"
    )


def spread(axis: Axis, samples: Sequence[float], seconds: float | None) -> Markup:
    """Samples on an axis: all of them, from fastest to slowest, the middle half, the figure."""
    middle = HEIGHT / 2
    marks: list[Markup] = []
    if samples:
        low, high = axis.at(min(samples)), axis.at(max(samples))
        marks.append(
            tag("line", class_="whisker", x1=percent(low), x2=percent(high), y1=middle, y2=middle)
        )
        if len(samples) >= 4:
            first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
            marks.append(_bar("box", axis.at(first), axis.at(third), 0.3, middle, 12, 3))
        for i, sample in enumerate(samples[:MOST_DOTS]):
            # Up and down by turns, so that equal samples do not hide each other.
            y = middle + (-3.5, 0.0, 3.5)[i % 3]
            marks.append(tag("circle", class_="dot", cx=percent(axis.at(sample)), cy=y, r=1.8))
    if seconds is not None:
        at = percent(axis.at(seconds))
        marks.append(tag("circle", class_="mark", cx=at, cy=middle, r=5))
    return joined(marks)


# --- candidates ----------------------------------------------------------------------------------


def time_axis(candidates: Sequence[Candidate]) -> Axis:
    """An axis for candidates' times: for all figures, and for all samples but wild ones."""
    values: list[float] = []
    for candidate in candidates:
        if candidate.seconds:
            values.append(candidate.seconds)
        ordered = sorted(candidate.samples)
        if ordered:
            values += [ordered[0], ordered[int(0.9 * (len(ordered) - 1))]]
    return Axis.over(values)


def candidate_rows(
    operation: Operation, candidates: Sequence[Candidate], axis: Axis
) -> list[Markup]:
    """A row per measured candidate, with its spread."""
    names, ticks = dimensions(operation), axis.ticks()
    rows = []
    for i, candidate in enumerate(candidates):
        best = candidate.config == operation.config
        heuristic = candidate.config == operation.heuristic
        chips = [
            tag("span", "chosen", class_="chip good") if best else None,
            tag("span", "heuristic", class_="chip warm") if heuristic else None,
        ]
        kind = " best" if best else " heuristic" if heuristic else ""
        rows.append(
            tag(
                "li",
                tag("span", tag("code", described(candidate.config, names)), *chips, class_="what"),
                strip(axis, ticks, spread(axis, candidate.samples, candidate.seconds)),
                tag("span", duration(candidate.seconds), class_="time"),
                tag("span", _ratio(operation, candidate), class_="ratio"),
                class_=f"row measured{kind}",
                data_tip=_tip(operation, candidate),
                tabindex="0" if i == 0 else "-1",
            )
        )
    return rows


def _ratio(operation: Operation, candidate: Candidate) -> str:
    if not operation.seconds or not candidate.seconds:
        return ""
    return times(candidate.seconds / operation.seconds)


def _tip(operation: Operation, candidate: Candidate) -> str:
    lines = [described(candidate.config)]
    if candidate.seconds is not None:
        ratio = f", {_ratio(operation, candidate)} the time of the chosen one"
        lines.append(f"{duration(candidate.seconds)} per call{ratio if operation.seconds else ''}")
    if candidate.samples:
        low, high = min(candidate.samples), max(candidate.samples)
        lines.append(
            f"{len(candidate.samples)} samples from {duration(low)} to {duration(high)}, median "
            f"{duration(statistics.median(candidate.samples))}"
        )
    if candidate.config == operation.config:
        lines.append("chosen")
    if candidate.config == operation.heuristic:
        lines.append("the heuristic config")
    if candidate.reason:
        lines.append(candidate.reason)
    return "\n".join(lines)


# --- gains ---------------------------------------------------------------------------------------


def gain_axis(gains: Sequence[Gain]) -> Axis:
    """An axis of factors, with "no difference" on it."""
    values = [value for gain in gains for value in (gain.times, gain.low, gain.high) if value > 0]
    return Axis.over([*values, 1.0, 1.1, 1 / 1.02], logarithmic=True)


def gain_ticks(axis: Axis) -> list[float]:
    """Its marks; 1, "as before", is always one of them."""
    found = [tick for tick in axis.ticks() if abs(axis.at(tick) - axis.at(1.0)) > 9]
    return sorted([*found, 1.0])


def gain_row(
    name: str, gain: Gain | None, axis: Axis, chip: Markup, tip: str, first: bool
) -> Markup:
    """A factor with the limits between which it surely lies."""
    middle = HEIGHT / 2
    marks = [
        tag("line", class_="one", x1=percent(axis.at(1)), x2=percent(axis.at(1)), y1=0, y2=HEIGHT)
    ]
    if gain is not None:
        if gain.high > gain.low:
            low, high = axis.at(gain.low), axis.at(gain.high)
            marks.append(_bar("range", low, high, 0.5, middle, 8, 4))
        marks.append(
            tag("circle", class_="mark", cx=percent(axis.at(gain.times)), cy=middle, r=5.5)
        )
    return tag(
        "li",
        tag("span", tag("b", name), chip, class_="what"),
        strip(axis, gain_ticks(axis), *marks),
        tag("span", times(gain.times) if gain is not None else "–", class_="time"),
        tag(
            "span",
            limits(gain) if gain is not None and gain.high > gain.low else "",
            class_="ratio",
        ),
        class_=f"row gain{' real' if gain is not None and gain.low > 1 else ''}",
        data_tip=tip,
        tabindex="0" if first else "-1",
    )


# --- before and after ----------------------------------------------------------------------------


def before_after_rows(model: BeforeAfter) -> Markup:
    """Every run of the whole function before and after."""
    axis = Axis.over([*model.before, *model.after])
    ticks = axis.ticks()
    rows = []
    for i, (name, samples, kind) in enumerate(
        (("before", model.before, "heuristic"), ("after", model.after, "best"))
    ):
        middle = statistics.median(samples)
        tip = (
            f"{name} tuning: {len(samples)} runs from {duration(min(samples))} to "
            f"{duration(max(samples))}, median {duration(middle)}"
        )
        rows.append(
            tag(
                "li",
                tag("span", tag("b", name), class_="what"),
                strip(axis, ticks, spread(axis, samples, middle)),
                tag("span", duration(middle), class_="time"),
                class_=f"row measured {kind}",
                data_tip=tip,
                tabindex="0" if i == 0 else "-1",
            )
        )
    return tag(
        "div",
        axis_line(axis, [(tick, rounded(tick)) for tick in ticks], "one run"),
        tag("ul", *rows, class_="rows", aria_label="The whole model before and after"),
        class_="plot compact",
    )


# --- maps ----------------------------------------------------------------------------------------


def heat_map(operation: Operation, drawn: Map) -> Markup:
    """A table whose cells are coloured by how close they are to the best time."""
    head = tag(
        "tr",
        tag(
            "th",
            tag("span", f"{drawn.down} ↓"),
            " ",
            tag("span", f"{drawn.across} →"),
            class_="corner",
        ),
        *(tag("th", str(value), scope="col") for value in drawn.columns),
    )
    rows = [
        tag(
            "tr",
            tag("th", str(row), scope="row"),
            *(_cell(operation, drawn, row, column) for column in drawn.columns),
        )
        for row in drawn.rows
    ]
    words = f"Time by {drawn.down} and {drawn.across}"
    if drawn.best_of_others:
        words += "; each cell is the best over the other dimensions"
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="heat", aria_label=words)
    return joined(
        [
            tag("p", f"{words}.", class_="soft"),
            tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=words),
        ]
    )


def _cell(operation: Operation, drawn: Map, row: Value, column: Value) -> Markup:
    found = drawn.cells.get((row, column))
    if found is None:
        return tag("td", tag("span", "·", aria_label="no such candidate"), class_="none")
    candidate = found.candidate
    tip = _tip(operation, candidate)
    if found.count > 1:
        tip += f"\nthe best of {found.count} candidates here"
    if candidate.seconds is None:
        return tag(
            "td",
            tag("span", _short_verdict(candidate)),
            class_="refused",
            data_tip=f"{candidate.verdict}\n{tip}",
        )
    fastest = operation.seconds or candidate.seconds
    ratio = candidate.seconds / fastest if fastest else 1.0  # both too quick for the clock
    slower = math.log(max(ratio, 1.0)) / math.log(SLOWEST_SHADE)
    heat = round(100 * max(0.0, 1 - slower) ** 2)
    kind = "best" if candidate.config == operation.config else None
    return tag(
        "td",
        tag("span", duration(candidate.seconds)),
        class_=" ".join(filter(None, (kind, "hot" if heat > 78 else None))) or None,
        style=f"--heat:{heat}%",
        data_tip=tip,
    )


def _short_verdict(candidate: Candidate) -> str:
    return "not tried" if candidate.verdict == "not tried" else f"✕ {candidate.verdict}"


def _bar(
    class_: str, left: float, right: float, least: float, middle: float, height: int, rx: int
) -> Markup:
    """A bar from left to right, at least so wide that it can be seen."""
    width = percent(round(max(right - left, least), 2))
    y = middle - height / 2
    return tag("rect", class_=class_, x=percent(left), width=width, y=y, height=height, rx=rx)
