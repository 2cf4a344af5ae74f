"""How far a tuning run is: bars in a terminal, a line per operation in a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from ..markup import one_line
from .output import note


class Watch:
    """Listens to a selector (`on_event`) and its tuner (`on_step`), and shows what they do.

    Args:
      total: how many operations there are.
      wanted: bars; None: if the error output is a terminal.
    """

    def __init__(self, total: int, wanted: bool | None = None) -> None:
        self.total = total
        self.done: set[tuple[str, str]] = set()
        self._bars = sys.stderr.isatty() if wanted is None else wanted
        self._progress: Any = None
        self._all: Any = None
        self._one: Any = None
        self._started = 0.0

    def __enter__(self) -> Self:
        if self._bars:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[what]}", markup=False),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
            self._all = self._progress.add_task("operations", total=self.total, what="")
            self._one = self._progress.add_task("timing them first", total=None, what="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    # --- what the selector says ------------------------------------------------------------------

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
        if self._progress is not None:
            self._progress.update(self._all, completed=len(self.done))
        note(f"[{len(self.done)}/{self.total}] {one_line(line)}")

    # --- what the tuner says ---------------------------------------------------------------------

    def on_step(self, step: str, name: str, **data: Any) -> None:
        """A candidate was built, or a round of the race is over."""
        if self._progress is None:
            return
        if step == "build":
            name = one_line(name)
            short = name if len(name) <= 48 else f"{name[:47]}…"
            self._progress.update(
                self._one,
                description=short,
                total=data["candidates"],
                completed=0,
                what="building",
            )
        elif step == "candidate":
            self._progress.update(self._one, advance=1)
        elif step == "race":
            what = f"racing {data['candidates']}"
            self._progress.update(self._one, total=data["rounds"], completed=0, what=what)
        elif step == "round":
            what = f"racing {data['running']}"
            self._progress.update(self._one, completed=data["done"], what=what)
