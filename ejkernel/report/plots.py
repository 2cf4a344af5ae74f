"""Plots as HTML and SVG with positions in percent: sharp at every width, and drawn without scripts.

A plot is a list of rows on one axis. Each row is text next to a strip of SVG, so that a screen
reader hears the same figures that the eye sees.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ..formatting import described, duration, times
from ..markup import Markup, joined, tag
from .axis import Axis
from .formatting import interval, rate, rounded
from .record import BeforeAfter, Candidate, Gain, Operation
from .space import Cell, Map, dimensions

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
            if axis.shows(sample):
                marks.append(tag("circle", class_="dot", cx=percent(axis.at(sample)), cy=y, r=1.8))
        if not axis.shows(max(samples)):
            marks.append(tag("text", "»", class_="beyond", x="100%", y=middle))
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
        what = (
            tag("code", described(candidate.config, names)),
            tag("span", "chosen", class_="chip good") if best else None,
            tag("span", "heuristic", class_="chip warm") if heuristic else None,
        )
        rows.append(
            _row(
                what,
                strip(axis, ticks, spread(axis, candidate.samples, candidate.seconds)),
                (duration(candidate.seconds), _speedup_cell(operation, candidate)),
                f"measured{' best' if best else ' heuristic' if heuristic else ''}",
                _tip(operation, candidate),
                first=i == 0,
            )
        )
    return rows


def _row(
    what: Sequence[Any],
    drawing: Markup,
    figures: tuple[str, str | None],
    kind: str,
    tip: str,
    *,
    first: bool,
) -> Markup:
    """A row of a plot; `first` is the one that the keyboard reaches."""
    figure, more = figures
    return tag(
        "li",
        tag("span", *what, class_="what"),
        drawing,
        tag("span", figure, class_="time"),
        None if more is None else tag("span", more, class_="ratio"),
        class_=f"row {kind}",
        data_tip=tip,
        tabindex="0" if first else "-1",
    )


def _speedup_cell(operation: Operation, candidate: Candidate) -> Markup:
    """The speedup over the heuristic config that decided in the race, with its interval."""
    factor, between = operation.against_heuristic(candidate)
    return joined([factor, *(tag("small", line) for line in filter(None, between.split(", ")))])


def _tip(operation: Operation, candidate: Candidate) -> str:
    lines = [described(candidate.config)]
    if candidate.seconds is not None:
        lines.append(f"{duration(candidate.seconds)} per call")
        lines.append(rate(operation.work, candidate.seconds))
        factor, between = operation.against_heuristic(candidate)
        if factor != "–" and candidate.config != operation.heuristic:
            within = f" ({between})" if between else ""
            lines.append(f"speedup over the heuristic config: {factor}{within}")
    if candidate.samples:
        lines.append(f"{len(candidate.samples)} samples {_range(candidate.samples)}")
    if candidate.config == operation.config:
        lines.append("chosen")
    if candidate.config == operation.heuristic:
        lines.append("the heuristic config")
    return "\n".join(filter(None, [*lines, candidate.reason]))


def _range(samples: Sequence[float]) -> str:
    middle = statistics.median(samples)
    low, high = duration(min(samples)), duration(max(samples))
    return f"from {low} to {high}, median {duration(middle)}"


# --- gains ---------------------------------------------------------------------------------------


def gain_axis(gains: Sequence[Gain]) -> Axis:
    """An axis of factors, with "no difference" on it."""
    values = [value for gain in gains for value in (gain.times, gain.low, gain.high) if value > 0]
    return Axis.over([*values, 1.0, 1.1, 1 / 1.02], logarithmic=True)


def gain_ticks(axis: Axis) -> list[float]:
    """Its marks; 1, "as before", is always one of them."""
    distant = [tick for tick in axis.ticks() if abs(axis.at(tick) - axis.at(1.0)) > 9]
    return sorted([*distant, 1.0])


def gain_row(
    name: str, gain: Gain | None, axis: Axis, chip: Markup, tip: str, first: bool
) -> Markup:
    """A speedup with its confidence interval."""
    middle, one = HEIGHT / 2, percent(axis.at(1))
    marks = [tag("line", class_="one", x1=one, x2=one, y1=0, y2=HEIGHT)]
    figures, kind = ("–", ""), "gain"
    if gain is not None:
        has_interval = gain.high > gain.low
        if has_interval:
            low, high = axis.at(gain.low), axis.at(gain.high)
            marks.append(_bar("range", low, high, 0.5, middle, 8, 4))
        at = percent(axis.at(gain.times))
        marks.append(tag("circle", class_="mark", cx=at, cy=middle, r=5.5))
        figures = (times(gain.times), interval(gain) if has_interval else "")
        kind = "gain real" if gain.low > 1 else "gain"
    drawing = strip(axis, gain_ticks(axis), *marks)
    return _row((tag("b", name), chip), drawing, figures, kind, tip, first=first)


# --- before and after ----------------------------------------------------------------------------


def before_after_rows(model: BeforeAfter) -> Markup:
    """Every run of the whole function before and after."""
    axis = Axis.over([*model.before, *model.after])
    ticks = axis.ticks()
    rows: list[Markup] = []
    for name, samples, kind in (
        (model.baseline, model.before, "heuristic"),
        ("tuned", model.after, "best"),
    ):
        # The speedup is that within rounds: the second time follows from it.
        middle = statistics.median(model.before) / (
            model.gain.times if samples is model.after and model.gain.times else 1.0
        )
        drawing = strip(axis, ticks, spread(axis, samples, middle))
        tip = f"{name}: {len(samples)} runs {_range(samples)}"
        figures = (duration(middle), None)
        rows.append(
            _row([tag("b", name)], drawing, figures, f"measured {kind}", tip, first=not rows)
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
    names = (tag("span", f"{drawn.down} ↓"), " ", tag("span", f"{drawn.across} →"))
    columns = (tag("th", value, scope="col") for value in map(str, drawn.columns))
    head = tag("tr", tag("th", *names, class_="corner"), *columns)
    rows = [
        tag(
            "tr",
            tag("th", str(row), scope="row"),
            *(_cell(operation, drawn.cells.get((row, column))) for column in drawn.columns),
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


def _cell(operation: Operation, cell: Cell | None) -> Markup:
    if cell is None:
        return tag("td", tag("span", "·", aria_label="no such candidate"), class_="none")
    candidate = cell.candidate
    tip = _tip(operation, candidate)
    if cell.count > 1:
        tip += f"\nthe best of {cell.count} candidates here"
    if cell.chosen is not None and cell.chosen is not candidate:
        tip += f"\nthe chosen one is here too: {duration(cell.chosen.seconds)} per call"
    if candidate.seconds is None:
        verdict = candidate.verdict
        short = verdict if verdict == "not tried" else f"✕ {verdict}"
        kind = "refused" if cell.chosen is None else "refused best"
        return tag("td", tag("span", short), class_=kind, data_tip=f"{verdict}\n{tip}")
    fastest = operation.seconds or candidate.seconds
    ratio = candidate.seconds / fastest if fastest else 1.0  # both too quick for the clock
    slower = math.log(max(ratio, 1.0)) / math.log(SLOWEST_SHADE)
    heat = round(100 * max(0.0, 1 - slower) ** 2)
    kinds = {"best": cell.chosen is not None, "hot": heat > 78}
    return tag(
        "td",
        tag("span", duration(candidate.seconds)),
        class_=" ".join(kind for kind, holds in kinds.items() if holds) or None,
        style=f"--heat:{heat}%",
        data_tip=tip,
    )


def _bar(
    class_: str, left: float, right: float, least: float, middle: float, height: int, rx: int
) -> Markup:
    """A bar from left to right, at least so wide that it can be seen."""
    width = percent(round(max(right - left, least), 2))
    y = middle - height / 2
    return tag("rect", class_=class_, x=percent(left), width=width, y=y, height=height, rx=rx)
