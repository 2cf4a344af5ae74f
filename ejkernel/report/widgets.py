"""Small pieces that several parts of the page are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..formatting import times
from ..markup import Markup, tag
from .formatting import Finding, Headline
from .record import Gain


def card(title: str | None, *children: Any) -> Markup:
    """A box of the page, with a heading if it has a title."""
    return tag("div", tag("h2", title) if title else None, *children, class_="card")


def chip(finding: Finding) -> Markup:
    """How sure something is, as a small label."""
    kind = {"sure": "good", "likely": "calm", "open": "warm", "unknown": "plain"}[finding.level]
    return tag("span", finding.word, class_=f"chip {kind}")


def hero(top: Headline) -> Markup:
    """The one thing to know, large."""
    return tag(
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


def factor(gain: Gain | None) -> Markup:
    """A speedup; coloured if something became faster beyond doubt."""
    faster = gain is not None and gain.low > 1
    return tag("b", "–" if gain is None else times(gain.times), class_="up" if faster else None)


def facts(pairs: Iterable[tuple[Any, Any]]) -> Markup:
    """Names and values, a row each."""
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in pairs]
    return tag("table", tag("tbody", *rows), class_="facts")


def notes(lines: Sequence[Any]) -> Markup | None:
    """Remarks, if there are any."""
    return tag("ul", *(tag("li", line) for line in lines), class_="notes") if lines else None
