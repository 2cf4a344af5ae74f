"""Configs as JSON, and back with every type checked.

A config is written as its plain fields. What JSON cannot say is tagged: `{"$dtype": "bfloat16"}`,
`{"$float": "inf"}`, `{"$set": [...]}`, and a nested dataclass whose field does not pin its class
carries `"$type"`. Reading never imports anything: a type must be given, or already be loaded.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import sys
import types
import typing
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar, overload

import jax.numpy as jnp
import numpy as np

T = TypeVar("T")

_SCALAR_TYPES = (int, float, str, bool, complex, type(None))


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Write a config (dataclass, tuple, dict, scalar, dtype, enum) as JSON text.

    >>> from ejkernel.ops import FwdParams, from_json
    >>> from_json(to_json(FwdParams(q_blocksize=64)), FwdParams).q_blocksize
    64
    """
    return json.dumps(to_plain(value), indent=indent, sort_keys=indent is not None)


@overload
def from_json(text: str | bytes) -> Any: ...
@overload
def from_json(text: str | bytes, cls: type[T]) -> T: ...
def from_json(text: str | bytes, cls: Any = Any) -> Any:
    """Read JSON text; with `cls` rebuild that type and refuse anything that does not fit it.

    A wrong field is named by its path::

        TypeError: FlashConfig.fwd.q_blocksize: expected int, got 'big' (str)
    """
    try:
        plain = json.loads(text)
    except json.JSONDecodeError as error:
        name = "a value" if cls is Any else _type_name(cls)
        raise ValueError(f"from_json: the text for {name} is not JSON: {error}") from error
    return from_plain(plain, cls)


def is_dtype_like(value: Any) -> bool:
    """True for a NumPy dtype, a NumPy scalar type and a JAX scalar type such as `jnp.bfloat16`."""
    return _dtype_kind(value) is not None


def dtype_name(value: Any) -> str:
    """The canonical name of anything that `is_dtype_like`, and of JAX's random-key dtypes."""
    try:
        return str(np.dtype(value).name)
    except TypeError:
        return str(value)


# --- writing -------------------------------------------------------------------------------------


