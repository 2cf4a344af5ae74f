"""For the documentation site: examples in docstrings (`>>>`, `::`) are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

# Lines that begin with a prompt, and what follows them until an empty line.
EXAMPLE = re.compile(r"(?m)^( *)>>> .*(?:\n\1.*\S.*)*")
# `::` before an indented block, alone or at the end of a sentence: Markdown needs none.
INTRODUCED = re.compile(r"(?m)^ *::\n|(?<=[^\s:]:):$")


class DoctestsAsCode(griffe.Extension):
    """Put a fence around every doctest."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            text = EXAMPLE.sub(_fenced, obj.docstring.value)
            obj.docstring.value = INTRODUCED.sub("", text)


def _fenced(example: re.Match[str]) -> str:
    indent = example[1]
    return f"{indent}```pycon\n{example[0]}\n{indent}```"
