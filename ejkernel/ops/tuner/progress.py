"""A progress bar in a terminal; nothing in a log file."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self


class Bar:
    """A bar in the terminal: a name, how far it is, what happens now.

    Args:
      name: what takes so long.
      wanted: show it; None: if the error output is a terminal (or a notebook).
    """

    def __init__(self, name: str, wanted: bool | None = None) -> None:
        self._name = name if len(name) <= 48 else f"{name[:47]}…"
        self._wanted = sys.stderr.isatty() if wanted is None else wanted
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[what]}"),
                TimeElapsedColumn(),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=None, what="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, **fields: Any) -> None:
        """Show another `total`, `completed`, `advance` or `what`."""
        if self._bar is not None:
            self._bar.update(self._task, **fields)


class Progress(Bar):
    """Shows how far a tuning run is."""

    def building(self, count: int) -> None:
        """So many candidates are about to be compiled and checked."""
        self.update(total=count, completed=0, what="compiling and checking")

    def built(self, cfg: Any) -> None:
        """One more candidate is ready."""
        self.update(advance=1)

    def racing(self, count: int, rounds: int) -> None:
        """So many candidates race over so many rounds at most."""
        self.update(total=rounds, completed=0, what=f"racing {count}")

    def round(self, running: int, done: int) -> None:
        """A round is over, with so many candidates still running."""
        self.update(completed=done, what=f"racing {running}")
