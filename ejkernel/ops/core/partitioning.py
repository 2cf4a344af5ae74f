"""How the dimensions of an operation map onto a mesh: one rule per operation, and what follows.

A rule names the dimensions of every argument and output, and says which of them may be sharded.
From the shardings of a call's arrays follow the mesh axes of each dimension, the local shapes, and
the arrays that have to be gathered because the operation cannot keep their sharding.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from ..utils.fingerprint import is_array

if TYPE_CHECKING:
    from .invocation import Invocation

Axes = tuple[str, ...]
Dim = tuple[str, ...]
"""The names in one dimension, the slowest first: `(k g)` is `("k", "g")`; `()` has no name."""

LEADING = "..."
MAPPED = "mapped:"
"""Begins the name of a dimension that `jax.vmap` added; a rule cannot have such names."""

_DIM = re.compile(r"\.\.\.|\(\s*\w+(?:\s+\w+)*\s*\)|\w+")


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """Which dimensions of a call may be sharded, and what a device then has to do::

        partitioning = Partitioning("b s h d, b t h d, b t h e -> b s h e", independent="b h")

    A call whose arrays are sharded over a mesh then runs on every device with the local shapes:
    these are selected for, labelled and tuned, and the result stays sharded. A sharding of any
    other dimension is gathered first, with a warning.

    Args:
      dims: the dimensions of the positional arguments and of the outputs, by name. `(k g)` is one
        dimension made of two, `...` stands for any number of leading dimensions. A dimension of
        size 1 where another array has more is broadcast.
      keywords: the dimensions of keyword arguments; arrays that are not listed stay whole.
      independent: dimensions whose parts do not depend on each other.
      summed: dimensions that are summed over: the result is the sum of the devices' results.
      across: dimensions for which the operation itself talks to the other devices, each with the
        keyword that tells it the mesh axes (as a tuple of names); `...` for all leading ones.
        Outputs that lack such a dimension are the same on all its devices; a gradient rule of
        the kernel's own is given their whole gradient on each.
      localize: makes local arguments of those that hold positions or sizes of the whole:
        `localize(args, kwargs, shards) -> (args, kwargs)`, called on every device.
    """

    dims: str
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
    independent: str = ""
    summed: str = ""
    across: Mapping[str, str] = dataclasses.field(default_factory=dict)
    localize: Callable[[tuple[Any, ...], dict[str, Any], Shards], tuple[Any, Any]] | None = None

    def __post_init__(self) -> None:
        given, arrow, made = self.dims.partition("->")
        if not arrow:
            raise ValueError(
                f"Partitioning: {self.dims!r} has no outputs; write 'arguments -> outputs'"
            )
        named = {
            name
            for text in (*given.split(","), *made.split(","), *self.keywords.values())
            for dim in _parse(text)
            for name in dim
        }
        sharded = {*self.independent.split(), *self.summed.split(), *self.across}
        for name in sorted(sharded - named):
            raise ValueError(
                f"Partitioning: no array of {self.dims!r} has a dimension {name!r}; it has "
                f"{', '.join(sorted(named))}"
            )

    def may_shard(self, name: str) -> bool:
        """Whether this dimension may be sharded; leading ones (`...`) always may."""
        return (
            name.startswith((LEADING, MAPPED))
            or name in self.independent.split()
            or name in self.summed.split()
            or name in self.across
        )

    def layout(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Layout:
        """The rule with the ranks and sizes of one call."""
        given, _, made = self.dims.partition("->")
        positional = [_parse(part) for part in given.split(",")]
        by_keyword = {name: _parse(dims) for name, dims in self.keywords.items()}
        names, arrays = [], []
        dims: list[tuple[Dim, ...]] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path((args, dict(kwargs))):
            if not is_array(leaf):
                continue
            group, place = path[0].idx, path[1]
            name = f"argument {place.idx}" if group == 0 else str(place.key)
            if group == 0 and place.idx >= len(positional):
                raise ValueError(
                    f"Partitioning({self.dims!r}) names {len(positional)} arguments, and the call "
                    f"has an array in {name}; arguments are counted from 0"
                )
            declared = positional[place.idx] if group == 0 else by_keyword.get(place.key)
            names.append(name)
            arrays.append(leaf)
            if declared is None or len(path) > 2:
                dims.append(((),) * len(leaf.shape))
                continue
            dims.append(_expanded(declared, len(leaf.shape)))
            if len(dims[-1]) != len(leaf.shape):
                raise ValueError(
                    f"Partitioning({self.dims!r}): {name} has shape {tuple(leaf.shape)}, and its "
                    f"dimensions are given as {len(declared)} names"
                )
        leading = max((_leading(d) for d in dims), default=0)
        outputs = tuple(
            _expanded(part, leading + len(part) - 1) for part in map(_parse, made.split(","))
        )
        sizes = _sizes(dims, [tuple(array.shape) for array in arrays])
        # An array of size 1 in a dimension that others have more of is broadcast there.
        own_dims = tuple(
            tuple(
                dim if math.prod(sizes.get(name, 1) for name in dim) == size else ()
                for dim, size in zip(array_dims, array.shape, strict=True)
            )
            for array_dims, array in zip(dims, arrays, strict=True)
        )
        return Layout(self, tuple(names), own_dims, outputs, sizes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dimensions of the arrays of one call: `arguments` in the order of the arrays."""

    rule: Partitioning
    names: tuple[str, ...]
    arguments: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]

    def shards(
        self, shardings: Iterable[Sequence[Any]], mesh_sizes: Mapping[str, int]
    ) -> tuple[Shards, list[str]]:
        """The mesh axes of each dimension, and in sentences what has to be gathered.

        `shardings` are the partition specs of the arrays, `mesh_sizes` the sizes of the mesh axes
        that can be kept. Where two arrays disagree the first one decides.
        """
        axes: dict[str, Axes] = {}
        taken: set[str] = set()
        gathered: list[str] = []
        for name, dims, spec in zip(self.names, self.arguments, shardings, strict=True):
            for position, (dim, entry) in enumerate(zip(dims, spec, strict=False)):
                wanted = axes_of_entry(entry)
                if not wanted:
                    continue
                found = None
                if mesh_sizes.keys() >= set(wanted):
                    found = self._shardable(dim, math.prod(mesh_sizes[axis] for axis in wanted))
                if found is not None and axes.get(found) == wanted:
                    continue
                if found is not None and found not in axes and not taken & set(wanted):
                    axes[found] = wanted
                    taken |= set(wanted)
                    continue
                if any(mesh_sizes.get(axis) != 1 for axis in wanted):
                    over = " and ".join(map(repr, wanted))
                    gathered.append(f"{name} is sharded over {over} in dimension {position}")
        return Shards(axes, {name: mesh_sizes[name] for name in taken}, self.rule), gathered

    def _shardable(self, dim: Dim, parts: int) -> str | None:
        """The name in a dimension that can be cut into so many parts."""
        for name in dim:
            if self.rule.may_shard(name) and self.sizes[name] % parts == 0:
                return name
            if self.sizes[name] != 1:
                return None
        return None


