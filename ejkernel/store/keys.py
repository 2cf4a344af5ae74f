"""Keys as three columns of text, and back.

A key is `(device, op_id, call_key)` or one text. Any text is allowed, but a database server takes
neither the zero character nor half of a surrogate pair, so those are escaped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

Key = tuple[str, str, str] | str

LONGEST = 2000  # bytes of a whole key: what fits into an index of every database

_TEXT_KEY = "\\key"  # escaping makes no such text, so no device has this name
_AWKWARD = re.compile("[\\\\\x00\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(\\|x00|u[0-9a-f]{4})")


class Columns(NamedTuple):
    """Where a key is in the table."""

    device: str
    op_id: str
    call_key: str


def to_columns(key: Key) -> Columns:
    """The columns of a key; `TypeError` if it is not one, `ValueError` if it is too long."""
    if isinstance(key, str):
        columns = Columns(_TEXT_KEY, "", _escaped(key))
    elif isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key):
        columns = Columns(*map(_escaped, key))
    else:
        raise TypeError(
            f"PersistentCache keys are (device, op_id, call_key), all text, or one text; got "
            f"{key!r} ({type(key).__name__})"
        )
    if sum(len(part.encode()) for part in columns) > LONGEST:
        raise ValueError(f"the key {str(key)[:60]!r}… is too long; {LONGEST} bytes are allowed")
    return columns


def from_columns(device: str, op_id: str, call_key: str) -> Key:
    """The key of a row."""
    if device == _TEXT_KEY:
        return _plain(call_key)
    return (_plain(device), _plain(op_id), _plain(call_key))


def storable(text: str) -> str:
    """A readable text for any text, without what a database cannot hold. Not reversible."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


def _escaped(text: str) -> str:
    return _AWKWARD.sub(_escape, text) if _AWKWARD.search(text) else text


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character == "\\":
        return "\\\\"
    return "\\x00" if character == "\x00" else f"\\u{ord(character):04x}"


def _plain(text: str) -> str:
    return _ESCAPE.sub(_unescape, text) if "\\" in text else text


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    return "\\" if code == "\\" else chr(int(code[1:], 16))
