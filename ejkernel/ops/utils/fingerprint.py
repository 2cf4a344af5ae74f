"""What cache keys are made of: the device, the arguments without their values, and stable text.

A config depends on the device and on the shapes, dtypes and shardings of the arguments. Text is
stable if it is the same in every process for the same value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import os
import platform
import re
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .serialize import dtype_name, is_dtype_like, qualified_name

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_GPU_PLATFORMS = ("gpu", "cuda", "rocm")


# --- devices -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A device that is not here, as far as choosing methods, configs and keys goes.

    Attributes are those of a `jax.Device`: `platform` is `"tpu"`, `"gpu"` or `"cpu"`.
    """

    platform: str
    device_kind: str
    compute_capability: str | None = None
    core_count: int | None = None


# A user context is part of every jit key: what is traced for a device that is not here is never
# served to programs of the one that is. Created once, at import, as JAX wants it.
_stand_in = jax.make_user_context(None)


def as_if_on(device: StandIn) -> contextlib.AbstractContextManager[Any]:
    """While active in this thread, calls are traced, keyed and named as they would be there."""
    return _stand_in(device)  # type: ignore[no-any-return]


def current_device() -> Any:
    """The device that uncommitted work runs on: `jax.default_device` if set, else the first one.

    The first of this process, that is: of another process's device nothing can be asked. Inside
    `as_if_on` it is the stand-in.
    """
    pretended = _stand_in.value
    if pretended is not None:
        return pretended
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def device_kind(device: Any = None) -> str:
    """`"gpu"`, `"tpu"` or `"cpu"` for a device (default: the current one)."""
    name = str((device or current_device()).platform).lower()
    if name in _GPU_PLATFORMS:
        return "gpu"
    return name


def get_device_platform(device: Any = None) -> str:
    """The platform that kernels are written for: `"triton"`, `"pallas"` or `"xla"`."""
    return {"gpu": "triton", "tpu": "pallas"}.get(device_kind(device), "xla")


def device_fingerprint(device: Any = None) -> str:
    """A stable string that differs wherever tuned configs would: `cpu|amd-epyc-7b13|2-threads`.

    It names the hardware and nothing that changes between runs. The compiler's version is stored
    with each entry instead, so that an upgrade marks entries as suspect rather than
    losing them.
    """
    return _fingerprint(device or current_device())


@functools.lru_cache(maxsize=256)
def _fingerprint(device: Any) -> str:
    kind = device_kind(device)
    if kind == "cpu":
        return f"cpu|{_slug(_cpu_model())}|{_thread_count()}-threads"
    parts = [kind, _slug(str(device.device_kind))]
    capability = getattr(device, "compute_capability", None)
    if capability:
        parts.append(f"sm{str(capability).replace('.', '')}")
    cores = getattr(device, "core_count", None)
    if cores:
        parts.append(f"{cores}-cores")
    return "|".join(parts)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.lower().startswith(("model name", "cpu part")):
                    return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _thread_count() -> int:
    # XLA sizes its thread pool by the cores this process may use, not by those of the machine.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") or "unknown"


# --- arguments -----------------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """True for what a kernel receives as data: arrays, tracers, NumPy's, abstract shapes."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def abstractify(tree: Any) -> Any:
    """Replace every array in a pytree by its `jax.ShapeDtypeStruct`; leave other leaves alone.

    >>> abstractify({"x": np.zeros((2, 3), np.float32), "causal": True})
    {'causal': True, 'x': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    return jax.tree.map(_abstract_leaf, tree)


def abstractify_arguments(tree: Any) -> Any:
    """Like `abstractify`, but a Python number is an array too, as in any jitted function."""
    return jax.tree.map(
        lambda leaf: _abstract_leaf(leaf) if not _is_number(leaf) else _abstract_number(leaf), tree
    )


def _abstract_leaf(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(
        leaf.shape,
        _canonical_dtype(leaf.dtype),
        weak_type=bool(getattr(leaf, "weak_type", False)),
        sharding=_explicit_sharding(leaf),
    )


def _canonical_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (bool, int, float, complex)


def _abstract_number(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.result_type(leaf), weak_type=type(leaf) is not bool)


def _explicit_sharding(array: Any) -> Any:
    """The sharding that is part of an array's type, or None.

    Only meshes with explicit axes put it there; with automatic axes the compiler decides later and
    two shardings share one trace, so it cannot be part of the key.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        sharding = array.sharding
    elif isinstance(array, jax.Array):
        sharding = getattr(jax.typeof(array), "sharding", None)
    else:
        return None
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    explicit = jax.sharding.AxisType.Explicit
    visible = explicit in sharding.mesh.axis_types and any(a is not None for a in sharding.spec)
    return sharding if visible else None


