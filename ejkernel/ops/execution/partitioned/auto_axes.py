"""Passes on auto mesh axes: the compiler decides on shardings, and asks for a device's program."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import NamedSharding

from ...config import context
from ...core.partitioning import Dim
from ...utils.meta import collecting_labels, marking_partitioned
from .passes import Function, Pass, mappable

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class AutoAxes:
    """Places passes as `custom_partitioning`: what runs is traced when the compiler asks for it.

    What a pass gives must be known before the compiler has decided, and so has to be made of the
    whole arrays: residuals of a device are not.
    """

    saves_residuals: bool = False

    def place(self, work: Pass) -> Function:
        """The pass as a function of arrays."""
        # Not with `ejkernel.ops` itself, which imports no more of JAX than `import jax` does.
        from jax.experimental.custom_partitioning import custom_partitioning

        # Unique in the program: the labels of what the compiler makes of it are found by it.
        name = f"{work.call.label} {next(_numbers)}"
        carried = context.carried()  # the compiler asks from a thread of its own

        def whole(*arrays: Any) -> list[Any]:
            return list(work.compute(None, arrays))

        def run(*arrays: Any) -> list[Any]:
            partitioned = custom_partitioning(whole)
            rule, factors = _shardy_rule(work)
            partitioned.def_partition(
                functools.partial(_partition, work, name, carried), sharding_rule=rule, **factors
            )
            with marking_partitioned(name):
                return list(partitioned(*arrays))

        def run_mapped(size: int, batched: list[bool], arrays: Sequence[Any]) -> list[Any]:
            return self.place(work.mapped(size, batched))(*arrays)

        return mappable(run, run_mapped, whole)


def _partition(
    work: Pass, name: str, carried: Callable[[], Any], mesh: Any, arrays: Any, results: Any
) -> Any:
    """What the compiler asks for: shardings, and the function of the local arrays."""
    del results  # they follow from the arguments
    shards = work.call.shards(work.layout, [a.sharding.spec for a in arrays], mesh.shape)

    def on_device(*arrays: Any) -> list[Any]:
        with carried(), collecting_labels(name):
            return work.on_device(shards, arrays)

    def shardings(dims: Sequence[tuple[Dim, ...]]) -> list[NamedSharding]:
        return [NamedSharding(mesh, shards.spec(array)) for array in dims]

    return mesh, on_device, shardings(work.outs), tuple(shardings(work.ins))


def _shardy_rule(work: Pass) -> tuple[str, dict[str, Any]]:
    """The rule in the words of the compiler's partitioner: each dimension has a name there."""
    names: dict[str, str] = {}
    replicated: list[str] = []  # in the order in which they appear: the compiler insists on it
    by_itself: set[str] = set()
    inside: set[str] = set()  # a compound dimension: the size does not follow from the array's
    alone = itertools.count()

    def factor(name: str) -> str:
        if name not in names:
            names[name] = f"d{len(names)}"
            if not work.call.layout.rule.may_shard(name):
                replicated.append(names[name])
        return names[name]

    def written(dim: Dim) -> str:
        sized = [name for name in dim if work.sizes[name] != 1 or len(dim) == 1]
        if len(sized) > 1:
            inside.update(sized)
            return f"({' '.join(map(factor, sized))})"
        if sized:
            by_itself.add(sized[0])
            return factor(sized[0])
        replicated.append(f"a{next(alone)}")  # a dimension without a name: it is broadcast
        return replicated[-1]

    sides = [
        ", ".join(" ".join(map(written, dims)) for dims in side) for side in (work.ins, work.outs)
    ]
    sizes = {names[name]: work.sizes[name] for name in sorted(inside - by_itself)}
    return " -> ".join(sides), {"need_replication_factors": tuple(replicated), **sizes}
