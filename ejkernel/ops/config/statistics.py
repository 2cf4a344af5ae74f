"""Where configs came from in this process, counted per operation and tier.

Selection happens while JAX traces, so it is selections that are counted: a warm call runs in JAX's
own cache and passes nothing of ours.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ...formatting import lasting
from ...markup import one_line
from ..utils.display import Displayed, Shown
from .decision import Decision

logger = logging.getLogger("ejkernel.selection")

STORED = ("overlay", "memory", "persistent", "bundle")
"""Tiers that had the config beforehand."""

MISSED = ("autotune", "near", "heuristics", "none")
"""Tiers that answer because none of those had one; `none` is for calls without a config."""


@dataclasses.dataclass(frozen=True)
class Stats(Displayed):
    """What was counted. Prints as lines, and is a table in a notebook.

    Attributes:
      operations: selections by operation and tier, `{"matmul@v1": {"memory": 2}}`. Tiers are
        `override`, `overlay`, `memory`, `persistent`, `bundle`, `autotune`, `near`, `heuristics`,
        and `none` where there was no config.
      tunings: runs of the tuner by operation, those of `autotune_lowered` and the like included.
      tuning_seconds: how long they took, in all.
    """

    operations: Mapping[str, Mapping[str, int]]
    tunings: Mapping[str, int]
    tuning_seconds: float = 0.0

    @property
    def tiers(self) -> dict[str, int]:
        """Selections by tier, of all operations."""
        total = collections.Counter[str]()
        for counts in self.operations.values():
            total.update(counts)
        return dict(total)

    @property
    def hits(self) -> int:
        """Selections that found a config in an overlay, in memory, in the store or a bundle."""
        return sum(self.tiers.get(tier, 0) for tier in STORED)

    @property
    def misses(self) -> int:
        """Selections that did not, and tuned, borrowed, guessed or failed (not: `cfg=`)."""
        return sum(self.tiers.get(tier, 0) for tier in MISSED)

    def to_plain(self) -> dict[str, Any]:
        """The counts as plain data, for a log or a metrics exporter."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "tiers": self.tiers,
            "operations": {op: dict(counts) for op, counts in self.operations.items()},
            "tunings": dict(self.tunings),
            "tuning_seconds": self.tuning_seconds,
        }

    def _shown(self) -> Shown:
        operations = sorted({*self.operations, *self.tunings})
        tiers = [tier for tier in ("override", *STORED, *MISSED) if tier in self.tiers]
        rows = [
            (op, *(str(self.operations.get(op, {}).get(tier, "")) for tier in tiers), tuned)
            for op in operations
            for tuned in (str(self.tunings.get(op, "")),)
        ]
        title = f"{self.hits} hits, {self.misses} misses, {sum(self.tunings.values())} tunings"
        header = ("operation", *tiers, "tunings")
        return Shown(title, header, rows, right=range(1, len(header)))

    def __str__(self) -> str:
        lines = [f"{self.hits} hits, {self.misses} misses, {sum(self.tunings.values())} tunings"]
        for op_id in sorted({*self.operations, *self.tunings}):
            shown = [f"{tier} {n}" for tier, n in self.operations.get(op_id, {}).items()]
            shown += [f"tuned {self.tunings[op_id]}×"] if op_id in self.tunings else []
            lines.append(f"  {op_id}: {', '.join(shown)}")
        return "\n".join(lines)


class _Counts:
    """The counters of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.operations: dict[str, collections.Counter[str]] = {}
        self.tunings = collections.Counter[str]()
        self.seconds = 0.0


_counts = _Counts()


def stats() -> Stats:
    """Where the configs of this process came from so far, per operation.

    >>> from ejkernel.ops import reset_stats, stats
    >>> reset_stats()
    >>> stats().hits, stats().misses
    (0, 0)
    """
    with _counts.lock:
        operations = {op: dict(counts) for op, counts in _counts.operations.items()}
        return Stats(operations, dict(_counts.tunings), _counts.seconds)


def reset_stats() -> None:
    """Count from zero again."""
    with _counts.lock:
        _counts.clear()


def count_decision(decision: Decision[Any]) -> None:
    """A call got a config: count it, and say so in the log.

    What was stored is said at DEBUG; what was not, and might have been, at INFO.
    """
    _count(decision.key.op_id, decision.tier)
    level = logging.INFO if decision.tier in MISSED else logging.DEBUG
    if logger.isEnabledFor(level):
        logger.log(
            level,
            "ejkernel: %s(%s) key %s: %s by %s: %s",
            decision.key.op_id,
            decision.signature,
            decision.key.call_key,
            one_line(lasting(str(decision.cfg))),
            decision.tier,
            one_line(decision.reason),
        )


def count_miss(op_id: str) -> None:
    """A call got no config; the error says everything else."""
    _count(op_id, "none")


@contextlib.contextmanager
def count_tuning(op_id: str) -> Iterator[None]:
    """One more run of the tuner, whatever comes of it."""
    start = time.perf_counter()
    try:
        yield
    finally:
        with _counts.lock:
            _counts.tunings[op_id] += 1
            _counts.seconds += time.perf_counter() - start


def _count(op_id: str, tier: str) -> None:
    with _counts.lock:
        _counts.operations.setdefault(op_id, collections.Counter())[tier] += 1
