"""Tables for people, in a terminal, a log file or a notebook.

Whatever a text holds, it is shown and not obeyed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Self

from ...markup import escaped_markdown, markdown_table, one_line, tag
from ...text_table import WIDTH, table_lines


@dataclasses.dataclass(frozen=True)
class Shown:
    """A table to be shown: texts only.

    Attributes:
      title: what stands above it.
      header: the columns' names; none of them: no header.
      rows: the cells.
      right: the columns that are aligned to the right.
      notes: what stands below it.
      details: so many of the last columns stand under their row where the screen is narrow.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()
    notes: Sequence[str] = ()
    details: int = 0

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


class Explanation(str):
    """A text for a person. It is a string in every way; a notebook shows it as a table.

    >>> text = Explanation("why\\n  because", Shown("why", ("", ""), [("", "because")]))
    >>> text.splitlines()[1], "<table>" in text._repr_html_()
    ('  because', True)
    """

    def __new__(cls, text: str, *tables: Shown) -> Self:
        """The text, and what is shown of it where there are tables."""
        made = super().__new__(cls, text)
        made._tables = tables
        return made

    _tables: tuple[Shown, ...]

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables)

    def _repr_markdown_(self) -> str:
        return "\n\n".join(table.markdown() for table in self._tables)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def in_notebook() -> bool:
    """True if the code runs in a notebook's kernel; IPython is not loaded to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def show(thing: Displayed) -> None:
    """Print something, or in a notebook show it as a table."""
    if in_notebook():
        from IPython.display import display

        display(thing)
    else:
        print(thing)


def as_text(shown: Shown, width: int = WIDTH) -> str:
    """A table for a terminal or a log file: details under their row, if it is too wide."""
    rows = [[one_line(cell) for cell in row] for row in shown.rows]
    title = [one_line(shown.title)] if shown.title else []
    lines = table_lines(
        shown.header,
        rows,
        right=shown.right,
        details=shown.details,
        width=width,
        wrap=False,
    )
    return "\n".join([*title, *(line.text for line in lines), *map(one_line, shown.notes)])
