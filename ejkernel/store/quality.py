"""Of two results for the same call, which one was measured better?

Times of two machines cannot be compared, so a smaller time says nothing. What says something is
whether the run was finished, whether its race was decided, how many candidates it tried, and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entry = Mapping[str, Any]

_CRITERIA = (
    ("it was measured", lambda about: about.get("seconds") is not None),
    ("its run was finished", lambda about: not about.get("incomplete")),
    ("its race was decided", lambda about: bool(about.get("sure"))),
    ("it won against more candidates", lambda about: _tried(about)),
    ("it is newer", lambda about: str(about.get("when", ""))),
)


def quality(entry: Entry) -> tuple[Any, ...]:
    """Comparable: the larger, the better measured."""
    return tuple(value(entry["about"]) for _, value in _CRITERIA)


def why_better(kept: Entry, dropped: Entry) -> str:
    """Why one entry was preferred to another, in words."""
    for reason, value in _CRITERIA:
        if value(kept["about"]) != value(dropped["about"]):
            return reason
    return "both were measured equally well, and it was there first"


def _tried(about: Mapping[str, Any]) -> int:
    if isinstance(about.get("trials"), list):
        return len(about["trials"])
    tried = about.get("tried", 0)
    return tried if isinstance(tried, int) else 0
