"""Spend effort where the time is: of several operations, the slow ones are worth most tuning.

Before several operations are tuned, each is timed once with its heuristic config. An operation that
takes a small share of the total is tuned with less effort, and a limit of seconds is divided by
share. Those that take longest come first, so that a run which is interrupted has done what counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..config.hooks import job_agreement
from ..core.invocation import Invocation

if TYPE_CHECKING:
    from ..tuner.tuner import Tuner

logger = logging.getLogger(__name__)
K = TypeVar("K")

SMALL_SHARE = 0.1  # of the time of all operations; less than that deserves less effort
LEAST_SECONDS = 0.1  # of an equal part: what an operation gets however short it runs


def tuners_by_share(
    tuner: Tuner, invocations: Mapping[K, Invocation[Any, Any]]
) -> list[tuple[K, Tuner | None]]:
    """Each operation with the tuner it deserves (None: the one there is), the slowest first."""
    if len(invocations) < 2 or job_agreement() is not None:  # others may know the answers
        return [(key, None) for key in invocations]
    from ..tuner.tuner import Tuner

    if type(tuner).autotune is not Tuner.autotune:  # the user's own; it knows what it does
        return [(key, None) for key in invocations]
    seconds = {key: _heuristic_seconds(tuner, inv) for key, inv in invocations.items()}
    total = sum(seconds.values())
    if total <= 0:
        return [(key, None) for key in invocations]
    ranked = sorted(invocations, key=lambda key: -seconds[key])
    return [(key, _deserved(tuner, seconds[key] / total, len(ranked))) for key in ranked]


def _deserved(tuner: Tuner, share: float, count: int) -> Tuner:
    changes: dict[str, Any] = {}
    if share < SMALL_SHARE:
        changes["effort"] = tuner.effort.lower()
    if tuner.seconds is not None:
        changes["seconds"] = tuner.seconds * max(LEAST_SECONDS, share * count)
    return tuner.changed(**changes)


def _heuristic_seconds(tuner: Tuner, inv: Invocation[Any, Any]) -> float:
    """The time of one call with the heuristic config; 0 if that cannot be known."""
    from ..tuner.session import heuristic_seconds

    if inv.kernel is None:
        return 0.0
    try:
        return heuristic_seconds(tuner, inv, inv.kernel)
    except Exception as error:  # noqa: BLE001  tuning it will say what is wrong, with all reasons
        logger.info("ejkernel: %s could not be timed before tuning: %s", inv.key, error)
        return 0.0
