"""Run a call whose arrays are sharded over a mesh, on every device with its local shapes.

Where the mesh's axes are *explicit*, JAX knows shardings while it traces: the call is put into a
`shard_map`. Where they are *auto*, the compiler decides on them later: the call becomes a
`custom_partitioning`, and what runs is traced when the compiler asks for it. Inside a `shard_map`
of the user's nothing is left to do, since shapes are local already.

Either way a gradient is a second partitioned call: devices that hold an argument whole each have
the gradient of their own work, and these are added.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..config import ambient
from ..core.derivatives import reverse_mode_only, way_out
from ..core.gradients import StaticResidual, defines_gradient, materialised
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..core.partitioning import MAPPED, Dim, Layout, Shards, rule_of
from ..core.static_part import StaticPart, split
from ..utils.meta import collect_label, collecting_labels, label, marking_partitioned

logger = logging.getLogger(__name__)

_warned: set[str] = set()
_numbers = itertools.count()

Run = Callable[[Invocation[Any, Any], Kernel[Any, Any]], Any]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call to partition.

    `run` selects and runs on a device; `run_whole` has the same result from the whole arrays, for
    the compiler to know shapes by: it selects nothing.
    """

    inv: Invocation[Any, Any]
    kernel: Kernel[Any, Any]
    layout: Layout
    rest: StaticPart
    arrays: list[Any]
    run: Run
    run_whole: Run

    @property
    def op_id(self) -> str:
        return self.kernel.full_op_id

    def local(self, shards: Shards | None, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
        """The leaves of the output of the call with these arrays, and their structure."""
        args, kwargs = self.rest.merge(arrays)
        run = self.run_whole
        if shards is not None:
            run = self.run
            args, kwargs = shards.localized(args, kwargs)
        inv = dataclasses.replace(self.inv, args=args, kwargs=kwargs)
        if shards is not None:
            collect_label(label_of(inv))
        return jax.tree.flatten(run(inv, self.kernel))

    def shards(self, specs: Sequence[Any], mesh_sizes: Any, of: _Pass | None = None) -> Shards:
        """The mesh axes of the dimensions of the call, or of one pass of it; warns of gathering."""
        layout = self.layout
        if of is not None:
            cotangents = (f"the gradient of output {i}" for i in range(len(layout.outputs)))
            names = (*layout.names, *cotangents)[: len(of.ins)]
            layout = dataclasses.replace(
                layout, names=names, arguments=tuple(of.ins), sizes=of.sizes
            )
        shards, gathered = layout.shards(specs, mesh_sizes)
        for sentence in gathered:
            _warn_once(
                f"{self.op_id}: {sentence}, which cannot be kept there: it is gathered. Shard "
                "another dimension (docs/sharding.md lists them), or all arrays alike"
            )
        return shards

    def counted_once(self, shards: Shards, douts: Sequence[Any]) -> list[Any]:
        """The gradients of a device's outputs, such that adding those of all devices is right.

        An output that does not have a sharded dimension is the same on its devices, and each would
        count it: the first one does. For `across` dimensions that is also what JAX's gradient of a
        sum over devices needs; a rule of the kernel's own knows what it sums.
        """
        own = shards.rule.across if defines_gradient(self.kernel) else ()
        return [
            _of_first(dout, shards.repeating(dims, apart_from=own))
            for dout, dims in zip(douts, self.layout.outputs, strict=True)
        ]


class Partitioned(NamedTuple):
    """The output of a call that was partitioned."""

    output: Any


def run_partitioned(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any], run: Run, run_whole: Run
) -> Partitioned | None:
    """Run a call on every device of the mesh of its arrays; None if that is not needed.

    `run(inv, kernel)` selects and runs with the shapes it is given; `run_whole` does the same for
    whole arrays, without selecting anything.
    """
    if kernel.partitioning is None:
        return None
    args, kwargs = inv.args, dict(inv.kwargs)
    arrays, rest = split((args, kwargs))
    shardings = [jax.typeof(array).sharding for array in arrays]
    meshes = [sharding.mesh for sharding in shardings if not sharding.mesh.empty]
    mesh = next(iter(meshes), None)
    if mesh is None or mesh.size == 1:
        return None
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    auto = _axes_of_type(mesh, AxisType.Auto)
    manual = _axes_of_type(mesh, AxisType.Manual)
    specs = [sharding.spec for sharding in shardings]
    sharded = any(entry is not None for spec in specs for entry in spec)
    in_shard_map = bool(explicit) and sharded
    by_compiler = bool(auto) and not explicit and not manual
    if not in_shard_map and not by_compiler:
        return None
    rule = rule_of(kernel, inv)
    if rule is None:
        return None
    call = _Call(inv, kernel, rule.layout(args, kwargs), rest, arrays, run, run_whole)
    if in_shard_map:
        return Partitioned(_run_explicit(call, mesh, explicit, specs))
    return Partitioned(_run_auto(call))


