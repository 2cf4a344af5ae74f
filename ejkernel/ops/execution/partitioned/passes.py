"""A partitioned call, its passes, forward and backward, and what `jax.vmap` makes of a pass."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ...core.invocation import Invocation, StaticPart
from ...core.kernel import Kernel
from ...core.partitioning import MAPPED, Dim, Layout, Shards
from ...core.running import jvp_of_changing
from ...utils.meta import label

logger = logging.getLogger(__name__)

_warned: set[str] = set()

DEVICE = "device:"
"""Names the dimension along which the arrays are stacked that each device holds for itself."""

Run = Callable[[Invocation[Any, Any], Kernel[Any, Any]], Any]
Function = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class PartitionedCall:
    """A call, and how its arrays are laid out.

    `run` selects and runs on a device; `run_whole` has the same result from the whole arrays, for
    the compiler to know shapes by: it selects nothing.
    """

    inv: Invocation[Any, Any]
    kernel: Kernel[Any, Any]
    layout: Layout
    rest: StaticPart
    run: Run
    run_whole: Run

    @property
    def op_id(self) -> str:
        """The operation with its version."""
        return self.kernel.full_op_id

    @property
    def label(self) -> str:
        """The label of the call with its whole arrays."""
        return label(self.inv.full_op_id, self.inv.key.call_key)

    def local(self, shards: Shards | None, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
        """The leaves of the output of the call with these arrays, and their structure.

        `shards=None` means that the arrays are whole.
        """
        args, kwargs = self.rest.merge(arrays)
        if shards is not None:
            args, kwargs = shards.localized(args, kwargs)
        inv = dataclasses.replace(self.inv, args=args, kwargs=kwargs)
        run = self.run_whole if shards is None else self.run
        return jax.tree.flatten(run(inv, self.kernel))

    def shards(self, layout: Layout, specs: Sequence[Any], mesh_sizes: Any) -> Shards:
        """The mesh axes of the dimensions of the call, or of one pass of it; warns of gathering."""
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
        own = shards.rule.across if self.kernel.has_gradient_rule() else ()
        return [
            _of_first(dout, shards.repeating(dims, apart_from=own))
            for dout, dims in zip(douts, self.layout.outputs, strict=True)
        ]


def _of_first(dout: Any, axes: tuple[str, ...]) -> Any:
    """A gradient on the first device along these mesh axes, zeros on the others."""
    if not axes or not jnp.issubdtype(dout.dtype, jnp.inexact):
        return dout
    return jnp.where(jax.lax.axis_index(axes) == 0, dout, jnp.zeros_like(dout))


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("ejkernel: %s", message)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A function of arrays whose dimensions have names, to be run on every device.

    `compute(shards, arrays)` gives a device's part of the outputs, or with `shards=None` the whole.
    What it gives beyond those in `outs` the device holds for itself: the first dimension is
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
    def saves_residuals(self) -> bool:
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
