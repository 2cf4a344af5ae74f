"""A call written into its program: which kernel, which shapes, which static values.

With it a program can be tuned by a process that never ran it, from its text alone. It is JSON with
single quotes, because a program's text would escape every double quote. A call with something in it
that cannot be written (a function, a custom pytree node) has a label and no specification.
"""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import jax
import jax.numpy as jnp

from ...store.reading import parse_json
from ..utils.fingerprint import abstractify, abstractify_arguments, is_array, leaf_signature
from ..utils.serialize import from_plain, is_dtype_like, qualified_name, to_plain
from .invocation import BatchAxes, Invocation
from .kernel import Kernel, kernel_named

_ARRAY = re.compile(r"(?P<dtype>[a-z0-9_]+)\[(?P<shape>[\d,]*)\](?P<weak>~?)")

# What reading a text raises that is no specification.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)


class SpecificationError(ValueError):
    """A specification that cannot be turned back into a call; says why."""


# --- writing -------------------------------------------------------------------------------------


def write_specification(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any = None
) -> str | None:
    """The specification of a call, or None if something in it cannot be written."""
    try:
        spec: dict[str, Any] = {
            "op": inv.full_op_id,
            "kernel": qualified_name(type(kernel)),
            "args": [_tree_to_plain(arg) for arg in inv.abstract_args],
        }
        if inv.kwargs:
            keywords = abstractify(dict(inv.kwargs))
            spec["kwargs"] = {name: _tree_to_plain(value) for name, value in keywords.items()}
        if inv.batch_axes is not None:
            spec["batch"] = _batch_to_plain(inv.batch_axes)
        if inv.differentiated:
            spec["grad"] = list(inv.differentiated)
        if cfg is not None:
            spec["config"] = to_plain(cfg)
        text = json.dumps(spec, separators=(",", ":"), ensure_ascii=True)
    except TypeError:
        return None
    return text.replace("'", "\\u0027").replace('"', "'")


def _batch_to_plain(batch: Any) -> dict[str, Any]:
    if not isinstance(batch, BatchAxes):
        raise TypeError("batch axes of the caller's own cannot be written")
    return {
        "transform": batch.transform,
        "in_axes": _tree_to_plain(batch.in_axes),
        "size": batch.size,
    }


def _tree_to_plain(value: Any) -> Any:
    """Data as signatures, containers by kind, and of other values those that read back equal."""
    if is_array(value):
        signature = leaf_signature(value)
        if not _ARRAY.fullmatch(signature):  # an explicit sharding: its mesh cannot be rebuilt
            raise TypeError(f"{signature} cannot be written")
        return {"$array": signature}
    if type(value) in (tuple, list):
        tag = "$tuple" if type(value) is tuple else "$list"
        return {tag: [_tree_to_plain(item) for item in value]}
    if type(value) is dict:
        if not all(type(key) is str for key in value):
            raise TypeError("only dicts with string keys can be written")
        return {"$dict": {key: _tree_to_plain(item) for key, item in value.items()}}
    if type(value) in (bool, int, float, str, type(None)) or is_dtype_like(value):
        return to_plain(value)
    raise TypeError(f"a {type(value).__name__} cannot be written")


# --- reading -------------------------------------------------------------------------------------


def read_specification(text: str) -> Invocation[Any, Any]:
    """The call that a specification describes, with its kernel.

    The kernel is one that lives in this process under the same operation id; else its module is
    imported and its class constructed without arguments.
    """
    try:
        spec = parse_json(text.replace('"', "\\u0022").replace("'", '"'), nan=True)
        op_id, kernel_name, args = spec["op"], spec["kernel"], spec["args"]
        positional = tuple(_tree_from_plain(arg) for arg in args)
        keywords = {name: _tree_from_plain(value) for name, value in spec.get("kwargs", {}).items()}
        batch = None
        if "batch" in spec:
            plain = spec["batch"]
            axes = _tree_from_plain(plain["in_axes"])
            batch = BatchAxes(plain["transform"], axes, plain["size"])
        differentiated = spec.get("grad", [])
        if not isinstance(op_id, str) or not isinstance(kernel_name, str):
            raise TypeError("op and kernel must be strings")
        if not isinstance(differentiated, list) or not all(
            isinstance(name, str) for name in differentiated
        ):
            raise TypeError("grad must be a list of strings")
    except _DAMAGED as error:
        raise SpecificationError(
            f"the specification {text[:200]!r} is damaged: {error!r}"
        ) from error
    inv: Invocation[Any, Any] = Invocation(
        kernel=find_kernel(op_id, kernel_name),
        args=abstractify_arguments(positional),
        kwargs=keywords,
        batch_axes=batch,
        differentiated=tuple(differentiated),
    )
    try:
        inv.key  # noqa: B018  asked by whoever reads it, and not every call has one
    except (TypeError, ValueError) as error:
        raise SpecificationError(f"{op_id}: there is no such call: {error}") from error
    return inv


