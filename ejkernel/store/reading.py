"""Files that anybody may have written, read with care: regular files of a bounded size, as JSON of
a bounded depth.

A path may lead to a pipe that never ends or to a device, and a text may be nested deeper than
Python's stack. `read_regular` and `parse_json` return a value, or raise a `ValueError` or `OSError`
that says what is wrong, and never anything else.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import reprlib
import stat
from typing import Any

LARGEST = 64 * 2**20
"""Bytes of the largest file that is read: tens of thousands of entries."""

DEEPEST = 50
"""Levels of nested brackets: an entry has less than ten."""

MOST_OBJECTS = 2_000_000
"""Objects and lists in one file: an entry with all its trials has some hundreds."""

READ_ONLY = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""How a file is opened to be read, without waiting for the other end of a pipe."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}
_STRING = re.compile(r'"[^"]*"')
_BRACKETS = re.compile(r"[^\[\]{}]+")


def shown(value: Any, longest: int = 80) -> str:
    """A value for a message: short, however large or deep it is."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = shortened.maxlong = longest
    try:
        return shortened.repr(value)
    except ValueError:  # an int of thousands of digits
        return f"a {type(value).__name__}"


# --- files ---------------------------------------------------------------------------------------


def not_regular(status: os.stat_result) -> str | None:
    """What a path leads to if that is no regular file, in words."""
    if stat.S_ISREG(status.st_mode):
        return None
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    return f"it is {kind}, not a regular file"


def read_regular(path: str | os.PathLike[str], *, limit: int = LARGEST) -> bytes:
    """The bytes of a regular file, of which there are not more than `limit`.

    Raises `OSError` if it cannot be opened, and `ValueError` if it is no such file. Nothing is
    waited for.
    """
    reason = not_regular(os.stat(path))  # not opened for this: opening a device may do something
    if reason is not None:
        raise ValueError(reason)
    with open(path, "rb", buffering=0, opener=lambda path, _: os.open(path, READ_ONLY)) as file:
        return read_descriptor(file.fileno(), limit=limit)


def read_descriptor(descriptor: int, *, limit: int = LARGEST) -> bytes:
    """The bytes of an open regular file; see `read_regular`."""
    status = os.fstat(descriptor)
    reason = not_regular(status)
    if reason is not None:
        raise ValueError(reason)
    data = bytearray()
    if status.st_size <= limit:
        # To the end, whatever its size: it may grow, and some of the system's say that it is 0.
        while len(data) <= limit and (chunk := os.read(descriptor, 2**20)):
            data += chunk
    if max(status.st_size, len(data)) > limit:
        raise ValueError(f"it has more than {limit:,} bytes, the most that is read")
    return bytes(data)


# --- JSON ----------------------------------------------------------------------------------------


def parse_json(data: str | bytes, *, nan: bool = False, deepest: int = DEEPEST) -> Any:
    """The value of a JSON text. Raises `ValueError`, whatever the text is.

    Refused are also a name that an object has twice, brackets nested more than `deepest`, and
    (without `nan`) the numbers that JSON has no word for.

    >>> parse_json('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        check_depth(text, deepest)
        constant = float if nan else _no_such_number
        number = float if nan else _finite
        return json.loads(
            text, parse_constant=constant, parse_float=number, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise ValueError(f"it is no text, at least not text in UTF-8: {where}") from None
    except RecursionError:  # the caller's own stack is nearly full
        raise ValueError("it is nested too deeply to be read here") from None
    except MemoryError:
        raise ValueError("there is not enough memory to read it") from None


def check_depth(text: str, deepest: int) -> None:
    """Raise a `ValueError` if brackets are nested too deep, before anything descends into them."""
    objects = text.count("{") + text.count("[")
    if objects > MOST_OBJECTS:  # each takes a hundred times the memory of its two characters
        raise ValueError(f"it holds {objects:,} objects and lists; {MOST_OBJECTS:,} is most")
    bare = _STRING.sub("", text.replace("\\\\", "").replace('\\"', ""))
    left = _BRACKETS.sub("", bare).replace("{", "[").replace("}", "]")
    for _ in range(deepest):  # each round takes the innermost away
        if not left:
            return
        left = left.replace("[]", "")
    if "[]" in left or len(left) > deepest:  # else they do not match, and the parser says where
        raise ValueError(f"its brackets are nested more than {deepest} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
    raise ValueError(f"an object has the name {shown(twice)} twice")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_such_number(shown(digits))


def _no_such_number(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")
