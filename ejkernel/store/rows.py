"""Keys, entries and trials as rows of the tables, and back as plain data.

A key is `(device, op_id, call_key)` or one text. Any text is allowed, but a database server takes
neither the zero character nor half of a surrogate pair, so those are escaped.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .errors import StoreError
from .reading import DEEPEST, check_depth, parse_json, shown

COMPILERS = ("jax", "jaxlib", "backend")
"""Of the versions of an entry, those that make the program: another one makes other timings."""

LARGEST_VALUE = 8 * 2**20
"""Bytes of the largest value that is stored or read: they have some thousand."""

NOT_TRIED = "not tried"
"""The verdict that says nothing: it never takes the place of one that does."""

_COLUMNS: dict[str, type] = {
    **dict.fromkeys(("signature", "measured", "incomplete", "source", "when", "where"), str),
    **dict.fromkeys(("seconds", "heuristic_seconds"), float),
    **dict.fromkeys(("call", "versions"), dict),
}
"""What is known about an entry and has a column of its own; a number may be whole too."""

_KINDS: dict[str, type] = {
    **_COLUMNS,
    **{"clock": str, "target": str, "took": float, "tried": int},
    **dict.fromkeys(("trials", "ranked", "refused", "notes", "speedup"), list),
    **dict.fromkeys(("work", "plain"), dict),
}


def now() -> str:
    """This moment, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# --- keys ----------------------------------------------------------------------------------------

StoreKey = tuple[str, str, str] | str

LONGEST_KEY = 2000  # bytes: what fits into an index of every database

_TEXT_KEY = "\\key"  # escaping makes no such text, so no device has this name
_AWKWARD = re.compile("[\\\\\x00\ud800-\udfff]")
_ESCAPES = {"\\": "\\\\", "\x00": "\\x00"}
_ESCAPED = re.compile(r"\\(\\|x00|u[0-9a-f]{4})")


class Columns(NamedTuple):
    """Where a key is in the table."""

    device: str
    op_id: str
    call_key: str


def to_columns(key: StoreKey) -> Columns:
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
    if sum(len(part.encode()) for part in columns) > LONGEST_KEY:
        raise ValueError(f"the key {str(key)[:60]!r}… is too long; {LONGEST_KEY} bytes are allowed")
    return columns


def key_of(row: Mapping[str, Any]) -> StoreKey:
    """The key of a row. Raises `ValueError` if the row is damaged."""
    device, op_id, call_key = (_value(row, name, str) for name in Columns._fields)
    if device == _TEXT_KEY:
        return _plain(call_key)
    return (_plain(device), _plain(op_id), _plain(call_key))


def storable(text: str) -> str:
    """A readable text for any text, without what a database cannot hold. Not reversible."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


def _escaped(text: str) -> str:
    return _AWKWARD.sub(lambda match: _ESCAPES.get(match[0]) or f"\\u{ord(match[0]):04x}", text)


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda m: "\\" if m[1] == "\\" else chr(int(m[1][1:], 16)), text)


# --- entries -------------------------------------------------------------------------------------


def entry_row(
    key: StoreKey, config: Any, config_type: str, about: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of an entry and those of its trials. Raises `TypeError` for what is no plain data."""
    rest: dict[str, Any] = {"when": now(), "where": socket.gethostname(), **about}
    records = rest.pop("trials", None) or ()
    row: dict[str, Any] = {
        **to_columns(key)._asdict(),
        "config": _json(config, nan=False),
        "config_type": storable(config_type),
    }
    stored: dict[type, Callable[[Any], Any]] = {str: storable, float: float, dict: _json}
    for name, kind in _COLUMNS.items():
        row[name] = stored[kind](rest.pop(name)) if _is_of(kind, rest.get(name)) else None
    # These two always have a value, also if the caller gave something else than text.
    row["when"] = row["when"] or now()
    row["where"] = row["where"] or ""
    row["about"] = _json(rest)
    return row, _trial_rows(records, origin(about), row["when"])


def wrong_about(name: str, value: Any) -> bool:
    """True if something that is known about an entry is not of the kind that it always is.

    >>> wrong_about("seconds", "fast"), wrong_about("seconds", 0.1), wrong_about("mine", [1])
    (True, False, False)
    """
    return name in _KINDS and value is not None and not _is_of(_KINDS[name], value)


