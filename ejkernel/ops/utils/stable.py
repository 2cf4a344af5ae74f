"""Text that is the same in every process for the same value: what cache keys are made of."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .serialize import dtype_name, is_dtype_like, qualified_name

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def stable_json(value: Any) -> str:
    """Deterministic JSON of any value a kernel may receive: same value, same text, any process.

    Arrays and tracers are written as dtype and shape, never by their values. Functions are written
    by name, code and captured values, so two lambdas of one line differ. A value that has no
    stable form is a `TypeError`.

    >>> stable_json({"b": 1, "a": (2, None)})
    '{"a":{"$tuple":[2,null]},"b":1}'
    """
    try:
        plain = _stable(value)
    except RecursionError:
        raise TypeError(
            f"a {type(value).__name__} that contains itself has no stable form"
        ) from None
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def short_hash(value: Any, digits: int = 16) -> str:
    """A short hexadecimal hash of `stable_json(value)` (of the text itself if given a string)."""
    text = value if isinstance(value, str) else stable_json(value)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()[:digits]


def _stable(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, enum.Enum):
        return {"$enum": f"{qualified_name(type(value))}.{value.name}"}
    if isinstance(value, (float, complex)) and not isinstance(value, np.generic):
        return {f"${type(value).__name__}": repr(value)}
    if is_dtype_like(value):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return {"$array": f"{dtype_name(value.dtype)}[{','.join(map(str, value.shape))}]"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _stable(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"$dataclass": qualified_name(type(value)), "$fields": fields}
    if isinstance(value, (list, tuple, set, frozenset)):
        return _stable_sequence(value)
    if isinstance(value, Mapping):
        return _stable_mapping(value)
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, (bool, int, str)):  # subclasses, after the plain types above
        return {f"${qualified_name(type(value))}": str(value)}
    if callable(value) or isinstance(value, type):
        return _stable_callable(value)
    return _stable_repr(value)


def _stable_sequence(value: Any) -> Any:
    items = [_stable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {"$set": sorted(items, key=lambda item: json.dumps(item, sort_keys=True))}
    if type(value) is list:
        return items
    name = "tuple" if type(value) is tuple else qualified_name(type(value))
    return {f"${name}": items}


def _stable_mapping(value: Mapping[Any, Any]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _stable(item) for key, item in value.items()}
    pairs = [[_stable(key), _stable(item)] for key, item in value.items()]
    return {"$items": sorted(pairs, key=lambda pair: json.dumps(pair, sort_keys=True))}


def _stable_callable(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return {"$partial": [_stable(value.func), _stable(value.args), _stable(value.keywords)]}
    if isinstance(value, types.MethodType):
        return {"$method": [value.__func__.__qualname__, _stable(value.__self__)]}
    if isinstance(value, types.FunctionType):
        cells = [_cell_contents(cell) for cell in value.__closure__ or ()]
        return {
            "$function": f"{value.__module__}:{value.__qualname__}",
            "$code": code_hash(value.__code__),
            "$captured": [_stable(cell) for cell in cells],
            "$defaults": _stable(value.__defaults__),
            "$keyword_defaults": _stable(value.__kwdefaults__),
        }
    wrapped = getattr(value, "__wrapped__", None)  # jax.jit, functools.wraps
    if wrapped is not None and wrapped is not value:
        return {"$wrapper": qualified_name(type(value)), "$of": _stable(wrapped)}
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return {"$named": qualified_name(value)}
    return _stable_repr(value)


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


def code_hash(code: types.CodeType) -> str:
    """A hash of what a function does, as far as its own code says."""
    constants = [_stable_constant(constant) for constant in code.co_consts]
    parts = [code.co_code.hex(), constants, code.co_names, code.co_varnames]
    return short_hash(json.dumps(parts, sort_keys=True))


def _stable_constant(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        return code_hash(constant)
    return repr(constant) if constant is Ellipsis else _stable(constant)


def _stable_repr(value: Any) -> Any:
    text = repr(value)
    if getattr(type(value), "__repr__", None) is object.__repr__ or _ADDRESS.search(text):
        raise TypeError(
            f"a {qualified_name(type(value))} has no form that is the same in every process: "
            f"{text}; give it a __repr__ that shows its content, or make it a frozen dataclass"
        )
    return {"$repr": qualified_name(type(value)), "$text": text}
