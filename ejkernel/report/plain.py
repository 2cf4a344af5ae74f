"""Records and answers as JSON; records back from it, every type checked on the way in."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from ..store.reading import parse_json, shown

T = TypeVar("T")

MARK = "ejkernel_run"
"""The first key of a record's file: its value is the schema's number."""


class NotARun(ValueError):
    """A file is not the record of a tuning run, is damaged, or comes from a newer ejkernel."""


def as_text(record: Any, schema: int, mark: str = MARK) -> str:
    """A record as JSON text. Numbers that JSON has no word for become null."""
    return json.dumps({mark: schema, **plain(record)}, indent=1, allow_nan=False)


def from_text(kind: type[T], text: str | bytes, schema: int, where: str, mark: str = MARK) -> T:
    """Rebuild a record from its text, or say in one sentence why that cannot be."""
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise NotARun(
            f"{where} is not the record of a tuning run, or was cut off: {error}"
        ) from error
    if not isinstance(parsed, dict) or mark not in parsed:
        raise NotARun(
            f"{where} is not the record of a tuning run: it has no {mark!r}. "
            "`ejkernel.report.Run.save` writes such files"
        )
    found = parsed[mark]
    if type(found) is not int or found < 1:
        raise NotARun(f"{where} is damaged: its schema is {shown(found)}")
    if found > schema:
        raise NotARun(
            f"{where} was written by a newer ejkernel (schema {shown(found)}, this one knows "
            f"{schema}); update ejkernel to read it"
        )
    try:
        return typing.cast(T, _read(parsed, kind, ""))
    except (TypeError, ValueError, OverflowError) as error:
        raise NotARun(f"{where} is damaged: {error}") from error


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers that it has no word for become null, other things text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def _read(value: Any, hint: Any, path: str) -> Any:
    """A value of a JSON text as what a field is declared to be."""
    if hint is Any:
        return value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inner:
            return None
        return _read(value, next(option for option in inner if option is not type(None)), path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_record(value, hint, path)
    if origin is tuple:
        items = _checked(value, list, path)
        return tuple(_read(item, inner[0], f"{path}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        items = _checked(value, dict, path)
        return {name: _read(item, inner[1], f"{path}.{name}") for name, item in items.items()}
    if hint is float and type(value) is int:
        return float(value)
    if hint is float and type(value) is float and not math.isfinite(value):
        raise ValueError(f"{path} is {value}, which is not a number of JSON")
    return _checked(value, hint, path)


def _read_record(value: Any, kind: type, path: str) -> Any:
    given = _checked(value, dict, path)
    hints = typing.get_type_hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):
        inside = f"{path}.{field.name}" if path else field.name
        if field.name in given:
            fields[field.name] = _read(given[field.name], hints[field.name], inside)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{inside} is missing")
    return kind(**fields)


def _checked(value: Any, kind: type, path: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{path or 'it'} must be a {kind.__name__}, got {shown(value)}")
    return value
