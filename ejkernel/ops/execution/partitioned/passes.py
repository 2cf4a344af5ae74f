"""A pass of a partitioned call, forward or backward, and what `jax.vmap` makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from ...core.partitioning import MAPPED, Dim, Layout, Shards
from ...core.running import jvp_of_changing
from .call import PartitionedCall

DEVICE = "device:"
"""Names the dimension along which the arrays are stacked that each device keeps for itself."""

Function = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class Pass:
    """A function of arrays whose dimensions have names, to be run on every device.

    `compute(shards, arrays)` gives a device's part of the outputs, or with `shards=None` the whole.
    What it gives beyond those in `outs` the device keeps for itself: the first dimension is
    `DEVICE`, of which each device has 1, and any may follow. `sizes` are those of the whole.
    """

    call: PartitionedCall
    compute: Callable[[Shards | None, Sequence[Any]], list[Any]]
    names: Sequence[str]
    ins: Sequence[tuple[Dim, ...]]
    outs: Sequence[tuple[Dim, ...]]
    sizes: Mapping[str, int]
    backward: bool = False
    maps: int = 0  # how many times it was mapped over a batch

    @property
    def layout(self) -> Layout:
        """The dimensions of its arguments and outputs."""
        return dataclasses.replace(
            self.call.layout,
            names=tuple(self.names),
            arguments=tuple(self.ins),
            outputs=tuple(self.outs),
            sizes=self.sizes,
        )

    def on_device(self, shards: Shards, arrays: Sequence[Any]) -> list[Any]:
        """A device's part of the outputs.

        The forward pass adds up what the devices have of a summed dimension. In the backward pass
        devices that hold an argument whole each have the gradient of their own work: added.
        """
        leaves = self.compute(shards, arrays)
        over = shards.axes_outside if self.backward else shards.summed_into
        added = [
            jax.lax.psum(leaf, axes) if axes else leaf
            for leaf, axes in zip(leaves, map(over, self.outs), strict=False)
        ]
        return [*added, *leaves[len(added) :]]

    def mapped(self, size: int, batched: Sequence[bool]) -> Pass:
        """The same for every example of a batch; the batch is one more dimension."""
        name = mapped_name(self.maps)
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


class Placement(Protocol):
    """A way of running a pass on all devices of a mesh."""

    @property
    def keeps_residuals(self) -> bool:
        """Whether the forward pass may give more than its outputs."""
        ...

    def place(self, work: Pass) -> Function:
        """The pass as a function of arrays."""
        ...


def mapped_name(number: int) -> str:
    """The name of the dimension that the `vmap` with this number adds, the innermost being 0."""
    return f"{MAPPED}{number}"


def mappable(
    run: Function,
    run_mapped: Callable[[int, list[bool], Sequence[Any]], list[Any]],
    when_differentiated: Function,
) -> Function:
    """`run`, which under `jax.vmap` is `run_mapped(size, batched, arrays)` for the whole batch.

    That one sees the mapped dimension and its sharding, both of which `vmap` hides from `run`. A
    gradient rule made of such functions is differentiated once: to do it again, JAX differentiates
    `when_differentiated`, which has the same result.
    """

    @jax.custom_batching.custom_vmap
    def batchable(*arrays: Any) -> list[Any]:
        return run(*arrays)

    @batchable.def_vmap
    def _(size: int, batched: list[bool], *arrays: Any) -> Any:
        outs = run_mapped(size, batched, arrays)
        return outs, [True] * len(outs)

    @jax.custom_jvp
    def differentiable(*arrays: Any) -> list[Any]:
        return batchable(*arrays)  # type: ignore[no-any-return]

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        return jvp_of_changing(when_differentiated, primals, tangents)

    differentiable.defjvp(rule, symbolic_zeros=True)
    return differentiable