@dataclasses.dataclass(frozen=True)
class Shards:
    """The mesh axes over which the dimensions of a call are sharded; what `localize` is given."""

    axes: Mapping[str, Axes]
    mesh_sizes: Mapping[str, int]
    rule: Partitioning

    def axes_of(self, name: str) -> Axes:
        """The mesh axes of a dimension; of `...` those of all leading ones."""
        if name != LEADING:
            return self.axes.get(name, ())
        return tuple(a for n, axes in self.axes.items() if n.startswith(LEADING) for a in axes)

    def index(self, name: str) -> jax.Array | int:
        """The number of this device's part of a dimension; 0 if it is not sharded."""
        axes = self.axes.get(name)
        return 0 if axes is None else jax.lax.axis_index(axes)

    def count(self, name: str) -> int:
        """The number of parts of a dimension; 1 if it is not sharded."""
        return math.prod(self.mesh_sizes[axis] for axis in self.axes_of(name))

    def spec(self, dims: Iterable[Dim]) -> PartitionSpec:
        """How an array of these dimensions is sharded."""
        entries: list[Axes | None] = []
        for dim in dims:
            axes = tuple(axis for name in dim for axis in self.axes.get(name, ()))
            entries.append(axes or None)
        return PartitionSpec(*entries)

    def axes_outside(self, dims: Iterable[Dim]) -> Axes:
        """The axes of the sharded dimensions that an array of these dimensions does not have."""
        own = {name for dim in dims for name in dim}
        return tuple(axis for name, axes in self.axes.items() if name not in own for axis in axes)

    def summed_into(self, dims: Iterable[Dim]) -> Axes:
        """The axes over which the devices' parts of an output of these dimensions are added."""
        summed, own = self.rule.summed.split(), {name for dim in dims for name in dim}
        return tuple(a for name in summed if name not in own for a in self.axes.get(name, ()))

    def repeating(self, dims: Iterable[Dim], apart_from: Iterable[str] = ()) -> Axes:
        """The axes along which every device has the same output of these dimensions.

        These are the axes of the sharded dimensions that it lacks, but for those it is summed over.
        `apart_from` names dimensions to leave out.
        """
        known = {*self.rule.summed.split(), *apart_from, *(name for dim in dims for name in dim)}
        return tuple(
            axis
            for name, axes in self.axes.items()
            if name not in known
            and not name.startswith(MAPPED)
            and not (name.startswith(LEADING) and LEADING in known)
            for axis in axes
        )

    def localized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call on this device, made of the local arrays."""
        if self.rule.localize is not None:
            args, kwargs = self.rule.localize(args, kwargs, self)
        told = {keyword: self.axes_of(name) for name, keyword in self.rule.across.items()}
        return args, {**kwargs, **{keyword: axes for keyword, axes in told.items() if axes}}


def rule_of(kernel: Any, inv: Invocation[Any, Any]) -> Partitioning | None:
    """What a kernel declares for a call: a `Partitioning`, or a function of the invocation."""
    declared = kernel.partitioning
    found = declared(inv) if callable(declared) else declared
    if found is not None and not isinstance(found, Partitioning):
        raise TypeError(
            f"kernel {kernel.full_op_id}: partitioning is {found!r}; it must be a Partitioning, a "
            "method that returns one, or None"
        )
    return found


def needs_mesh(kernel: Any, inv: Invocation[Any, Any]) -> bool:
    """Whether a call talks to other devices: it has one of the keywords that tell it mesh axes."""
    rule = None if kernel.partitioning is None else rule_of(kernel, inv)
    return rule is not None and any(keyword in inv.kwargs for keyword in rule.across.values())


def _parse(text: str) -> tuple[Dim, ...]:
    text = text.strip()
    if _DIM.sub("", text).strip():
        raise ValueError(f"Partitioning: cannot read the dimensions {text!r}")
    return tuple(tuple(found.strip("()").split()) for found in _DIM.findall(text))


def _expanded(dims: tuple[Dim, ...], rank: int) -> tuple[Dim, ...]:
    """The dimensions with `...` replaced by as many names as an array of this rank has there."""
    if (LEADING,) not in dims:
        return dims
    at, count = dims.index((LEADING,)), rank - len(dims) + 1
    return (*dims[:at], *((f"{LEADING}{i}",) for i in range(count)), *dims[at + 1 :])


def _leading(dims: tuple[Dim, ...]) -> int:
    return sum(len(dim) == 1 and dim[0].startswith(LEADING) for dim in dims)


def _sizes(dims: Sequence[tuple[Dim, ...]], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The size of every name; that of one inside `(k g)` follows from the others there."""
    pairs = [
        (dim, size)
        for array, shape in zip(dims, shapes, strict=True)
        for dim, size in zip(array, shape, strict=True)
        if dim
    ]
    sizes: dict[str, int] = {}
    for dim, size in pairs:
        if len(dim) == 1:
            sizes[dim[0]] = max(sizes.get(dim[0], 1), size)
    for dim, size in pairs:
        unknown = [name for name in dim if name not in sizes]
        if len(unknown) == 1:
            known = math.prod(sizes[name] for name in dim if name in sizes)
            if size != 1:
                sizes[unknown[0]] = size // known
    for dim, _ in pairs:
        for name in dim:
            sizes.setdefault(name, 1)
    return sizes


def axes_of_entry(entry: Any) -> Axes:
    """The mesh axes in one entry of a partition spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