def run_definition(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], run: Run) -> Any:
    """Run a kernel's definition, which is plain JAX, whatever the shardings of its arrays.

    Explicit axes are left to the compiler inside, because JAX refuses many a product or gather of
    sharded arrays where they are explicit; the outputs are sharded as those of the other
    implementations. It can be differentiated any number of times.
    """
    arrays, rest = split((inv.args, dict(inv.kwargs)))
    shardings = [jax.typeof(array).sharding for array in arrays]
    # Only explicit axes are in the shardings of types.
    mesh = next((s.mesh for s in shardings if any(entry is not None for entry in s.spec)), None)
    rule = None if mesh is None or kernel.partitioning is None else rule_of(kernel, inv)
    if mesh is None or rule is None:
        return run(inv, kernel)
    layout = rule.layout(inv.args, inv.kwargs)
    shards, _ = layout.shards([sharding.spec for sharding in shardings], mesh.shape)
    structures: list[Any] = []

    def compute(*arrays: Any) -> list[Any]:
        args, kwargs = rest.merge(arrays)
        output = run(dataclasses.replace(inv, args=args, kwargs=kwargs), kernel)
        leaves, structure = jax.tree.flatten(output)
        structures.append(structure)
        return leaves

    outs = [NamedSharding(mesh, shards.spec(dims)) for dims in layout.outputs]
    axes = _axes_of_type(mesh, AxisType.Explicit)
    leaves = jax.sharding.auto_axes(compute, axes=axes, out_sharding=outs)(*arrays)
    return jax.tree.unflatten(structures[-1], leaves)


# --- explicit axes: a shard_map ------------------------------------------------------------------


def _run_explicit(call: _Call, mesh: Any, axes: tuple[str, ...], specs: list[Any]) -> Any:
    shards = call.shards(specs, mesh.shape)
    ins = [shards.spec(dims) for dims in call.layout.arguments]
    outs = [shards.spec(dims) for dims in call.layout.outputs]
    arrays = [_resharded(a, mesh, s) for a, s in zip(call.arrays, ins, strict=True)]
    stacked = PartitionSpec(axes)  # residuals: those of each device, whatever their shape
    structures: list[Any] = []

    def mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        # The mesh of the context is meant unless there is none, as in a plain `jit`.
        where = {} if not jax.sharding.get_abstract_mesh().empty else {"mesh": mesh}
        return jax.shard_map(
            function,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=False,
            **where,
        )

    def compute(*arrays: Any) -> list[Any]:
        leaves, structure = call.local(shards, arrays)
        structures.append(structure)
        return _added(leaves, map(shards.summed_into, call.layout.outputs))

    @jax.custom_vjp
    def differentiable(arrays: list[Any]) -> Any:
        return mapped(compute, tuple(ins), outs)(*arrays)

    def forward(arrays: list[Any]) -> Any:
        wanted = _differentiated(arrays)
        pulls: list[Any] = []

        def compute_and_keep(*arrays: Any) -> Any:
            leaves, pull = _vjp(lambda *some: call.local(shards, some), arrays, wanted, structures)
            kept, structure = jax.tree.flatten(pull)
            pulls.append(structure)
            added = _added(leaves, map(shards.summed_into, call.layout.outputs))
            return added, [leaf[None] for leaf in kept]

        values = [array.value for array in arrays]
        out, kept = mapped(compute_and_keep, tuple(ins), (outs, stacked))(*values)
        return out, (kept, StaticResidual(call.op_id, (pulls[-1], wanted)))

    def backward(residuals: Any, dout: Any) -> tuple[list[Any]]:
        kept, static = residuals
        structure, wanted = static.value

        def pull_back(kept: list[Any], dout: list[Any]) -> list[Any]:
            pull = jax.tree.unflatten(structure, [leaf[0] for leaf in kept])
            dims = [call.layout.arguments[i] for i in wanted]
            return _added(pull(call.counted_once(shards, dout)), map(shards.axes_outside, dims))

        douts = [
            _resharded(leaf, mesh, spec)
            for leaf, spec in zip(materialised(dout), outs, strict=True)
        ]
        found = mapped(pull_back, (stacked, outs), [ins[i] for i in wanted])(kept, douts)
        return (_at(wanted, found, len(arrays)),)

    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    leaves = differentiable(reverse_mode_only(call.op_id, way_out(call.kernel), arrays))
    return jax.tree.unflatten(structures[-1], leaves)


