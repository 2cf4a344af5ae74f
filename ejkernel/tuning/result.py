"""What a tuning run gives back: configs, what they are worth, a report, and text to paste."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..ops.execution.results import AutotuningResult, Entry, Skipped
from ..ops.utils.display import Shown
from ..report import summary

if TYPE_CHECKING:
    import pathlib

    from ..report import Run


class TuningResult(AutotuningResult):
    """What `ejkernel.tune` gives: tuned configs, how they were measured, and what they are worth.

    Attributes:
      run: the record of the run, which reports are made of.
      in_force: the configs are used in this process from now on. False if the whole function was
        slower with them.
      not_stored: operations that were measured and could not be written to the store.
    """

    def __init__(
        self,
        device: str | None = None,
        entries: Iterable[Entry] = (),
        skipped: Iterable[Skipped] = (),
    ) -> None:
        super().__init__(device, entries, skipped)
        self.in_force = False
        self.not_stored: tuple[str, ...] = ()
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        """The record of the run."""
        if self._run is None:  # it was read from a text, which has no more than the configs
            from ..report import Run

            self._run = Run.of(self)
        return self._run

    @run.setter
    def run(self, run: Run) -> None:
        self._run = run

    @property
    def verdict(self) -> str:
        """What tuning was worth for the whole function, in a line; empty if it was not compared."""
        return summary.verdict(self.run)

    def report(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write a page about the run: `.html`, `.md` or `.json`."""
        from .. import report

        return report.write(self.run, path)

    def code(self) -> str:
        """The configs as Python text to paste: an `overlay_cache`, and `cfg=` for single calls."""
        from .code import as_code

        return as_code(self.device, self.entries)

    def _shown(self) -> Shown:
        header, rows, right, details = summary.table(self.run)
        title, notes = f"tuned for {self.device}", summary.sentences(self.run)
        return Shown(title, header, rows, right=right, details=details, notes=notes)