def _is_of(kind: type, value: Any) -> bool:
    if kind is int:
        return type(value) is int and value >= 0 and _is_number(value)
    return _is_number(value) if kind is float else isinstance(value, kind)


def sound_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """What is known about an entry, without what is not of its kind: a store holds anything."""
    return {name: value for name, value in about.items() if not wrong_about(name, value)}


def entry_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as plain data, from its row. Raises `ValueError` if the row is damaged."""
    stored = {name: kind for name, kind in _COLUMNS.items() if row[name] is not None}
    about = {name: _value(row, name, kind) for name, kind in stored.items()}
    return {
        "key": key_of(row),
        # A config says `{"$float": "nan"}`: a bare one would make a bundle that nobody can read.
        "config": _parsed(row["config"], "config", nan=False),
        "config_type": _value(row, "config_type", str),
        "about": {**about, **_value(row, "about", dict)},
    }


def origin(about: Mapping[str, Any]) -> str:
    """What made an entry's timings: those of one origin can be compared with each other.

    It is the kernel's source, what was measured, and what compiled it.
    """
    versions = about.get("versions")
    compilers = [versions.get(name) for name in COMPILERS] if isinstance(versions, dict) else None
    return _digest(_json([about.get("source"), about.get("measured"), compilers]))


# --- trials --------------------------------------------------------------------------------------


def _trial_rows(records: Iterable[Any], origin: str, when: str) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        if not isinstance(record, Mapping):
            raise TypeError(f"a trial is a mapping with its config and verdict, got {record!r}")
        rest = dict(record)
        config = _json(rest.pop("config", None))
        seconds = rest.pop("seconds", None)
        candidate = _digest(config)
        rows[candidate] = {
            "candidate": candidate,
            "origin": origin,
            "config": config,
            "verdict": storable(str(rest.pop("verdict", NOT_TRIED))),
            "seconds": float(seconds) if _is_number(seconds) else None,
            "samples_ns": _json(rest.pop("samples_ns", [])),
            "reason": storable(str(rest.pop("reason", ""))),
            "when": storable(str(rest.pop("when", when))),
            "about": _json(rest),
        }
    return list(rows.values())


def trial_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A trial as plain data, from its row. Raises `ValueError` if the row is damaged."""
    kinds = {"verdict": str, "samples_ns": list, "reason": str, "when": str}
    return {
        **_value(row, "about", dict),
        "config": _parsed(row["config"], "config"),
        "seconds": None if row["seconds"] is None else _value(row, "seconds", float),
        **{name: _value(row, name, kind) for name, kind in kinds.items()},
    }


# --- values --------------------------------------------------------------------------------------


_DEEPEST = DEEPEST - 4  # so deep stands a value in a bundle


def _json(value: Any, nan: bool = True) -> str:
    """A value as text that `_parsed` reads again."""
    try:
        # ASCII: every database holds it, and no character of a config can be lost on the way.
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=nan)
        check_depth(text, _DEEPEST)
    except ValueError as error:
        raise StoreError(f"a value cannot be stored: {error}") from error
    if len(text) > LARGEST_VALUE:
        raise StoreError(f"a value has {len(text):,} bytes; at most {LARGEST_VALUE:,} are stored")
    return text


def _parsed(text: Any, name: str, nan: bool = True) -> Any:
    if not isinstance(text, str):
        raise ValueError(f"its {name} is {shown(text)}")
    if len(text) > LARGEST_VALUE:
        raise ValueError(f"its {name} has more than {LARGEST_VALUE:,} bytes, the most that is read")
    try:
        return parse_json(text, nan=nan, deepest=_DEEPEST)  # `_json` writes such numbers
    except ValueError as error:
        raise ValueError(f"its {name} cannot be read: {error}") from error


def _value(row: Mapping[str, Any], name: str, kind: type) -> Any:
    """A column of a row, which is of this kind; objects and lists are stored as JSON."""
    value = _parsed(row[name], name) if kind in (dict, list) else row[name]
    if not isinstance(value, kind):
        raise ValueError(f"its {name} is {shown(value)}")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # neither nan nor inf


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
