"""How far a tuning run is: a bar in a terminal or a notebook, nothing in a log file, steps for a
listener.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from ...formatting import duration, shortened, times
from ...markup import one_line, tag
from ..config.outcome import Trial
from ..utils.display import in_notebook

logger = logging.getLogger(__name__)


class Bar:
    """A bar in the terminal or the notebook: a name, how far it is, what happens now.

    Args:
      name: what takes so long.
      wanted: show it; None: if the error output is a terminal or a notebook.
    """

    def __init__(self, name: str, wanted: bool | None = None) -> None:
        self._name = name if len(name) <= 48 else f"{name[:47]}…"
        self._wanted = (sys.stderr.isatty() or in_notebook()) if wanted is None else wanted
        self._bar: _TerminalBar | NotebookBar | None = None

    def __enter__(self) -> Self:
        if self._wanted:
            self._bar = NotebookBar(self._name) if in_notebook() else _TerminalBar(self._name)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def is_shown(self) -> bool:
        """True if somebody can see it."""
        return self._bar is not None

    def update(self, **fields: Any) -> None:
        """Show another `total`, `completed`, `advance` or `what`."""
        if self._bar is not None:
            self._bar.update(**fields)


_REST_OF_THE_LINE = 50  # "12/40 racing 12, best 103 µs (1.58×) 59.0 s left", with spaces


def time_left(seconds: float | None) -> str:
    """`12 s left`, or nothing if that is not known.

    >>> time_left(75), time_left(12), time_left(None)
    ('1 min 15 s left', '12 s left', '')
    """
    if seconds is None:
        return ""
    return f"{duration(seconds) if seconds >= 60 else f'{seconds:.0f} s'} left"


class _TerminalBar:
    """The bar where there is a terminal; gone when it is stopped."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        class TimeLeft(TextColumn):
            """What is left of this step, at its pace so far."""

            def render(self, task: Task) -> Text:
                return Text(time_left(task.time_remaining))

        console = Console(stderr=True)
        # The name gives way first: what is being done, and how far it is, is what people look for.
        bar = 40 if console.width >= 120 else 8
        room = max(12, console.width - bar - _REST_OF_THE_LINE)
        name = name if len(name) <= room else f"{name[: room - 1]}…"
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=bar),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TimeLeft(""),
        )
        self._progress = RichProgress(*columns, console=console, transient=True)
        self._progress.start()
        self._task = self._progress.add_task(escape(one_line(name)), total=None, what="")

    def update(self, **fields: Any) -> None:
        self._progress.update(self._task, **fields)

    def stop(self) -> None:
        self._progress.stop()


SECONDS_BETWEEN = 0.1  # a notebook that is told more often becomes slow, not smooth


class NotebookBar:
    """A name, a bar, what happens now and for how long; gone when it is stopped."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        from IPython.display import display

        self._name = name
        self._clock = clock
        self._start = self._step = self._drawn = clock()
        self._total: float | None = None
        self._completed = 0.0
        self._what = ""
        self._handle: Any = display(self._shown(), raw=True, display_id=True)

    def update(
        self,
        total: float | None = None,
        completed: float | None = None,
        advance: float = 0,
        what: str | None = None,
    ) -> None:
        """Show another total, how much is done (or how much more), or what happens now."""
        self._total = self._total if total is None else total
        self._completed = (self._completed if completed is None else completed) + advance
        new_phase = what is not None and total is not None
        self._step = self._clock() if new_phase else self._step
        self._what = self._what if what is None else what
        if new_phase or self._clock() - self._drawn >= SECONDS_BETWEEN:
            self._drawn = self._clock()
            self._handle.update(self._shown(), raw=True)

    def stop(self) -> None:
        """Take the bar away."""
        self._handle.update({"text/html": "", "text/plain": ""}, raw=True)

    def _left(self) -> float | None:
        """Seconds that this step needs yet, at its pace so far."""
        if not self._total or not 0 < self._completed < self._total:
            return None
        return (self._total / self._completed - 1) * (self._clock() - self._step)

    def _shown(self) -> dict[str, str]:
        """HTML, and nothing for what shows plain text."""
        known = self._total is not None
        done = f"{self._completed:g}/{self._total:g}" if known else ""
        html = tag(
            "div",
            tag("code", self._name),
            " ",
            tag(
                "progress",
                max=self._total if known else None,
                value=self._completed if known else None,
                aria_label=self._name,
                style="width:12em;vertical-align:middle",
            ),
            f" {done} {self._what} {self._clock() - self._start:.0f} s",
            f", {time_left(self._left())}" if self._left() is not None else None,
        )
        return {"text/html": html, "text/plain": ""}


class Progress(Bar):
    """Shows how far a tuning run is, and tells listeners of each step, as `Tuner` describes."""

    def __init__(
        self, name: str, wanted: bool | None = None, on_step: Callable[..., None] | None = None
    ) -> None:
        operation, bracket, call = name.partition("(")
        brief = f"{operation}({shortened(call.removesuffix(')'))})" if bracket else name
        super().__init__(brief, wanted)
        self._whole_name = name
        self.listeners = [] if on_step is None else [on_step]

    def building(self, count: int) -> None:
        """So many candidates are about to be compiled and checked."""
        self.update(total=count, completed=0, what="compiling and checking")
        self._tell("build", candidates=count)

    def built(self, cfg: Any) -> None:
        """One more candidate is ready to race."""
        self.update(advance=1)
        self._tell("candidate", cfg=cfg, verdict="ready", reason="")

    def refused(self, trial: Trial[Any]) -> None:
        """One more candidate cannot be used."""
        self.update(advance=1)
        self._tell("candidate", cfg=trial.cfg, verdict=trial.verdict.value, reason=trial.reason)

    def racing(self, count: int, rounds: int) -> None:
        """So many candidates race over so many rounds at most."""
        self.update(total=rounds, completed=0, what=f"racing {count}")
        self._tell("race", candidates=count, rounds=rounds)

    def round(
        self, running: int, done: int, best: float | None = None, speedup: float | None = None
    ) -> None:
        """A round is over, with so many still running; the best time, and over the heuristic."""
        what = f"racing {running}"
        if best is not None:
            what += f", best {duration(best)}"
        if speedup is not None:
            what += f" ({times(speedup)})"
        self.update(completed=done, what=what)
        self._tell("round", running=running, done=done)

    def timing_plain(self) -> None:
        """The race is decided; plain JAX is timed with the winner."""
        self.update(what="timing plain JAX")

    def _tell(self, step: str, **data: Any) -> None:
        for listener in self.listeners:
            try:
                listener(step, name=self._whole_name, **data)
            except Exception:
                # A listener is a guest: what it does wrong is said, and the run goes on.
                logger.exception("ejkernel: on_step raised for %r of %s", step, self._whole_name)
