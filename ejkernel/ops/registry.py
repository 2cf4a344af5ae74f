"""What was called so far: the distinct invocations, and where their configs came from.

Tracing records, so lowering a function is enough to know its operations. Memory is bounded: the
oldest distinct call is forgotten first. Selection happens while JAX traces, so it is selections
that are counted: a warm call runs in JAX's own cache, and nothing of ours sees it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..formatting import lasting
from ..markup import one_line
from .core.types import ConfigKey
from .utils import environment
from .utils.display import Displayed, Shown

if TYPE_CHECKING:
    from .config.decision import Decision
    from .core.invocation import Invocation
    from .core.kernel import Kernel

logger = logging.getLogger("ejkernel.selection")

LIMIT = 4096

_lock = threading.Lock()
_invocations: collections.OrderedDict[ConfigKey, Invocation[Any, Any]] = collections.OrderedDict()
_replaced: set[ConfigKey | None] = set()  # traced only on the way to their gradients


def record_invocation(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
    """Remember a call by its shapes; live arrays and tracers are never held."""
    _remember(kernel, inv, unlimited=True)


class Recorded:
    """What the executor records of one call that it traces; `EJKERNEL_OPS_RECORD` has the say.

    JAX traces a call forward before it asks for the gradient. Then it is the call with its gradient
    that runs, and the one without is no longer listed unless a program runs it too, as it says when
    it is lowered. Its label finds it in either case.
    """

    def __init__(self) -> None:
        self._added: ConfigKey | None = None
        self._runs = False

    def runs_forward(self) -> None:
        """A program is lowered in which the call runs without its gradient."""
        self._runs = True
        with _lock:
            _replaced.discard(self._added)

    def while_tracing(self, kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
        """Record a call; with a gradient, instead of the same call without."""
        mode = environment.RECORD.read()
        if mode == "0":
            return
        if inv.differentiated and self._added is not None and not self._runs:
            with _lock:
                _replaced.add(self._added)
        is_new = inv.key not in _invocations
        _remember(kernel, inv, unlimited=mode == "1")
        if is_new and not inv.differentiated:
            self._added = inv.key


def _remember(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], unlimited: bool) -> None:
    abstract = dataclasses.replace(inv.abstract(), kernel=kernel, override_cfg=None)
    key = inv.key if inv.kernel is kernel else abstract.key
    with _lock:
        _invocations[key] = abstract
        _invocations.move_to_end(key)
        _replaced.discard(key)
        while not unlimited and len(_invocations) > LIMIT:
            _replaced.discard(_invocations.popitem(last=False)[0])


def get_invocations(device: str | None = None) -> list[Invocation[Any, Any]]:
    """The recorded invocations, oldest first; with `device` (a fingerprint) only that device's."""
    with _lock:
        return [
            inv
            for key, inv in _invocations.items()
            if device in (None, key.device) and key not in _replaced
        ]


def find_invocation(op_id: str, call_key: str, device: str) -> Invocation[Any, Any] | None:
    """The recorded invocation of a label, if any."""
    with _lock:
        return _invocations.get(ConfigKey(device, op_id, call_key))


def clear_invocations() -> None:
    """Forget all recorded invocations."""
    with _lock:
        _invocations.clear()
        _replaced.clear()


# --- where configs came from ---------------------------------------------------------------------

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

    def __str__(self) -> str:
        lines = [f"{self.hits} hits, {self.misses} misses, {sum(self.tunings.values())} tunings"]
        for op_id in sorted({*self.operations, *self.tunings}):
            shown = [f"{tier} {n}" for tier, n in self.operations.get(op_id, {}).items()]
            shown += [f"tuned {self.tunings[op_id]}×"] if op_id in self.tunings else []
            lines.append(f"  {op_id}: {', '.join(shown)}")
        return "\n".join(lines)


_selections: dict[str, collections.Counter[str]] = {}
_tunings: dict[str, list[float]] = {}  # the seconds that each run took, by operation


def stats() -> Stats:
    """Where the configs of this process came from so far, per operation.

    >>> from ejkernel.ops import reset_stats, stats
    >>> reset_stats()
    >>> stats().hits, stats().misses
    (0, 0)
    """
    with _lock:
        operations = {op: dict(counts) for op, counts in _selections.items()}
        tunings = {op: len(seconds) for op, seconds in _tunings.items()}
        return Stats(operations, tunings, sum(map(sum, _tunings.values())))


def reset_stats() -> None:
    """Count from zero again."""
    with _lock:
        _selections.clear()
        _tunings.clear()


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
        with _lock:
            _tunings.setdefault(op_id, []).append(time.perf_counter() - start)


def _count(op_id: str, tier: str) -> None:
    with _lock:
        _selections.setdefault(op_id, collections.Counter())[tier] += 1
