"""Which calls are partitioned, and how: by the axes of the mesh of their arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding

from ...core.invocation import Invocation, split
from ...core.kernel import Kernel
from ...core.partitioning import Layout, Shards, rule_of
from .auto_axes import AutoAxes
from .explicit_axes import ExplicitAxes, explicit_axes, visible_axes
from .gradient import run_with_gradient
from .passes import PartitionedCall, Run


class Partitioned(NamedTuple):
    """The output of a call that was partitioned."""

    output: Any


def run_partitioned(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any], run: Run, run_whole: Run
) -> Partitioned | None:
    """Run a call on every device of the mesh of its arrays; None if that is not needed.

    `run(inv, kernel)` selects and runs with the shapes it is given; `run_whole` does the same for
    whole arrays, without selecting anything. Inside a `shard_map` of the user's nothing is left to
    do, since shapes are local already.
    """
    args, kwargs = inv.args, dict(inv.kwargs)
    arrays, rest = split((args, kwargs))
    shardings = [jax.typeof(array).sharding for array in arrays]
    mesh = next((s.mesh for s in shardings if not s.mesh.empty), None)
    if mesh is None:
        return None
    kinds = set(mesh.axis_types)
    by_compiler = mesh.size > 1 and AxisType.Auto in kinds and AxisType.Manual not in kinds
    rule = rule_of(kernel, inv) if by_compiler or _is_sharded(mesh, shardings) else None
    if rule is None:
        return None
    layout = rule.layout(args, kwargs)
    # Without its arrays: the gradient rule outlives the trace that they belong to.
    call = PartitionedCall(inv.abstract(), kernel, layout, rest, run, run_whole)

    def compiled(*arrays: Any) -> Any:
        return run_with_gradient(call, AutoAxes(), arrays)

    if kinds == {AxisType.Auto}:
        return Partitioned(compiled(*arrays))
    sizes = {axis: mesh.shape[axis] for axis in visible_axes(mesh)}
    shards = call.shards(layout, [sharding.spec for sharding in shardings], sizes)
    if by_compiler:
        # A `shard_map` over the explicit axes would leave the auto ones to XLA's partitioner, which
        # gathers the arguments of custom calls, and ends the process over some gathers.
        return Partitioned(_with_auto_axes(compiled, mesh, shards, layout)(*arrays))
    placement = ExplicitAxes(mesh, shards, tuple(sizes))
    resharded = map(placement.resharded, arrays, map(shards.spec, layout.arguments))
    return Partitioned(run_with_gradient(call, placement, list(resharded)))


def run_definition(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], run: Run) -> Any:
    """Run a kernel's definition, which is plain JAX, whatever the shardings of its arrays.

    Explicit axes are left to the compiler inside, because JAX refuses many a product or gather of
    sharded arrays where they are explicit; the outputs are sharded as those of the other
    implementations. It can be differentiated any number of times.
    """
    arrays, rest = split((inv.args, dict(inv.kwargs)))
    shardings = [jax.typeof(array).sharding for array in arrays]
    mesh = next((s.mesh for s in shardings if not s.mesh.empty), None)
    sharded = mesh is not None and _is_sharded(mesh, shardings)
    rule = rule_of(kernel, inv) if sharded and kernel.partitioning is not None else None
    if mesh is None or rule is None:
        return run(inv, kernel)

    def compute(*arrays: Any) -> Any:
        args, kwargs = rest.merge(arrays)
        return run(dataclasses.replace(inv, args=args, kwargs=kwargs), kernel)

    layout = rule.layout(inv.args, inv.kwargs)
    sizes = {axis: mesh.shape[axis] for axis in visible_axes(mesh)}
    shards, _ = layout.shards([sharding.spec for sharding in shardings], sizes)
    return _with_auto_axes(compute, mesh, shards, layout)(*arrays)


def _is_sharded(mesh: Any, shardings: Sequence[Any]) -> bool:
    """Whether arrays are sharded over explicit axes, seen or hidden by `jax.vmap`."""
    # Only explicit axes are in the shardings of types.
    seen = any(entry is not None for sharding in shardings for entry in sharding.spec)
    return seen or visible_axes(mesh) != explicit_axes(mesh)


def _with_auto_axes(
    function: Callable[..., Any], mesh: Any, shards: Shards, layout: Layout
) -> Callable[..., Any]:
    """A function of the arrays of a call inside of which explicit axes are left to the compiler."""

    def run(*arrays: Any) -> Any:
        structures: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            leaves, structure = jax.tree.flatten(function(*arrays))
            structures.append(structure)
            return leaves

        outs = [NamedSharding(mesh, shards.spec(dims)) for dims in layout.outputs]
        axes = explicit_axes(mesh)
        leaves = jax.sharding.auto_axes(flat, axes=axes, out_sharding=outs)(*arrays)
        return jax.tree.unflatten(structures[-1], leaves)

    return run
