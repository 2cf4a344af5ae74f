"""How a search went: the best time so far over its trials, and which parameter mattered."""

from __future__ import annotations

from ..formatting import counted, described, duration
from ..markup import Markup, joined, tag
from .axis import Axis
from .formatting import rounded
from .plots import percent
from .record import Candidate, Operation
from .space import dimensions, importances

MOST_POINTS = 600  # that are drawn of a long search; every improvement is
MOST_SHOWN = 12  # parameters


def improvements(operation: Operation) -> list[tuple[int, Candidate]]:
    """The trials that were faster than all before them, each with its number, from 1."""
    found: list[tuple[int, Candidate]] = []
    for number, candidate in enumerate(_tried(operation), 1):
        best = found[-1][1].seconds if found else None
        if candidate.seconds is not None and (best is None or candidate.seconds < best):
            found.append((number, candidate))
    return found


def in_words(operation: Operation) -> str:
    """How the search went, in a sentence; nothing if the order of the trials is not known."""
    tried, better = _tried(operation), improvements(operation)
    if len(tried) < 2 or not better:
        return ""
    first, (number, last) = better[0][1], better[-1]
    words = f"{counted(len(tried), 'trial')}: {duration(first.seconds)} at first"
    if len(better) == 1:
        return f"{words}, which no later one improved."
    return f"{words}, the fastest at trial {number} with {duration(last.seconds)}."


def _tried(operation: Operation) -> list[Candidate]:
    return sorted(
        (c for c in operation.candidates if c.order is not None), key=lambda c: c.order or 0
    )


def search_section(operation: Operation) -> Markup | None:
    """Both plots, next to each other where there is room."""
    parts = [part for part in (_history(operation), _what_mattered(operation)) if part is not None]
    return tag("div", *parts, class_="search") if parts else None


# --- history -------------------------------------------------------------------------------------


def _history(operation: Operation) -> Markup | None:
    words = in_words(operation)
    if not words:
        return None
    tried, better = _tried(operation), improvements(operation)
    axis = Axis.over(c.seconds for c in tried if c.seconds)
    names = dimensions(operation)

    def across(number: float) -> str:
        return percent(round(100 * (number - 0.5) / len(tried), 2))

    def down(seconds: float) -> str:
        return percent(round(100 - axis.at(seconds), 2))

    marks = [
        tag("line", class_="grid", x1="0", x2="100%", y1=down(tick), y2=down(tick))
        for tick in axis.ticks()
    ]
    # Each improvement holds until the next one. Points lie above, where a finger meets them.
    ends = [*(number for number, _ in better[1:]), len(tried) + 0.5]
    for i, (number, candidate) in enumerate(better):
        y = down(candidate.seconds or 0.0)
        marks.append(
            tag("line", class_="so-far", x1=across(number), x2=across(ends[i]), y1=y, y2=y)
        )
        if i:
            above, x = down(better[i - 1][1].seconds or 0.0), across(number)
            marks.append(tag("line", class_="so-far", x1=x, x2=x, y1=above, y2=y))
    every = -(-len(tried) // MOST_POINTS)
    improved = {number for number, _ in better}
    for number, candidate in enumerate(tried, 1):
        chosen = candidate.config == operation.config
        if number % every and number not in improved and not chosen:
            continue
        tip = f"trial {number}: {described(candidate.config, names)}\n"
        place = {"cx": across(number), "data_tip": tip + (duration(candidate.seconds))}
        if candidate.seconds is None:
            place["data_tip"] = tip + candidate.verdict
            marks.append(tag("circle", class_="untimed", cy="100%", r=2.5, **place))
        else:
            kind, radius = ("mark", 5.5) if chosen else ("tried", 3)
            marks.append(tag("circle", class_=kind, cy=down(candidate.seconds), r=radius, **place))
    labels = [tag("span", rounded(tick), style=f"top:{down(tick)}") for tick in axis.ticks()]
    return tag(
        "div",
        tag("h3", "The search, trial by trial"),
        tag("p", words, class_="soft"),
        tag(
            "div",
            tag("div", *labels, class_="levels", aria_hidden="true"),
            tag("svg", *marks, width="100%", height="130", role="img", aria_label=words),
            tag("span"),
            tag("div", tag("span", "trial 1"), tag("span", f"trial {len(tried)}"), class_="ends"),
            class_="history",
        ),
        tag(
            "p",
            tag("span", class_="key so-far"),
            "best so far ",
            tag("span", class_="key chosen"),
            "chosen ",
            tag("span", class_="key untimed"),
            "without a time",
            class_="legend soft",
            aria_hidden="true",
        ),
    )


# --- importance ----------------------------------------------------------------------------------


def _what_mattered(operation: Operation) -> Markup | None:
    if not dimensions(operation):
        return None
    shares = importances(operation)
    if shares is None:
        body: Markup = tag("p", "Too few candidates have a time to tell.", class_="soft")
    elif not any(share for _, share in shares):
        body = tag(
            "p",
            "None of them by itself: times differ by combinations of them, or by noise alone.",
            class_="soft",
        )
    else:
        body = joined(
            [
                tag("table", tag("tbody", *map(_bar, shares[:MOST_SHOWN])), class_="shares"),
                tag(
                    "p",
                    "Each one’s share of the differences in time (of the variance of their "
                    "logarithms). The rest is combinations of them, and noise.",
                    class_="legend soft",
                ),
            ]
        )
    return tag("div", tag("h3", "Which parameter mattered"), body)


def _bar(parameter: tuple[str, float]) -> Markup:
    name, share = parameter
    bar = tag("rect", class_="share", x="0", y="3", height="8", rx="4", width=f"{share:.0%}")
    drawn = tag("svg", bar, width="100%", height="14", aria_hidden="true")
    return tag(
        "tr",
        tag("th", tag("code", name), scope="row"),
        tag("td", drawn),
        tag("td", f"{100 * share:.0f} %", class_="number"),
    )
