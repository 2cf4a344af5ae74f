"""What a command prints: tables for a person, JSON for a program, in one place.

Everything is made into text first and written at once, so that a reader who goes away (`| head`)
is met in one place only. Rich is imported when something is shown. Times, factors and configs look
as everywhere: `ejkernel.formatting`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..markup import one_line, printable
from ..report.plain import plain
from ..text_table import table_lines

WIDE = 100_000  # columns of a pipe: a line is never broken there


@dataclasses.dataclass
class State:
    """What holds for the whole command: how to answer, and what to do with an error."""

    as_json: bool = False
    debug: bool = False
    verbosity: int = 0

    def result(self, data: Any, *shown: Any) -> None:
        """Answer: `data` with `--json`, else what is shown (texts, tables)."""
        write(json.dumps(plain(data), indent=1) + "\n" if self.as_json else rendered(*shown))


def write(text: str) -> None:
    """Write to the standard output, now: a broken pipe is raised here and not at the exit."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Say something apart from the answer: on the standard error, where no program reads it."""
    sys.stderr.write(_for_reading(text) + "\n")
    sys.stderr.flush()


def end_line() -> None:
    """Leave the line on which a terminal shows `^C`."""
    if sys.stderr.isatty():
        note("")


def _for_reading(text: str) -> str:
    """A text for the standard error: in a terminal, no word is broken at the end of a line."""
    text = printable(text, keep="\n\t")
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def complain(message: str) -> None:
    """Say what went wrong, on the standard error: `error: …`, in red if it is a terminal."""
    text = _for_reading(f"error: {message}")
    if sys.stderr.isatty():
        from rich.console import Console

        if not Console(stderr=True).no_color:  # NO_COLOR, as Rich reads it
            text = text.replace("error:", "\x1b[1;31merror:\x1b[0m", 1)
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def working(what: str, wanted: bool | None = None) -> Iterator[None]:
    """Show that something takes its time, in a terminal: nobody waits before an empty screen."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(one_line(what), total=None)
        yield


def rendered(*shown: Any) -> str:
    """Texts and tables as text: with colours in a terminal that wants them, plain elsewhere."""
    from rich.console import Console

    terminal, usual, text = sys.stdout.isatty(), Console(), io.StringIO()
    console = Console(
        file=text,
        force_terminal=terminal and not usual.no_color,  # NO_COLOR, as Rich reads it
        no_color=usual.no_color,
        width=usual.width if terminal else WIDE,
        markup=False,  # `float32[8]` is no markup
        highlight=False,
        emoji=False,
        soft_wrap=not terminal,
    )
    for item in shown:
        if item is not None:
            console.print(printable(item, keep="\n") if isinstance(item, str) else item)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


class _WithDetails:
    """A table whose last columns go under each line where the terminal is too narrow for them."""

    def __init__(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[int],
        details: int,
    ) -> None:
        self._table = header, [[one_line(cell) for cell in row] for row in rows]
        self._right, self._details = right, details

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        header, rows = self._table
        columns = zip(header, *rows, strict=True)
        if sum(max(map(len, column)) + 3 for column in columns) - 3 <= options.max_width:
            yield table(header, rows, self._right)
            return
        styles = {"header": "bold", "row": "", "detail": "dim"}
        for line in table_lines(
            header, rows, right=self._right, details=self._details, width=options.max_width
        ):
            yield Text(line.text, style=styles[line.kind])


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Sequence[int] = (),
    details: int = 0,
) -> Any:
    """A table: one line per row in a pipe, folded to the width of a terminal; None without rows.

    So many of the last columns are `details`: on a narrow terminal they go under the line.
    """
    from rich import box
    from rich.table import Table

    rows = list(rows)
    if details and rows:
        return _WithDetails(header, rows, right, details)
    made = Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        show_edge=False,
        show_header=any(header),
    )
    for number, name in enumerate(header):
        made.add_column(name, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(c if hasattr(c, "__rich_console__") else one_line(c) for c in row))
    return made if made.row_count else None


def styled(text: str, style: str) -> Any:
    """A text in a colour."""
    from rich.text import Text

    return Text(one_line(text), style=style)


def fields_of(objects: Iterable[Any], *names: str) -> list[dict[str, Any]]:
    """Some attributes of each object, for JSON."""
    return [{name: getattr(item, name) for name in names} for item in objects]
