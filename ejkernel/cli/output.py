"""What a command prints: tables for a person, JSON for a program, in one place.

Everything is made into text first and written at once, so that a reader who goes away (`| head`)
is met in one place only. Rich is imported when something is shown.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..markup import one_line, printable

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 100_000  # columns of a pipe: a line is never broken there


@dataclasses.dataclass
class State:
    """What holds for the whole command: how to answer, and what to do with an error."""

    as_json: bool = False
    debug: bool = False
    verbosity: int = 0

    def result(self, data: Any, *shown: Any) -> None:
        """Answer: `data` with `--json`, else what is shown (texts, tables)."""
        if self.as_json:
            write(json.dumps(plain(data), indent=1) + "\n")
        else:
            write(rendered(*shown))


def write(text: str) -> None:
    """Write to the standard output, now: a broken pipe is raised here and not at the exit."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Say something apart from the answer: on the standard error, where no program reads it."""
    sys.stderr.write(printable(text, keep="\n") + "\n")
    sys.stderr.flush()


def plain(value: Any) -> Any:
    """Data as JSON has it; numbers that it has no word for become null, other things text."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


def rendered(*shown: Any) -> str:
    """Texts and tables as text: with colours in a terminal that wants them, plain elsewhere."""
    terminal = sys.stdout.isatty()
    console = _console(terminal)
    for item in shown:
        console.print(printable(item, keep="\n") if isinstance(item, str) else item)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _console(terminal: bool) -> Console:
    from rich.console import Console

    width = Console().width if terminal else WIDE
    colourless = Console().no_color  # NO_COLOR, as Rich reads it
    return Console(
        file=io.StringIO(),
        force_terminal=terminal and not colourless,
        no_color=colourless,
        width=width,
        markup=False,  # `float32[8]` is no markup
        highlight=False,
        emoji=False,
        soft_wrap=not terminal,
    )


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> Any:
    """A table: one line per row in a pipe, folded to the width of a terminal."""
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
        made.add_column(
            name, justify="right" if number in right else "left", overflow="fold", no_wrap=False
        )
    for row in rows:
        made.add_row(*(c if hasattr(c, "__rich_console__") else one_line(c) for c in row))
    return made


def styled(text: str, style: str) -> Any:
    """A text in a colour."""
    from rich.text import Text

    return Text(one_line(text), style=style)


def inert(value: Any) -> Any:
    """Data from a store or a bundle, to be shown: every text in it in one line, and printable."""
    if isinstance(value, Mapping):
        return {one_line(name): inert(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [inert(item) for item in value]
    return one_line(value) if isinstance(value, str) else value


def brief(config: Any) -> str:
    """A config as plain data, short, without what is None: `fwd(q_blocksize=64) rows=8`."""
    if not isinstance(config, Mapping):
        return json.dumps(config) if isinstance(config, (list, str)) else str(config)
    parts = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            parts.append(f"{name}({brief(value)})")
        elif value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def counted(number: int, what: str) -> str:
    """`1 entry`, `2 entries`."""
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what}"


def milliseconds(seconds: Any) -> str:
    """`1.234 ms`, or a dash for nothing measured."""
    return f"{seconds * 1e3:.4g} ms" if isinstance(seconds, (int, float)) else "-"


def ratio(seconds: Any, heuristic: Any) -> str:
    """How many times as fast: `1.32x`, or a dash."""
    numbers = isinstance(seconds, (int, float)) and isinstance(heuristic, (int, float))
    return f"{heuristic / seconds:.2f}x" if numbers and seconds > 0 else "-"
