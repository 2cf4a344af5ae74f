"""A run in the format that is asked for."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Literal

from .record import Run

if TYPE_CHECKING:
    from ..ops import AutotuningResult

Format = Literal["html", "md", "json"]
FORMATS: tuple[Format, ...] = ("html", "md", "json")


def render(run: Run | AutotuningResult, format: Format = "html") -> str:
    """A run, or what tuning gave back, as text: one whole HTML page, Markdown, or JSON.

    >>> print(render(Run("An example", "cpu|x|2-threads", "2026-01-01"), "md").splitlines()[0])
    # Tuning report: An example
    """
    if format not in FORMATS:
        raise ValueError(
            f"report: format={format!r} is not known; it is one of {', '.join(FORMATS)}"
        )
    record = run if isinstance(run, Run) else Run.of(run)
    if format == "json":
        return record.dumps()
    if format == "md":
        from .markdown import page as markdown_page

        return markdown_page(record)
    from .html import page

    return page(record)


def write(
    run: Run | AutotuningResult, path: str | os.PathLike[str], format: Format | None = None
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