LEAF_SIGNATURE = re.compile(
    r"(?P<dtype>[^\[]+)\[(?P<shape>[\d,]*)\](?P<weak>~?)(@(?P<sharding>.+))?"
)
"""What `leaf_signature` writes for an array."""


def leaf_signature(leaf: Any) -> str:
    """`float32[8,8]`, with `~` for a weak type and the sharding where the type carries one."""
    if not is_array(leaf):
        return stable_json(leaf)
    abstract = _abstract_leaf(leaf)
    text = f"{dtype_name(abstract.dtype)}[{','.join(map(str, abstract.shape))}]"
    if getattr(abstract, "weak_type", False):
        text += "~"
    sharding = getattr(abstract, "sharding", None)
    return text if sharding is None else f"{text}@{sharding_fingerprint(sharding)}"


def tree_signature(tree: Any) -> dict[str, Any]:
    """Structure and leaves of a pytree, as plain data that is the same in every process."""
    leaves, structure = jax.tree.flatten(tree)
    return {
        "leaves": [leaf_signature(leaf) for leaf in leaves],
        "tree": _ADDRESS.sub("", str(structure)),
    }


def sharding_fingerprint(value: Any) -> str:
    """A stable description of an array's (or a) sharding: mesh axes with sizes, and the spec.

    >>> sharding_fingerprint(np.zeros(3))
    'none'
    """
    sharding = value if isinstance(value, jax.sharding.Sharding) else _sharding_of(value)
    if sharding is None:
        return "none"
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return "single"
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = ",".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        axes = list(sharding.spec)
        while axes and axes[-1] is None:  # P("x") and P("x", None) are the same
            axes.pop()
        spec = ",".join(_axis_text(axis) for axis in axes)
        return f"named({mesh})[{spec}]"
    devices = getattr(sharding, "num_devices", len(sharding.device_set))
    return (
        f"{type(sharding).__name__.lower()}:{short_hash(_ADDRESS.sub('', str(sharding)))}:{devices}"
    )


def _sharding_of(value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        return _explicit_sharding(value)
    return getattr(value, "sharding", None)


def _axis_text(axis: Any) -> str:
    if axis is None:
        return "-"
    return "+".join(map(str, axis)) if isinstance(axis, tuple) else str(axis)


def default_key_builder_with_sharding(
    kernel_or_invocation: Any, args: Any = (), kwargs: Any = None
) -> str:
    """A call key that also depends on how the arguments are sharded.

    Use it as a kernel's `key_builder`, or call it with `(kernel, args, kwargs)`. Two calls of the
    same shapes get different keys when one of them is sharded over a mesh.
    """
    if _is_invocation(kernel_or_invocation):
        inv = kernel_or_invocation
    elif _is_invocation(args):  # as a class attribute it is called like a method
        inv = args
    else:
        inv = kernel_or_invocation.bind(*args, **(kwargs or {}))
    leaves = jax.tree.leaves((inv.args, dict(inv.kwargs)))
    shardings = [sharding_fingerprint(leaf) for leaf in leaves if is_array(leaf)]
    # A tracer of an array on one device shows no sharding: neither may the array itself.
    seen = ["none" if sharding == "single" else sharding for sharding in shardings]
    return short_hash({"call": inv.call_key, "shardings": seen})


def _is_invocation(value: Any) -> bool:
    # By what it can do: invocations are a layer above.
    return hasattr(type(value), "call_key")


# --- stable text ---------------------------------------------------------------------------------


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
