"""One call of a kernel, as a value: its arguments, its key, and how to say it to a person."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic

import jax
import jax.numpy as jnp

from ...formatting import lasting
from ..utils.fingerprint import (
    abstractify,
    abstractify_arguments,
    device_fingerprint,
    is_array,
    leaf_signature,
    short_hash,
    stable_json,
    tree_signature,
)
from ..utils.serialize import is_symbolic
from .requirements import implementation_for
from .types import Cfg, ConfigKey, Out

if TYPE_CHECKING:
    from .kernel import Kernel

_CALL_KEY = re.compile(r"[0-9a-f]{16}")

KeyBuilder = Callable[["Invocation[Any, Any]"], str]


@dataclasses.dataclass(frozen=True)
class BatchAxes:
    """How a call is batched: `vmap` or `pmap`, over which axes, how many of them."""

    transform: str
    in_axes: Any
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Invocation(Generic[Cfg, Out]):
    """A kernel, its arguments and what is known about the call.

    The executor builds one while tracing; `kernel.bind(*args, **kwargs)` and the constructor build
    one by hand, with the kernel itself or with an operation id alone.

    `call_key` identifies the call for caches: it comes from shapes, dtypes, weak types, explicit
    shardings, tree structure, static keyword values, batch axes and what is differentiated, never
    from array values.

    `differentiated` names the arguments whose gradients the program computes, positional ones by
    their number (`("0", "1", "bias")`). Empty, it is a call that runs forward only. The two are
    different questions: what is fastest forward need not be fastest forward and backward.
    """

    op_id: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kernel: Kernel[Cfg, Out] | None = None
    batch_axes: Any = None
    override_cfg: Cfg | None = None
    stamp: bool = True
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    differentiated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kernel is None and not self.op_id:
            raise TypeError("Invocation needs a kernel= or an op_id=")
        if self.kernel is not None and not self.op_id:
            object.__setattr__(self, "op_id", self.kernel.op_id)
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs or {}))
        object.__setattr__(self, "metadata", dict(self.metadata or {}))
        object.__setattr__(self, "differentiated", tuple(self.differentiated))

    @property
    def full_op_id(self) -> str:
        """Operation and version, `matmul@v1`: the name used in caches, labels and events."""
        if "@v" in self.op_id:
            return self.op_id
        version = self.kernel.version if self.kernel is not None else "1"
        return f"{self.op_id}@v{version}"

    @functools.cached_property
    def abstract_args(self) -> Any:
        """The positional arguments as a pytree of `jax.ShapeDtypeStruct`."""
        return abstractify_arguments(self.args)

    @functools.cached_property
    def device_fingerprint(self) -> str:
        """The device this call runs on (see `ejkernel.ops.device_fingerprint`)."""
        return str(self.metadata.get("device") or device_fingerprint())

    @functools.cached_property
    def call_key(self) -> str:
        """16 hexadecimal digits that identify this call among those of the operation."""
        handled_by = self.handled_by
        return short_hash(
            {
                "args": tree_signature(self.abstract_args),
                "kwargs": {
                    name: self._keyword_signature(name, value)
                    for name, value in self.kwargs.items()
                    if name not in self._unkeyed
                },
                "batch_axes": self.batch_axes,
                # Tiles of a C++ kernel mean nothing to XLA: where several implementations may
                # handle a call, configs are stored apart by the one that does.
                **({} if handled_by is None else {"served_by": handled_by}),
                **({"differentiated": self.differentiated} if self.differentiated else {}),
            }
        )

    @functools.cached_property
    def handled_by(self) -> str | None:
        """The implementation that handles this call, if the kernel declares what they support."""
        kernel = self.kernel
        if kernel is None or kernel.tune_implementations:
            return None
        if not (kernel.supports or kernel.implementations) or not kernel.implementations_here():
            return None
        return implementation_for(kernel, self).name

    def make_key(self, key_builder: KeyBuilder | None = None) -> str:
        """The call key; from `key_builder(self)` if given, else from the kernel's own, if any."""
        builder = key_builder or (self.kernel.key_builder if self.kernel is not None else None)
        return self.call_key if builder is None else builder(self)

    @functools.cached_property
    def key(self) -> ConfigKey:
        """The complete cache key: device, operation with version, call."""
        call_key = self.make_key()
        if self.differentiated and call_key != self.call_key:
            # A key builder need not know that a call with its gradient is another question.
            call_key = short_hash({"built": call_key, "differentiated": self.differentiated})
        if not _CALL_KEY.fullmatch(call_key):  # a key builder may return any text
            call_key = short_hash(call_key)
        return ConfigKey(self.device_fingerprint, self.full_op_id, call_key)

    @property
    def signature(self) -> str:
        """The call as a person would write it: `float32[8,8], float32[8,8], causal=True`.

        Keywords with the values that the kernel calls their defaults are left out.
        """
        usual = {} if self.kernel is None else self.kernel.default_keywords(*self.args)
        positional = [readable(arg) for arg in self.args]
        keywords = [
            f"{name}={readable(value)}"
            for name, value in self.kwargs.items()
            if name not in usual or type(value) is not type(usual[name]) or value != usual[name]
        ]
        text = ", ".join(positional + keywords)
        if self.differentiated:
            text = f"grad[{', '.join(self.differentiated)}]({text})"
        if self.batch_axes is None:
            return text
        if isinstance(self.batch_axes, BatchAxes):
            return f"{self.batch_axes.transform}[{self.batch_axes.size}]({text})"
        return f"batch[{self.batch_axes}]({text})"

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The arguments that hold inexact arrays, named as in `differentiated`."""
        owners = array_owners(self.args, self.kwargs)
        return tuple(dict.fromkeys(name for name, leaf in owners if is_inexact(leaf)))

    def differentiate(self, *names: str) -> Invocation[Cfg, Out]:
        """The same call in a program that differentiates it, in these arguments (default: all)."""
        return dataclasses.replace(self, differentiated=names or self.differentiable)

    def forward(self) -> Invocation[Cfg, Out]:
        """The same call in a program that does not differentiate it."""
        return dataclasses.replace(self, differentiated=()) if self.differentiated else self

    def abstract(self) -> Invocation[Cfg, Out]:
        """The same call with shapes instead of arrays: safe to hold, equal in every key."""
        return dataclasses.replace(
            self,
            args=self.abstract_args,
            kwargs=abstractify(dict(self.kwargs)),
            metadata=abstractify(dict(self.metadata)),
        )

    @property
    def _unkeyed(self) -> tuple[str, ...]:
        return self.kernel.unkeyed if self.kernel is not None else ()

    def _keyword_signature(self, name: str, value: Any) -> Any:
        try:
            if any(is_array(leaf) for leaf in jax.tree.leaves(value)):
                return tree_signature(abstractify_arguments(value))
            return {"static": stable_json(value)}
        except TypeError as error:
            raise TypeError(
                f"kernel {self.full_op_id}: the keyword {name!r} cannot be part of the cache key: "
                f"{error}. If it does not affect which config is best, name it in the kernel's "
                f"`unkeyed = ({name!r},)`"
            ) from error


def array_owners(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every array of a call with the argument that holds it: its number, or its keyword.

    They are in the order of `jax.tree.leaves((args, kwargs))`.
    """
    owners = [*((str(i), arg) for i, arg in enumerate(args)), *sorted(kwargs.items())]
    return [
        (name, leaf) for name, value in owners for leaf in jax.tree.leaves(value) if is_array(leaf)
    ]


