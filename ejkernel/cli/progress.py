"""How far a tuning run is: a line per operation; the tuner itself shows a bar for each."""

from __future__ import annotations

import time
from typing import Any

from ..markup import one_line
from .output import note


class Watch:
    """Listens to a selector (`on_event`) and says which operations are finished.

    Args:
      total: how many operations there are.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done: set[tuple[str, str]] = set()
        self._started = 0.0

    def on_event(self, event: str, *, op_id: str, call_key: str, **data: Any) -> None:
        """An operation was found, is being tuned, or is finished."""
        if event == "autotune_start":
            self._started = time.perf_counter()
        elif event == "cache_hit":
            self._finished(op_id, call_key, f"{op_id}: known already ({data.get('level')})")
        elif event == "autotune_finish":
            took = time.perf_counter() - self._started
            summary = data["outcome"].summary()
            self._finished(op_id, call_key, f"{op_id}: {summary} ({took:.1f} s)")

    def _finished(self, op_id: str, call_key: str, line: str) -> None:
        self.done.add((op_id, call_key))
        note(f"[{len(self.done)}/{self.total}] {one_line(line)}")
