"""Configs as JSON, and back with every type checked.

A config is written as its plain fields. What JSON cannot say is tagged: `{"$dtype": "bfloat16"}`,
`{"$float": "inf"}`, `{"$set": [...]}`, and a nested dataclass whose field does not pin its class
carries `"$type"`.

Reading is inert. Only the class that is asked for is built, and those that the annotations of its
fields name: a name in the text chooses between them and looks nothing up. Nothing is imported.
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

from ...store.reading import parse_json, shown

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
        plain = parse_json(text, nan=True)
    except ValueError as error:
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
    hints: dict[str, Any] = field_types(type(value))  # type: ignore[arg-type]
    plain = {
        field.name: to_plain(getattr(value, field.name), hints[field.name], f"{path}.{field.name}")
        for field in dataclasses.fields(value)
        if field.init
    }
    # The outermost value's type is named by whoever reads it; an inner one is ambiguous unless
    # its field says exactly this class.
    if path != "value" and declared is not type(value) and not _only_dataclass(declared, value):
        plain["$type"] = qualified_name(type(value))
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
    """Rebuild a value of type `cls` from plain data; with `Any` it stays plain data."""
    return _from_plain(plain, cls, path or _type_name(cls), inside=False)


def _from_plain(plain: Any, cls: Any, path: str, inside: bool = True) -> Any:
    """See `from_plain`; `inside` of a class, where plain data in place of an object is an error."""
    if cls is Any or isinstance(cls, TypeVar) or cls is object:
        return _untyped(plain, path, inside)
    options = _union_options(cls)
    if len(options) > 1:
        return _from_union(plain, options, path, inside)
    cls = options[0]
    origin = typing.get_origin(cls)
    if origin is typing.Literal:
        return _from_literal(plain, typing.get_args(cls), path)
    if dataclasses.is_dataclass(origin or cls) and isinstance(origin or cls, type):
        return _dataclass_from_plain(plain, cls, path)
    if origin in (tuple, list, set, frozenset) or cls in (tuple, list, set, frozenset):
        return _sequence_from_plain(plain, cls, path, inside)
    if isinstance(origin or cls, type) and issubclass(origin or cls, Mapping):
        return _mapping_from_plain(plain, cls, path, inside)
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        if isinstance(plain, dict) and plain.get("$type") == qualified_name(cls):
            plain = plain.get("$enum")
        if isinstance(plain, str) and plain in cls.__members__:
            return cls.__members__[plain]
        raise _mismatch(path, f"one of {', '.join(cls.__members__)}", plain)
    if isinstance(plain, dict) and "$dtype" in plain and cls not in _SCALAR_TYPES:
        return _untyped(plain, path, inside)
    return _scalar_from_plain(plain, cls, path)


def _untyped(plain: Any, path: str, inside: bool) -> Any:
    if isinstance(plain, list):
        return [_untyped(item, f"{path}[{i}]", inside) for i, item in enumerate(plain)]
    if not isinstance(plain, dict):
        return plain
    if "$float" in plain:
        return _float_from_plain(plain, path)
    if "$set" in plain:
        items = _hashable(_untyped(_listed(plain["$set"], path), path, inside))
        try:
            return frozenset(items)
        except TypeError:
            raise _mismatch(path, "values that a set can hold", plain["$set"]) from None
    if "$dtype" in plain:
        return _dtype_from_plain(plain, path)
    if "$type" in plain and inside:
        raise TypeError(
            f"{path}: a {shown(plain['$type'])} stands here, but the annotation of the field does "
            "not name this class, and no other is ever built; write it into the annotation"
        )
    return {key: _untyped(item, f"{path}[{key!r}]", inside) for key, item in plain.items()}


def _listed(plain: Any, path: str) -> list[Any]:
    if not isinstance(plain, list):
        raise _mismatch(path, "a list", plain)
    return plain


def _float_from_plain(plain: dict[str, Any], path: str) -> float:
    text = plain["$float"]
    if text not in ("nan", "inf", "-inf"):
        raise _mismatch(path, "nan, inf or -inf", text)
    return float(text)


def _dtype_from_plain(plain: dict[str, Any], path: str) -> Any:
    name, kind = plain["$dtype"], plain.get("kind", "dtype")
    try:
        dtype = jnp.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.name != name or dtype.hasobject:
        raise ValueError(f"{path}: {shown(name)} is not a dtype that this JAX knows")
    if kind == "numpy":
        return dtype.type
    if kind != "jax":
        return dtype
    found = vars(jnp).get(name)  # no attribute: a package may import something to make one
    if _dtype_kind(found) != "jax":
        raise ValueError(f"{path}: {shown(name)} is not a dtype that this JAX knows")
    return found


def _scalar_from_plain(plain: Any, cls: Any, path: str) -> Any:
    if isinstance(plain, dict) and "$float" in plain and cls in (float, complex):
        return _float_from_plain(plain, path)
    if cls is float and isinstance(plain, int) and not isinstance(plain, bool):
        try:
            return float(plain)
        except OverflowError:
            raise _mismatch(path, "float", plain) from None
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


def _from_union(plain: Any, options: tuple[Any, ...], path: str, inside: bool) -> Any:
    if isinstance(plain, dict) and "$type" in plain:
        named = [o for o in options if qualified_name(o) == plain["$type"]]
        if named:
            return _from_plain(plain, named[0], path)
    problems = []
    # Exact scalar types first, so that `float | int` gives back the int that was written.
    for option in sorted(options, key=lambda option: option is not type(plain)):
        try:
            return _from_plain(plain, option, path, inside)
        except (TypeError, ValueError) as error:
            problems.append(str(error))
    raise TypeError(f"{path}: no member of the union fits: {'; '.join(problems)}")


def _from_literal(plain: Any, allowed: tuple[Any, ...], path: str) -> Any:
    for option in allowed:
        if type(option) is type(plain) and option == plain:
            return option
    raise _mismatch(path, f"one of {', '.join(map(repr, allowed))}", plain)


def _dataclass_from_plain(plain: Any, declared: Any, path: str) -> Any:
    cls = typing.get_origin(declared) or declared
    if not isinstance(plain, dict):
        raise _mismatch(path, f"an object with the fields of {_type_name(cls)}", plain)
    if plain.get("$type", qualified_name(cls)) != qualified_name(cls):
        # A subclass too: whoever wants it in a field names it in the annotation.
        raise TypeError(
            f"{path}: expected {_type_name(cls)}, got {shown(plain['$type'])}, which the "
            "annotation does not name"
        )
    given = {key: item for key, item in plain.items() if key != "$type"}
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise TypeError(
            f"{path}: {_type_name(cls)} has no field {', '.join(map(shown, unknown[:5]))}; "
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
    hints = field_types(cls)
    bound = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(declared), strict=False))
    return cls(
        **{
            name: _from_plain(item, bound.get(hints[name], hints[name]), f"{path}.{name}")
            for name, item in given.items()
        }
    )


def _sequence_from_plain(plain: Any, cls: Any, path: str, inside: bool) -> Any:
    container = typing.get_origin(cls) or cls
    given = plain
    if container in (set, frozenset):
        plain = plain.get("$set") if isinstance(plain, dict) else None
    if not isinstance(plain, list):
        raise _mismatch(path, f"a list for {_type_name(cls)}", given)
    arguments = typing.get_args(cls)
    if container is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(plain):
            raise TypeError(
                f"{path}: expected {len(arguments)} items, got {len(plain)}: {shown(plain)}"
            )
        item_types: list[Any] = list(arguments)
    else:
        item_types = [arguments[0] if arguments else Any] * len(plain)
    items = [
        _from_plain(item, item_type, f"{path}[{i}]", inside)
        for i, (item, item_type) in enumerate(zip(plain, item_types, strict=True))
    ]
    # Without an item type a nested tuple comes back as a list; make it hashable again.
    return container(_hashable(items) if container is not list and not arguments else items)


def _hashable(items: list[Any]) -> list[Any]:
    return [tuple(_hashable(item)) if isinstance(item, list) else item for item in items]


def _mapping_from_plain(plain: Any, cls: Any, path: str, inside: bool) -> Any:
    if not isinstance(plain, dict):
        raise _mismatch(path, "an object", plain)
    arguments = typing.get_args(cls)
    item_type = arguments[1] if len(arguments) == 2 else Any
    return {
        key: _from_plain(item, item_type, f"{path}[{key!r}]", inside) for key, item in plain.items()
    }


# --- types ---------------------------------------------------------------------------------------


def qualified_name(cls: Any) -> str:
    """`module:Qual.Name` of a class: how a stored entry says what its config is."""
    return f"{getattr(cls, '__module__', '?')}:{getattr(cls, '__qualname__', cls)}"


# The config classes of this process, by name: those that its kernels declare, and those that it has
# itself put into a store. No other class is found by a name that stands in a file.
_config_types: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


_BUILTIN = {
    qualified_name(cls): cls for cls in (bool, dict, float, frozenset, int, list, set, str, tuple)
}


def declare_type(cls: Any) -> None:
    """Let `config_type_named` find a class: this process says that it is one of configs."""
    for option in _union_options(cls):
        known = typing.get_origin(option) or option
        if isinstance(known, type):
            _config_types[qualified_name(known)] = known


def config_type_named(name: str) -> Any:
    """The config class `module:Qual.Name` if this process declared it, else `Any`."""
    return _BUILTIN.get(name) or _config_types.get(name, Any)


@functools.lru_cache(maxsize=256)
def field_types(cls: Any, *, include_extras: bool = False) -> dict[str, Any]:
    """Resolved annotations; one that cannot be resolved (a local name) counts as `Any`."""
    try:
        return typing.get_type_hints(cls, include_extras=include_extras)
    except NameError:
        scope = vars(sys.modules.get(cls.__module__, typing))
        fields = dataclasses.fields(cls)
        return {f.name: _resolved(f.type, scope, include_extras) for f in fields}


def _resolved(annotation: Any, scope: dict[str, Any], include_extras: bool) -> Any:
    holder = type("holder", (), {"__annotations__": {"field": annotation}})
    try:
        hints = typing.get_type_hints(holder, globalns=scope, include_extras=include_extras)
        return hints["field"]
    except NameError:
        return Any


def _union_options(cls: Any) -> tuple[Any, ...]:
    if isinstance(cls, types.UnionType) or typing.get_origin(cls) is typing.Union:
        return typing.get_args(cls)
    return (cls,)


def _type_name(cls: Any) -> str:
    return getattr(cls, "__name__", None) or str(cls)


def _mismatch(path: str, expected: str, got: Any) -> TypeError:
    return TypeError(f"{path}: expected {expected}, got {shown(got)} ({type(got).__name__})")


# --- checking ------------------------------------------------------------------------------------


def reasons_against_type(value: Any, declared: Any, path: str = "") -> list[str]:
    """Where a value is not what an annotation says, each place by its path; empty if it is.

    The rules are those of reading: a boolean is no integer, an integer is a float, and an
    annotation that this module cannot read allows anything.
    """
    options = _union_options(declared)
    if len(options) > 1:
        found = [reasons_against_type(value, option, path) for option in options]
        if any(not reasons for reasons in found):
            return []
        # A dataclass of the right class has its own fields to blame.
        inner = [r for option, r in zip(options, found, strict=True) if _is_a(value, option)]
        return inner[0] if inner else [_not_of(path, declared, value)]
    cls, origin = options[0], typing.get_origin(options[0])
    if origin is typing.Literal:
        allowed = typing.get_args(cls)
        fits = any(type(option) is type(value) and option == value for option in allowed)
        return [] if fits else [_not_of(path, cls, value)]
    container = origin or cls
    if not isinstance(container, type) or container in (object, type) or cls is Any:
        return []
    if not _is_instance(value, container):
        return [_not_of(path, cls, value)]
    if dataclasses.is_dataclass(value):
        return _reasons_against_fields(value, path)
    arguments = typing.get_args(cls)
    if not arguments:
        return []
    if issubclass(container, tuple) and Ellipsis not in arguments:
        if len(arguments) != len(value):
            return [_not_of(path, cls, value)]
        items = list(zip(value, arguments, strict=True))
    elif issubclass(container, Mapping):
        items = [(item, arguments[-1]) for item in value.values()]
    elif issubclass(container, (tuple, list, set, frozenset)):
        items = [(item, arguments[0]) for item in value]
    else:
        return []
    return [
        reason
        for i, (item, item_type) in enumerate(items)
        for reason in reasons_against_type(item, item_type, f"{path}[{i}]")
    ]


def field_paths(cls: Any) -> list[str]:
    """The fields of a dataclass, and those of its fields (`fwd.q_blocksize`), by annotation."""
    found = []
    for field in dataclasses.fields(cls):
        found.append(field.name)
        for option in _union_options(field_types(cls)[field.name]):
            if dataclasses.is_dataclass(option):
                found += [f"{field.name}.{path}" for path in field_paths(option)]
    return found


def _reasons_against_fields(value: Any, path: str) -> list[str]:
    hints = field_types(type(value))  # type: ignore[arg-type]
    return [
        reason
        for field in dataclasses.fields(value)
        # A default such as `block: int = None` is meant as it is written.
        if (item := getattr(value, field.name, field.default)) is not field.default
        for reason in reasons_against_type(
            item, hints.get(field.name, Any), f"{path}.{field.name}" if path else field.name
        )
    ]


def _is_instance(value: Any, cls: type) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return cls is bool or (
            isinstance(value, cls) and not issubclass(cls, (int, float, complex))
        )
    if cls in (int, float, complex):
        kinds: tuple[type, ...] = (int, np.integer)
        if cls is not int:
            kinds = (*kinds, float, np.floating)
        if isinstance(value, (*kinds, complex, np.complexfloating) if cls is complex else kinds):
            return True
        return is_symbolic(value)
    if is_dtype_like(value) and issubclass(cls, (np.dtype, np.generic)):
        return True  # `np.dtype` in the annotation, `jnp.bfloat16` in the field
    try:
        return isinstance(value, cls)
    except TypeError:  # a protocol that cannot be asked
        return True


def is_symbolic(value: Any) -> bool:
    """True for a dimension without a number yet, of a call that is exported for many shapes."""
    if not type(value).__module__.startswith("jax"):
        return False
    from jax import export

    return bool(export.is_symbolic_dim(value))


def _is_a(value: Any, cls: Any) -> bool:
    return dataclasses.is_dataclass(cls) and isinstance(cls, type) and isinstance(value, cls)


def _not_of(path: str, declared: Any, value: Any) -> str:
    words = " or ".join(
        "None" if option is type(None) else _type_name(option)
        for option in _union_options(declared)
    )
    return f"{path}={shown(value)} ({type(value).__name__}) must be {words}"