def to_plain(value: Any, declared: Any = Any, path: str = "value") -> Any:
    """Turn a config into lists, dicts and scalars that JSON can hold."""
    if value is None or (isinstance(value, (bool, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        # Where a string may stand too, the name alone would come back as one.
        if str in _union_options(declared):
            remember_type(type(value))
            return {"$enum": value.name, "$type": qualified_name(type(value))}
        return value.name
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass_to_plain(value, declared, path)
    if isinstance(value, (list, tuple)):
        return [to_plain(item, Any, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        items = [to_plain(item, Any, path) for item in value]
        return {"$set": sorted(items, key=json.dumps)}
    if isinstance(value, Mapping):
        return {
            _require_text_key(key, path): to_plain(item, Any, f"{path}[{key!r}]")
            for key, item in value.items()
        }
    kind = _dtype_kind(value)
    if kind is not None:
        plain: dict[str, Any] = {"$dtype": dtype_name(value)}
        return plain if kind == "dtype" else {**plain, "kind": kind}
    raise TypeError(
        f"{path}: a {_type_name(type(value))} cannot be written as JSON: {value!r}; configs are "
        "made of dataclasses, tuples, dicts, sets, enums, dtypes, numbers, strings and None"
    )


def _dataclass_to_plain(value: Any, declared: Any, path: str) -> dict[str, Any]:
    hints: dict[str, Any] = _field_types(type(value))  # type: ignore[arg-type]
    plain = {
        field.name: to_plain(getattr(value, field.name), hints[field.name], f"{path}.{field.name}")
        for field in dataclasses.fields(value)
        if field.init
    }
    # The outermost value's type is named by whoever reads it; an inner one is ambiguous unless
    # its field says exactly this class.
    if path != "value" and declared is not type(value) and not _only_dataclass(declared, value):
        plain["$type"] = qualified_name(type(value))
    remember_type(type(value))
    return plain


def _only_dataclass(declared: Any, value: Any) -> bool:
    """True if `value`'s class is the single dataclass that the declared union admits."""
    options = [t for t in _union_options(declared) if dataclasses.is_dataclass(t)]
    return options == [type(value)]


def _require_text_key(key: Any, path: str) -> str:
    if not isinstance(key, str) or key.startswith("$"):
        raise TypeError(
            f"{path}: the key {key!r} cannot be written as JSON; dict keys must be strings "
            "that do not start with '$'"
        )
    return key


def _dtype_kind(value: Any) -> str | None:
    if isinstance(value, np.dtype):
        return "dtype"
    if isinstance(value, type) and issubclass(value, np.generic):
        return "numpy"
    if type(value) is type(jnp.float32):
        return "jax"
    return None


# --- reading -------------------------------------------------------------------------------------


def from_plain(plain: Any, cls: Any, path: str | None = None) -> Any:
    """Rebuild a value of type `cls` from plain data."""
    path = path or _type_name(cls)
    if cls is Any or isinstance(cls, TypeVar) or cls is object:
        return _untyped(plain)
    options = _union_options(cls)
    if len(options) > 1:
        return _from_union(plain, options, path)
    cls = options[0]
    origin = typing.get_origin(cls)
    if origin is typing.Literal:
        return _from_literal(plain, typing.get_args(cls), path)
    if dataclasses.is_dataclass(cls) and isinstance(cls, type):
        return _dataclass_from_plain(plain, cls, path)
    if origin in (tuple, list, set, frozenset) or cls in (tuple, list, set, frozenset):
        return _sequence_from_plain(plain, cls, path)
    if isinstance(origin or cls, type) and issubclass(origin or cls, Mapping):
        return _mapping_from_plain(plain, cls, path)
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        if isinstance(plain, dict) and plain.get("$type") == qualified_name(cls):
            plain = plain.get("$enum")
        if isinstance(plain, str) and plain in cls.__members__:
            return cls[plain]
        raise _mismatch(path, f"one of {', '.join(cls.__members__)}", plain)
    if isinstance(plain, dict) and "$dtype" in plain and cls not in _SCALAR_TYPES:
        return _untyped(plain)
    return _scalar_from_plain(plain, cls, path)


def _untyped(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_untyped(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "$float" in plain:
        return float(plain["$float"])
    if "$set" in plain:
        return frozenset(_hashable([_untyped(item) for item in plain["$set"]]))
    if "$dtype" in plain:
        return _dtype_from_plain(plain)
    known = loaded_type(plain["$type"]) if "$type" in plain else Any
    if known is not Any:
        return from_plain(plain, known)
    return {key: _untyped(item) for key, item in plain.items()}


def _dtype_from_plain(plain: dict[str, Any]) -> Any:
    name, kind = plain["$dtype"], plain.get("kind", "dtype")
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise ValueError(f"{name!r} is not a dtype that this JAX knows") from error
    if kind == "numpy":
        return dtype.type
    return getattr(jnp, name) if kind == "jax" else dtype


def _scalar_from_plain(plain: Any, cls: Any, path: str) -> Any:
    if isinstance(plain, dict) and "$float" in plain and cls in (float, complex):
        return float(plain["$float"])
    if cls is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if cls is type(None):
        matches = plain is None
    elif cls is int:
        matches = isinstance(plain, int) and not isinstance(plain, bool)
    elif isinstance(cls, type):
        matches = isinstance(plain, cls)
    else:
        raise TypeError(f"{path}: ejkernel cannot rebuild a field of type {cls!r} from JSON")
    if not matches:
        raise _mismatch(path, _type_name(cls), plain)
    return plain


def _from_union(plain: Any, options: tuple[Any, ...], path: str) -> Any:
    if isinstance(plain, dict) and "$type" in plain:
        named = [o for o in options if qualified_name(o) == plain["$type"]]
        if named:
            return from_plain(plain, named[0], path)
    problems = []
    # Exact scalar types first, so that `float | int` gives back the int that was written.
    for option in sorted(options, key=lambda option: option is not type(plain)):
        try:
            return from_plain(plain, option, path)
        except (TypeError, ValueError) as error:
            problems.append(str(error))
    raise TypeError(f"{path}: no member of the union fits: {'; '.join(problems)}")


def _from_literal(plain: Any, allowed: tuple[Any, ...], path: str) -> Any:
    for option in allowed:
        if type(option) is type(plain) and option == plain:
            return option
    raise _mismatch(path, f"one of {', '.join(map(repr, allowed))}", plain)


def _dataclass_from_plain(plain: Any, cls: Any, path: str) -> Any:
    if not isinstance(plain, dict):
        raise _mismatch(path, f"an object with the fields of {_type_name(cls)}", plain)
    if plain.get("$type", qualified_name(cls)) != qualified_name(cls):
        written = loaded_type(plain["$type"])
        if not (isinstance(written, type) and issubclass(written, cls)):
            raise TypeError(
                f"{path}: expected {_type_name(cls)}, got {plain['$type']}, which is not loaded or "
                "no subclass of it"
            )
        cls = written
    given = {key: item for key, item in plain.items() if key != "$type"}
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise TypeError(
            f"{path}: {_type_name(cls)} has no field {', '.join(map(repr, unknown))}; "
            f"its fields are {', '.join(fields)}"
        )
    missing = [
        name
        for name, field in fields.items()
        if name not in given
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise TypeError(f"{path}: the field {', '.join(map(repr, missing))} is missing")
    hints = _field_types(cls)
    return cls(
        **{name: from_plain(item, hints[name], f"{path}.{name}") for name, item in given.items()}
    )


def _sequence_from_plain(plain: Any, cls: Any, path: str) -> Any:
    container = typing.get_origin(cls) or cls
    given = plain
    if container in (set, frozenset):
        plain = plain.get("$set") if isinstance(plain, dict) else None
    if not isinstance(plain, list):
        raise _mismatch(path, f"a list for {_type_name(cls)}", given)
    arguments = typing.get_args(cls)
    if container is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(plain):
            raise TypeError(f"{path}: expected {len(arguments)} items, got {len(plain)}: {plain!r}")
        item_types: list[Any] = list(arguments)
    else:
        item_types = [arguments[0] if arguments else Any] * len(plain)
    items = [
        from_plain(item, item_type, f"{path}[{i}]")
        for i, (item, item_type) in enumerate(zip(plain, item_types, strict=True))
    ]
    # Without an item type a nested tuple comes back as a list; make it hashable again.
    return container(_hashable(items) if container is not list and not arguments else items)


def _hashable(items: list[Any]) -> list[Any]:
    return [tuple(_hashable(item)) if isinstance(item, list) else item for item in items]


def _mapping_from_plain(plain: Any, cls: Any, path: str) -> Any:
    if not isinstance(plain, dict):
        raise _mismatch(path, "an object", plain)
    arguments = typing.get_args(cls)
    item_type = arguments[1] if len(arguments) == 2 else Any
    return {key: from_plain(item, item_type, f"{path}[{key!r}]") for key, item in plain.items()}


# --- types ---------------------------------------------------------------------------------------


def qualified_name(cls: Any) -> str:
    """`module:Qual.Name` of a class: how a stored entry says what its config is."""
    return f"{getattr(cls, '__module__', '?')}:{getattr(cls, '__qualname__', cls)}"


# Classes that were written in this process, by name: one defined inside a function cannot be found
# in its module when it is read back.
_written_types: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def remember_type(cls: type) -> None:
    """Let `loaded_type` find a class that was written in this process."""
    _written_types[qualified_name(cls)] = cls


def loaded_type(name: str) -> Any:
    """A class by `module:Qual.Name` if it is loaded already, else `Any`. Nothing is imported."""
    if name in _written_types:
        return _written_types[name]
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else Any


@functools.cache
def _field_types(cls: Any) -> dict[str, Any]:
    """Resolved annotations; one that cannot be resolved (a local name) counts as `Any`."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        scope = vars(sys.modules.get(cls.__module__, typing))
        return {field.name: _resolved(field.type, scope) for field in dataclasses.fields(cls)}


def _resolved(annotation: Any, scope: dict[str, Any]) -> Any:
    holder = type("holder", (), {"__annotations__": {"field": annotation}})
    try:
        return typing.get_type_hints(holder, globalns=scope)["field"]
    except NameError:
        return Any


def _union_options(cls: Any) -> tuple[Any, ...]:
    if isinstance(cls, types.UnionType) or typing.get_origin(cls) is typing.Union:
        return typing.get_args(cls)
    return (cls,)


def _type_name(cls: Any) -> str:
    return getattr(cls, "__name__", None) or str(cls)


def _mismatch(path: str, expected: str, got: Any) -> TypeError:
    return TypeError(f"{path}: expected {expected}, got {got!r} ({type(got).__name__})")