def _resharded(array: Any, mesh: Any, spec: PartitionSpec) -> Any:
    if jax.typeof(array).sharding.spec == spec and jax.typeof(array).sharding.mesh == mesh:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))


# --- auto axes: the compiler decides, and asks ---------------------------------------------------


def _run_auto(call: _Call) -> Any:
    layout = call.layout
    structures: list[Any] = []

    def compute(shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
        leaves, structure = call.local(shards, arrays)
        structures.append(structure)
        return leaves

    @jax.custom_vjp
    def differentiable(arrays: list[Any]) -> Any:
        forward_pass = _Pass(call, compute, layout.arguments, layout.outputs, layout.sizes)
        return forward_pass.function()(*arrays)

    def forward(arrays: list[Any]) -> Any:
        values = [array.value for array in arrays]
        out = differentiable.fun(values)
        return out, (values, StaticResidual(call.op_id, _differentiated(arrays)))

    def backward(residuals: Any, dout: Any) -> tuple[list[Any]]:
        values, static = residuals
        wanted = static.value

        # What the forward pass keeps is not known before the compiler has decided, so it is
        # computed again.
        def pull_back(shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
            primals, dout = arrays[: len(values)], list(arrays[len(values) :])
            _, pull = _vjp(lambda *some: call.local(shards, some), primals, wanted, structures)
            return list(pull(dout if shards is None else call.counted_once(shards, dout)))

        ins = (*layout.arguments, *layout.outputs)
        outs = tuple(layout.arguments[i] for i in wanted)
        backward_pass = _Pass(call, pull_back, ins, outs, layout.sizes, backward=True)
        found = backward_pass.function()(*values, *materialised(dout))
        return (_at(wanted, found, len(values)),)

    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    leaves = differentiable(reverse_mode_only(call.op_id, way_out(call.kernel), call.arrays))
    return jax.tree.unflatten(structures[-1], leaves)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A pass of a call, forward or backward, that the compiler is to partition.

    `compute(shards, arrays)` gives a device's part of the outputs, or with `shards=None` the whole.
    """

    call: _Call
    compute: Callable[[Shards | None, Sequence[Any]], list[Any]]
    ins: Sequence[tuple[Dim, ...]]
    outs: Sequence[tuple[Dim, ...]]
    sizes: Mapping[str, int]
    backward: bool = False
    maps: int = 0  # how many times it was mapped over a batch

    def function(self) -> Callable[..., list[Any]]:
        """The pass as a function of arrays, which `jax.vmap` can map."""
        # Not with `ejkernel.ops` itself, which imports no more of JAX than `import jax` does.
        from jax.experimental.custom_partitioning import custom_partitioning

        # Unique in the program: the labels of what the compiler makes of it are found by it.
        name = f"{label_of(self.call.inv)} {next(_numbers)}"
        in_force = ambient.carried()  # the compiler asks from a thread of its own

        @jax.custom_batching.custom_vmap
        def run(*arrays: Any) -> list[Any]:
            partitioned = custom_partitioning(lambda *arrays: list(self.compute(None, arrays)))
            rule, factors = self._shardy_rule()
            partitioned.def_partition(
                functools.partial(self._partition, name, in_force), sharding_rule=rule, **factors
            )
            with marking_partitioned(name):
                return list(partitioned(*arrays))

        @run.def_vmap
        def _(size: int, batched: list[bool], *arrays: Any) -> Any:
            return self._mapped(size, batched).function()(*arrays), [True] * len(self.outs)

        return run

    def _partition(
        self, name: str, in_force: Callable[[], Any], mesh: Any, arrays: Any, results: Any
    ) -> Any:
        """What the compiler asks for: shardings, and the function of the local arrays."""
        del results  # they follow from the arguments
        shards = self.call.shards([a.sharding.spec for a in arrays], mesh.shape, self)

        def on_device(*arrays: Any) -> list[Any]:
            with in_force(), collecting_labels(name):
                leaves = self.compute(shards, arrays)
                if self.backward:
                    return _added(leaves, map(shards.axes_outside, self.outs))
                return _added(leaves, map(shards.summed_into, self.outs))

        def shardings(dims: Sequence[tuple[Dim, ...]]) -> list[NamedSharding]:
            return [NamedSharding(mesh, shards.spec(array)) for array in dims]

        return mesh, on_device, shardings(self.outs), tuple(shardings(self.ins))

    def _mapped(self, size: int, batched: Sequence[bool]) -> _Pass:
        """The same for every example of a batch; the batch is one more dimension."""
        name = f"{MAPPED} {self.maps}"
        in_axes = [0 if is_batched else None for is_batched in batched]

        def compute(shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
            local = next(a.shape[0] for a, b in zip(arrays, batched, strict=True) if b)

            def one(*some: Any) -> list[Any]:
                return self.compute(shards, some)

            return list(jax.vmap(one, in_axes, axis_size=local)(*arrays))

        return dataclasses.replace(
            self,
            compute=compute,
            ins=[((name,), *d) if b else d for d, b in zip(self.ins, batched, strict=True)],
            outs=[((name,), *dims) for dims in self.outs],
            sizes={**self.sizes, name: size},
            maps=self.maps + 1,
        )

    def _shardy_rule(self) -> tuple[str, dict[str, Any]]:
        """The rule in the words of the compiler's partitioner: each dimension has a name there."""
        names: dict[str, str] = {}
        alone: list[str] = []  # dimensions without a name: they are broadcast
        by_itself: set[str] = set()
        inside: set[str] = set()  # a compound dimension: the size does not follow from the array's

        def factor(name: str) -> str:
            return names.setdefault(name, f"d{len(names)}")

        def written(dim: Dim) -> str:
            sized = [name for name in dim if self.sizes[name] != 1 or len(dim) == 1]
            if len(sized) > 1:
                inside.update(sized)
                return f"({' '.join(map(factor, sized))})"
            if sized:
                by_itself.add(sized[0])
                return factor(sized[0])
            alone.append(f"a{len(alone)}")
            return alone[-1]

        sides = [
            ", ".join(" ".join(map(written, dims)) for dims in side)
            for side in (self.ins, self.outs)
        ]
        whole = [f for name, f in names.items() if not self.call.layout.rule.may_shard(name)]
        sizes = {names[name]: self.sizes[name] for name in sorted(inside - by_itself)}
        return " -> ".join(sides), {"need_replication_factors": tuple(whole + alone), **sizes}


def label_of(inv: Invocation[Any, Any]) -> str:
    """The label of a call."""
    return label(inv.full_op_id, inv.key.call_key)


# --- both ----------------------------------------------------------------------------------------


def _vjp(
    function: Callable[..., tuple[list[Any], Any]],
    arrays: Sequence[Any],
    wanted: tuple[int, ...],
    structures: list[Any],
) -> tuple[list[Any], Any]:
    """Output leaves and the pullback of a function, with respect to the wanted arrays."""

    def of_wanted(*some: Any) -> list[Any]:
        full = list(arrays)
        for i, value in zip(wanted, some, strict=True):
            full[i] = value
        leaves, structure = function(*full)
        structures.append(structure)
        return leaves

    return jax.vjp(of_wanted, *(arrays[i] for i in wanted))


def _differentiated(arrays: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        i
        for i, array in enumerate(arrays)
        if array.perturbed and jnp.issubdtype(array.value.dtype, jnp.inexact)
    )


def _added(leaves: Sequence[Any], axes: Iterable[tuple[str, ...]]) -> list[Any]:
    """Each of them summed over its mesh axes."""
    return [
        jax.lax.psum(leaf, over) if over else leaf for leaf, over in zip(leaves, axes, strict=True)
    ]


def _of_first(dout: Any, axes: tuple[str, ...]) -> Any:
    """A gradient on the first device along these mesh axes, zeros on the others."""
    if not axes or not jnp.issubdtype(dout.dtype, jnp.inexact):
        return dout
    return jnp.where(jax.lax.axis_index(axes) == 0, dout, jnp.zeros_like(dout))


def _at(places: tuple[int, ...], values: Sequence[Any], count: int) -> list[Any]:
    placed = dict(zip(places, values, strict=True))
    return [placed.get(i) for i in range(count)]


def _axes_of_type(mesh: Any, kind: AxisType) -> tuple[str, ...]:
    return tuple(
        name for name, type_ in zip(mesh.axis_names, mesh.axis_types, strict=True) if type_ is kind
    )


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("ejkernel: %s", message)
