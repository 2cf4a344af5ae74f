"""Tables as notebooks show them: small, and whatever a text holds, it is shown and not obeyed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...markup import escaped_markdown, markdown_table, tag


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
