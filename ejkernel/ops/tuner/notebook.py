"""A progress bar in a notebook: one output that is drawn again, with nothing to install.

Rich's own needs ipywidgets there, and says so instead of showing anything. A display that is
updated is part of IPython itself, and shown by Jupyter, Colab and editors alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ...markup import Markup, tag

SECONDS_BETWEEN = 0.1  # a notebook that is told more often becomes slow, not smooth


def in_notebook() -> bool:
    """True if the code runs in a notebook's kernel; IPython is not loaded to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A name, a bar, what happens now and for how long; gone when it is stopped."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        from IPython.display import display

        self._name = name
        self._clock = clock
        self._start = self._drawn = clock()
        self._total: float | None = None
        self._completed = 0.0
        self._what = ""
        self._handle: Any = display(_Html(self._html()), display_id=True)

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
        self._what = self._what if what is None else what
        if new_phase or self._clock() - self._drawn >= SECONDS_BETWEEN:
            self._drawn = self._clock()
            self._handle.update(_Html(self._html()))

    def stop(self) -> None:
        """Take the bar away."""
        self._handle.update(_Html(Markup("")))

    def _html(self) -> Markup:
        known = self._total is not None
        done = f"{self._completed:g}/{self._total:g}" if known else ""
        return tag(
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
        )


class _Html:
    """What a notebook shows as HTML, and anything else as nothing."""

    def __init__(self, html: Markup) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return ""
