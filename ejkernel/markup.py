"""Text, HTML and Markdown that cannot be broken from inside: what is not markup already is escaped.

Names of operations, fields of configs and errors may come from a store, a bundle or a program that
somebody else made. Used wherever they are shown; needs nothing, JAX least of all.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Also what makes a link of a bare address, and what makes a list or a rule of a line's beginning.
_MARKDOWN = re.compile(
    r"([\\`*_{}\[\]<>|~&$#!]|:(?=//)|(?<=www)\.|(?<!\w)@|^[-+=](?=[-=\s]))", re.IGNORECASE
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s)")
_EMPTY = frozenset({"meta", "link", "circle", "line", "rect"})


def printable(text: str, keep: str = "") -> str:
    """Text that a terminal shows and does not obey: control characters as escapes, also those that
    turn the direction of writing.

    >>> print(printable("\\x1b[31mred\\u202e\\n"))
    \\x1b[31mred\\u202e\\n
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def one_line(value: Any) -> str:
    """A value as printable text that adds no line to where it is shown.

    >>> one_line("two\\nlines")
    'two lines'
    """
    return printable(" ".join(str(value).split("\n")))


class Markup(str):
    """Text that is HTML already; only `tag`, `text` and `joined` make it of something else."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """A value as text: names of kernels, errors of compilers and the like come through here."""
    if isinstance(value, Markup):
        return value
    # Characters that no HTML document may hold would make it a broken one.
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )
    return Markup(html.escape(shown, quote=True))


def joined(parts: Iterable[Any]) -> Markup:
    """Parts one after the other, each escaped unless it is markup."""
    return Markup("".join(text(part) for part in parts if part is not None))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element; attributes that are None or False are left out, `data_tip` is `data-tip`.

    >>> print(tag("p", "1 < 2 ", tag("b", "&"), class_="x", hidden=False))
    <p class="x">1 &lt; 2 <b>&amp;</b></p>
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def escaped_markdown(text: str) -> str:
    """Text that Markdown shows as it is, in one line.

    >>> print(escaped_markdown("a|b_c <b>"))
    a\\|b\\_c \\<b\\>
    """
    escaped = _MARKDOWN.sub(r"\\\1", printable(" ".join(text.split())))
    return _NUMBERED.sub(r"\1\\\2", escaped)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """Lines of a table whose cells are Markdown already; some columns aligned to the right."""
    rule = ["---:" if i in right else "---" for i in range(len(header))]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