def is_inexact(leaf: Any) -> bool:
    """True for an array of floating or complex numbers."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def symbolic_sizes(tree: Any) -> list[Any]:
    """The distinct symbolic sizes of the arrays of a pytree, in order."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    return list(dict.fromkeys(size for shape in shapes for size in shape if is_symbolic(size)))


def readable(value: Any) -> str:
    """An argument as a person would write it, with arrays as their dtype and shape."""
    leaves = jax.tree.leaves(value)
    if is_array(value):
        return leaf_signature(value)
    if not any(is_array(leaf) for leaf in leaves):
        return lasting(repr(value))
    shown = ", ".join(leaf_signature(leaf) for leaf in leaves[:4])
    more = f", … {len(leaves) - 4} more" if len(leaves) > 4 else ""
    return f"{type(value).__name__}({shown}{more})"


# --- what is traced of a call, and what is fixed -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StaticPart:
    """The fixed part of a pytree; `merge` puts arrays back in their places."""

    structure: Any
    fixed: tuple[Any, ...]  # one per leaf; `ARRAY` where an array belongs

    def merge(self, arrays: Any) -> Any:
        """The original pytree with these arrays in it."""
        supply = iter(arrays)
        leaves = [next(supply) if leaf is ARRAY else leaf for leaf in self.fixed]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def array_positions(self) -> tuple[int, ...]:
        """The indices, among all leaves, of those that are arrays."""
        return tuple(i for i, leaf in enumerate(self.fixed) if leaf is ARRAY)


class _Array:
    def __repr__(self) -> str:
        return "<array>"


ARRAY = _Array()
"""Stands where an array belongs."""


def split(tree: Any, is_data: Callable[[Any], bool] = is_array) -> tuple[list[Any], StaticPart]:
    """The arrays (or whatever `is_data` says) of a pytree, in order, and everything else."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_data(leaf)]
    fixed = tuple(ARRAY if is_data(leaf) else leaf for leaf in leaves)
    return arrays, StaticPart(structure, fixed)
