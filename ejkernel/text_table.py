"""Tables as lines of text: one line per row where it fits, details under it where it does not.

For terminals, logs and what `print` shows of a result. Needs nothing, JAX least of all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

WIDTH = 80
"""Columns of a terminal that nobody has made wider."""


Kind = Literal["header", "row", "detail"]


class Line(NamedTuple):
    """A line of a table, and what it is: a terminal may show each kind in its own way."""

    text: str
    kind: Kind


def table_lines(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    details: int = 0,
    width: int = WIDTH,
    wrap: bool = True,
) -> list[Line]:
    """A table that reads well on a screen of `width` columns.

    Args:
      header: the columns' names; all of them empty: no header.
      rows: the cells, one for each column.
      right: the numbers of the columns that are aligned to the right.
      details: so many of the last columns go under the line, each with its name, if the table is
        too wide. Empty cells and dashes are then left out.
      width: the columns of the screen.
      wrap: put texts that are still too long on several lines. Not for what goes to a log, where
        somebody may look for a sentence.

    >>> rows = [("matmul@v1", "65.2 µs", "1.58×", "block=64 stages=3")]
    >>> header = ("operation", "tuned", "speedup", "config")
    >>> for line in table_lines(header, rows, details=1, width=40):
    ...     print(line.text)
    operation  tuned    speedup
    ---------  -------  -------
    matmul@v1  65.2 µs  1.58×
      config  block=64 stages=3
    """
    widths = [max(map(len, column), default=0) for column in zip(header, *rows, strict=True)]
    if _natural(widths) <= width:
        details = 0
    above = len(widths) - details
    # The last column may be wrapped. If that is not enough, the first one gets lines of its own.
    last, wraps = above - 1, above - 1 not in right
    needed = _natural([*widths[:last], min(widths[last], _LEAST) if wraps else widths[last]])
    apart = last > 1 and needed > width
    columns, indent = range(int(apart), last), "  " if apart else ""
    room = width - len(indent) - sum(widths[i] + 2 for i in columns)
    most = width if wrap else _ENDLESS
    longest = max((len(name) for name in header[above:]), default=0)

    def one(cells: Sequence[str], kind: Kind) -> Iterator[Line]:
        if apart:
            yield Line(cells[0], kind)
        begin = indent + "".join(f"{_padded(cells[i], widths[i], i in right)}  " for i in columns)
        if wraps and room >= _LEAST:
            yield from _wrapped(cells[last], begin, most, kind)
        else:
            yield Line((begin + _padded(cells[last], widths[last], not wraps)).rstrip(), kind)
        for name, cell in zip(header[above:], cells[above:], strict=True):
            if kind == "row" and cell not in ("", "-", "–"):
                yield from _wrapped(cell, f"  {name.ljust(longest)}  ", most, "detail")

    lines: list[Line] = []
    if any(header):
        lines += one(header, "header")
        rules = [*(widths[i] for i in columns), min(widths[last], max(room, _LEAST))]
        lines.append(Line(indent + "  ".join("-" * rule for rule in rules), "header"))
    for row in rows:
        lines += one(row, "row")
    return lines


_LEAST = 24  # columns that a text needs to be wrapped in
_ENDLESS = 10**9


def _natural(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * max(0, len(widths) - 1)


def _padded(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _wrapped(text: str, begin: str, width: int, kind: Kind) -> Iterator[Line]:
    """A text after `begin`, on as many lines as it needs; only whole words go to the next one.

    Those lines are marked: no text, whoever wrote it, looks like a line of ours.
    """
    parts = textwrap.wrap(
        text, max(_LEAST, width - len(begin)), break_long_words=False, break_on_hyphens=False
    )
    again = " " * (len(begin) - 2) + "… "
    for number, part in enumerate(parts or [""]):
        yield Line(f"{again if number else begin}{part}".rstrip(), kind)