def describe_specification(text: str) -> dict[str, str]:
    """The kernel and the call of a specification, readable; nothing is imported.

    >>> spec = "{'op':'m@v1','kernel':'k:M','args':[{'$array':'float32[8]'}],'kwargs':{'n':2}}"
    >>> describe_specification(spec)
    {'kernel': 'k:M', 'signature': 'float32[8], n=2'}
    """
    try:
        spec = parse_json(text.replace('"', "\\u0022").replace("'", '"'), nan=True)
        parts = [_readable(argument) for argument in spec["args"]]
        parts += [f"{name}={_readable(value)}" for name, value in spec.get("kwargs", {}).items()]
        signature = ", ".join(parts)
        if spec.get("grad"):
            signature = f"grad[{', '.join(map(str, spec['grad']))}]({signature})"
        return {"kernel": str(spec["kernel"]), "signature": signature}
    except _DAMAGED:
        return {}


def _readable(plain: Any) -> str:
    if isinstance(plain, dict):
        for tag, form in (("$tuple", "({})"), ("$list", "[{}]")):
            if tag in plain:
                return form.format(", ".join(map(_readable, plain[tag])))
        if "$array" in plain:
            return str(plain["$array"])
        if "$dict" in plain:
            items = (f"{key}: {_readable(value)}" for key, value in plain["$dict"].items())
            return "{" + ", ".join(items) + "}"
    return repr(plain)


def find_kernel(op_id: str, qualified: str) -> Kernel[Any, Any]:
    """The kernel with this operation id: alive already, or made from its class."""
    alive = kernel_named(op_id)
    if alive is not None:
        return alive
    module_name, _, path = qualified.partition(":")
    if "<locals>" in path:
        raise SpecificationError(
            f"{op_id}: its kernel class {qualified} is defined inside a function and cannot be "
            "imported; create the kernel in this process first"
        )
    try:
        found: Any = importlib.import_module(module_name)
        alive = kernel_named(op_id)  # importing the module may have created it
        if alive is not None:
            return alive
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a script ends so
        raise SpecificationError(
            f"{op_id}: its kernel {qualified} cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Kernel)):
        raise SpecificationError(f"{op_id}: {qualified} is not a Kernel class")
    try:
        made = found()
    except (Exception, SystemExit) as error:
        raise SpecificationError(
            f"{op_id}: {qualified} cannot be constructed without arguments ({error}); create the "
            "kernel in this process first"
        ) from error
    if made.full_op_id != op_id:
        raise SpecificationError(f"{op_id}: {qualified}() makes a kernel called {made.full_op_id}")
    return made


def _tree_from_plain(plain: Any) -> Any:
    if isinstance(plain, dict):
        if "$array" in plain:
            return _array_from_signature(plain["$array"])
        if "$tuple" in plain:
            return tuple(_tree_from_plain(item) for item in plain["$tuple"])
        if "$list" in plain:
            return [_tree_from_plain(item) for item in plain["$list"]]
        if "$dict" in plain:
            return {key: _tree_from_plain(item) for key, item in plain["$dict"].items()}
    return from_plain(plain, Any)


def _array_from_signature(signature: str) -> jax.ShapeDtypeStruct:
    match = _ARRAY.fullmatch(signature)
    if match is None:
        raise ValueError(f"{signature!r} is not an array signature")
    shape = tuple(int(size) for size in match["shape"].split(",") if size)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(match["dtype"]), weak_type=bool(match["weak"]))
