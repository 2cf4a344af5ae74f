"""Tables for people, in a terminal, a log file or a notebook.

Whatever a text holds, it is shown and not obeyed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...markup import escaped_markdown, markdown_table, one_line, tag


@dataclasses.dataclass(frozen=True)
class Shown:
    """A table to be shown: texts only.

    Attributes:
      title: what stands above it.
      header: the columns' names; none of them: no header.
      rows: the cells.
      right: the columns that are aligned to the right.
      notes: what stands below it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()
    notes: Sequence[str] = ()

    def html(self) -> str:
        """The table as HTML."""

        def line(cells: Sequence[str], kind: str) -> str:
            sides = ["right" if i in self.right else "left" for i in range(len(cells))]
            return tag(
                "tr",
                *(
                    tag(kind, cell, style=f"text-align:{side}")
                    for cell, side in zip(cells, sides, strict=True)
                ),
            )

        head = tag("thead", line(self.header, "th")) if any(self.header) else None
        return tag(
            "div",
            tag("p", tag("b", self.title)) if self.title else None,
            tag("table", head, tag("tbody", *(line(row, "td") for row in self.rows))),
            *(tag("p", tag("small", note)) for note in self.notes),
            class_="ejkernel",
        )

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"**{escaped_markdown(self.title)}**", ""] if self.title else []
        rows = [[escaped_markdown(cell) for cell in row] for row in self.rows]
        lines += markdown_table([escaped_markdown(name) for name in self.header], rows, self.right)
        for note in self.notes:
            lines += ["", escaped_markdown(note)]
        return "\n".join(lines)


class Displayed:
    """Something that a notebook shows as a table."""

    def _shown(self) -> Shown:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _repr_markdown_(self) -> str:
        return self._shown().markdown()


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> str:
    """Columns as wide as their content; those numbered in `right` are aligned to the right."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def as_text(shown: Shown) -> str:
    """A table for a terminal or a log file."""
    rows = [[one_line(cell) for cell in row] for row in shown.rows]
    title = [one_line(shown.title)] if shown.title else []
    table = text_table(shown.header, rows, shown.right)
    return "\n".join([*title, table, *map(one_line, shown.notes)])


def brief(cfg: Any) -> str:
    """A config without the fields that are None and without class names: `block=64`."""
    if not dataclasses.is_dataclass(cfg) or isinstance(cfg, type):
        return str(cfg)
    shown = []
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            shown.append(f"{field.name}({brief(value)})")
        elif value is not None:
            shown.append(f"{field.name}={value}")
    return " ".join(shown)


def milliseconds(seconds: float | None) -> str:
    """`1.234 ms`, or a dash for nothing measured."""
    return "–" if seconds is None else f"{seconds * 1e3:.4g} ms"
