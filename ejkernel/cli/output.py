"""What a command prints: tables for a person, JSON for a program, in one place.

Everything is made into text first and written at once, so that a reader who goes away (`| head`)
is met in one place only. Rich is imported when something is shown. Times, factors and configs look
as in a report: `report.formatting`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ..markup import one_line, printable
from ..report.plain import plain

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
    sys.stderr.write(printable(text, keep="\n\t") + "\n")
    sys.stderr.flush()


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


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> Any:
    """A table: one line per row in a pipe, folded to the width of a terminal; None without rows."""
    from rich import box
    from rich.table import Table

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
