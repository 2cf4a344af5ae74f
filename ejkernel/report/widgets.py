"""Small pieces that several parts of the page are made of."""

from __future__ import annotations

from collections.abc import Sequence

from ..markup import Markup, tag
from .formatting import Finding


def chip(finding: Finding) -> Markup:
    """How sure something is, as a small label."""
    kind = {"sure": "good", "likely": "calm", "open": "warm", "unknown": "plain"}[finding.level]
    return tag("span", finding.word, class_=f"chip {kind}")


def notes(lines: Sequence[str]) -> Markup | None:
    """Remarks, if there are any."""
    return tag("ul", *(tag("li", line) for line in lines), class_="notes") if lines else None
