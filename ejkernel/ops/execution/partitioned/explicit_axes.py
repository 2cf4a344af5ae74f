"""Passes on explicit mesh axes: JAX knows shardings while it traces, so a pass is a `shard_map`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ...core.partitioning import Axes, Shards, axes_of_entry
from .passes import DEVICE, Function, Pass, mappable, mapped_name


@dataclasses.dataclass(frozen=True)
class ExplicitAxes:
    """Places passes of a call whose dimensions are sharded as `shards` says.

    `visible` are the axes that JAX does not hide where the call is. What JAX traces for a pullback
    names the axes that it can see; where some are hidden, both passes are traced with and without
    these, in an order of JAX's own, so there no residuals are saved.
    """

    mesh: Any
    shards: Shards
    visible: Axes

    @property
    def saves_residuals(self) -> bool:
        """Whether the forward pass may give more than its outputs."""
        return self.visible == explicit_axes(self.mesh)

    def place(self, work: Pass) -> Function:
        """The pass as a function of arrays, which are resharded where they need to be."""

        def run(*arrays: Any) -> list[Any]:
            return self._run(work, arrays)

        if self.saves_residuals:
            return run  # where nothing is hidden, JAX maps and differentiates a `shard_map` itself

        def run_mapped(size: int, batched: list[bool], arrays: Sequence[Any]) -> list[Any]:
            sharded = self._mapped(work.maps, batched, arrays)
            return sharded.place(work.mapped(size, batched))(*arrays)

        return mappable(run, run_mapped, run)

    def _run(self, work: Pass, arrays: Sequence[Any]) -> list[Any]:
        own = dataclasses.replace(self.shards, axes={**self.shards.axes, DEVICE: self.visible})
        ins = [own.spec(dims) for dims in work.ins]
        outs = [own.spec(dims) for dims in work.outs]
        count = len(outs)

        def on_device(*arrays: Any) -> tuple[list[Any], list[Any]]:
            leaves = work.on_device(self.shards, arrays)
            return leaves[:count], leaves[count:]

        axes = visible_axes(self.mesh)
        if axes:
            on_device = jax.shard_map(
                on_device,
                in_specs=tuple(ins),
                out_specs=(outs, own.spec([(DEVICE,)])),
                axis_names=set(axes),
                check_vma=False,
                **_mesh_where_none_is_set(self.mesh),
            )
        found, saved = on_device(*map(self.resharded, arrays, ins))
        return [*found, *saved]

    def _mapped(self, number: int, batched: list[bool], arrays: Sequence[Any]) -> ExplicitAxes:
        """The same for a batch, which is sharded as the first array is that has it."""
        specs = [jax.typeof(a).sharding.spec for a, b in zip(arrays, batched, strict=True) if b]
        found = next((axes for spec in specs if (axes := axes_of_entry(spec[0]))), ())
        taken = {*self.visible, *(a for axes in self.shards.axes.values() for a in axes)}
        if not found or taken & set(found):
            return self
        shards = dataclasses.replace(
            self.shards,
            axes={**self.shards.axes, mapped_name(number): found},
            mesh_sizes={**self.shards.mesh_sizes, **{a: self.mesh.shape[a] for a in found}},
        )
        return dataclasses.replace(self, shards=shards)

    def resharded(self, array: Any, spec: PartitionSpec) -> Any:
        """The array, sharded like that."""
        sharding = jax.typeof(array).sharding
        if sharding.spec == spec and sharding.mesh == self.mesh:
            return array
        return jax.sharding.reshard(array, NamedSharding(self.mesh, spec))


def explicit_axes(mesh: Any) -> Axes:
    """The explicit axes of a mesh, those that `jax.vmap` hides among them."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind is AxisType.Explicit)


def visible_axes(mesh: Any) -> Axes:
    """The explicit axes that can be used here.

    Inside of a `jax.vmap` over a sharded dimension JAX hides its axes, and the mesh does not say
    so; but a `shard_map` that is not told otherwise takes all axes that it can.
    """
    explicit = explicit_axes(mesh)
    if not explicit:
        return ()
    manual: list[Axes] = []

    def look() -> tuple[()]:
        manual.append(jax.sharding.get_abstract_mesh().manual_axes)
        return ()

    where = _mesh_where_none_is_set(mesh)
    jax.eval_shape(jax.shard_map(look, in_specs=(), out_specs=(), **where))
    return tuple(axis for axis in explicit if axis in manual[-1])


def _mesh_where_none_is_set(mesh: Any) -> dict[str, Any]:
    """The mesh as a keyword: that of the context is meant unless there is none."""
    return {} if not jax.sharding.get_abstract_mesh().empty else {"mesh": mesh}
