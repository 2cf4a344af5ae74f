"""What a person looks at after a tuning run: one file, in HTML, Markdown or JSON.

::

    from ejkernel import report

    result = autotune_lowered(selector, lowered)
    report.write(report.Run.of(result, title="My model", store=store), "tuning.html")

`Run` is the record of a run; it is saved and loaded as JSON, and shown without JAX. The HTML is one
file that needs no network.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import TYPE_CHECKING, Any, Literal

from .diff import Diff
from .plain import NotARun, plain
from .record import (
    BeforeAfter,
    Candidate,
    CountedWork,
    Gain,
    NotTuned,
    Operation,
    Roofline,
    Run,
)

if TYPE_CHECKING:
    from ..ops import AutotuningResult
    from .before_after import before_and_after

__all__ = [
    "FORMATS",
    "BeforeAfter",
    "Candidate",
    "CountedWork",
    "Diff",
    "Gain",
    "NotARun",
    "NotTuned",
    "Operation",
    "Roofline",
    "Run",
    "before_and_after",
    "render",
    "write",
]


Format = Literal["html", "md", "json"]
FORMATS: tuple[Format, ...] = ("html", "md", "json")


def render(run: Run | Diff | AutotuningResult, format: Format = "html") -> str:
    """A run, what tuning gave back, or two runs compared, as text: HTML, Markdown, or JSON.

    >>> print(render(Run("An example", "cpu|x|2-threads", "2026-01-01"), "md").splitlines()[0])
    # Tuning report: An example
    """
    if format not in FORMATS:
        raise ValueError(
            f"report: format={format!r} is not known; it is one of {', '.join(FORMATS)}"
        )
    if isinstance(run, Diff):
        return _render_diff(run, format)
    record = run if isinstance(run, Run) else Run.of(run)
    if format == "json":
        return record.dumps()
    from . import html, markdown

    return html.page(record) if format == "html" else markdown.page(record)


def _render_diff(diff: Diff, format: Format) -> str:
    if format == "json":
        return json.dumps(plain(diff), indent=1, allow_nan=False)
    from . import diff_html, diff_markdown

    return diff_html.page(diff) if format == "html" else diff_markdown.page(diff)


def write(
    run: Run | Diff | AutotuningResult, path: str | os.PathLike[str], format: Format | None = None
) -> pathlib.Path:
    """Write a report; the file is there whole or not at all. Gives its path.

    `format` is `"html"`, `"md"` or `"json"`; None: what the path's ending says, else HTML.
    """
    from ..store.private import write_whole

    file = pathlib.Path(path)
    if format is None:
        ending = file.suffix.lower().lstrip(".")
        format = next((known for known in FORMATS if known == ending), None)
    write_whole(file, render(run, format or "html"))
    return file


def __getattr__(name: str) -> Any:
    if name == "before_and_after":  # it runs programs: the only part that needs JAX at once
        from .before_after import before_and_after

        return before_and_after
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
