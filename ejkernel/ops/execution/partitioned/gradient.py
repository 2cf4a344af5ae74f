"""The gradient rule of partitioned calls: a gradient is a second partitioned call.

What the forward pass leaves for the backward one is `Recomputed`, or what each device has `Saved`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core.derivatives import reverse_mode_only, way_out
from ...core.gradients import Residuals, materialised
from ...core.partitioning import Shards
from .passes import DEVICE, PartitionedCall, Pass, Placement

Local = Callable[[Shards | None, Sequence[Any]], list[Any]]
"""The outputs of a call from a device's arrays (or the whole ones), as a list."""


class Recomputed:
    """Nothing: the backward pass is given the arguments, and computes the forward pass again."""

    def __init__(self, local: Local, wanted: tuple[int, ...], count: int) -> None:
        self._local = local
        self._wanted = wanted
        self.arguments = tuple(range(count))

    def forward(self, shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
        """The outputs, computed as `pullback` does it: a compiler then can merge the two."""
        return _vjp(self._local, shards, arrays, self._wanted)[0]

    def pullback(self, shards: Shards | None, arrays: Sequence[Any]) -> Callable[[Any], Any]:
        """The function from gradients of outputs to those of the wanted arguments."""
        return _vjp(self._local, shards, arrays, self._wanted)[1]


class Saved:
    """The residuals of each device, whatever their shapes, and those arguments that are needed."""

    def __init__(self, local: Local, wanted: tuple[int, ...]) -> None:
        self._local = local
        self._wanted = wanted
        self._structure: Any = None
        self._argument_at: dict[int, int] = {}  # of the residuals that are arguments

    @property
    def arguments(self) -> tuple[int, ...]:
        """Which arguments the backward pass needs."""
        return tuple(sorted(set(self._argument_at.values())))

    def forward(self, shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
        """The outputs, and what a device saves."""
        leaves, pull = _vjp(self._local, shards, arrays, self._wanted)
        residuals, structure = jax.tree.flatten(pull)
        if self._structure is None:  # JAX may trace more than once, with the same result
            place = {id(array): i for i, array in enumerate(arrays)}
            found = enumerate(map(id, residuals))
            self._argument_at = {i: place[which] for i, which in found if which in place}
            self._structure = structure
        own = [r[None] for i, r in enumerate(residuals) if i not in self._argument_at]
        return [*leaves, *own]

    def pullback(self, shards: Shards | None, saved: Sequence[Any]) -> Callable[[Any], Any]:
        """The function from gradients of outputs to those of the wanted arguments."""
        arguments = dict(zip(self.arguments, saved, strict=False))
        own = iter(saved[len(arguments) :])
        residuals = [
            arguments[self._argument_at[i]] if i in self._argument_at else next(own)[0]
            for i in range(self._structure.num_leaves)
        ]
        pull: Callable[[Any], Any] = jax.tree.unflatten(self._structure, residuals)
        return pull


def _vjp(
    local: Local, shards: Shards | None, arrays: Sequence[Any], wanted: tuple[int, ...]
) -> tuple[list[Any], Callable[[Any], Any]]:
    """The outputs and the pullback, with respect to the wanted arrays."""

    def of_wanted(*some: Any) -> list[Any]:
        full = list(arrays)
        for i, value in zip(wanted, some, strict=True):
            full[i] = value
        return local(shards, full)

    return jax.vjp(of_wanted, *(arrays[i] for i in wanted))


def run_with_gradient(call: PartitionedCall, placement: Placement, arrays: Sequence[Any]) -> Any:
    """The output of a call that runs on every device, and so does its gradient."""
    layout = call.layout
    count = len(layout.outputs)
    structures: list[Any] = []
    packed = Residuals(min_capacity=len(arrays))

    def local(shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
        leaves, structure = call.local(shards, arrays)
        structures.append(structure)
        return leaves

    def forward_pass(compute: Any) -> Any:
        names, ins, outs = layout.names, layout.arguments, layout.outputs
        return placement.place(Pass(call, compute, names, ins, outs, layout.sizes))

    @jax.custom_vjp
    def differentiable(arrays: list[Any]) -> Any:
        return forward_pass(local)(*arrays)

    def forward(arrays: list[Any]) -> Any:
        values = [array.value for array in arrays]
        wanted = tuple(i for i, array in enumerate(arrays) if _is_differentiated(array))
        residuals: Saved | Recomputed = (
            Saved(local, wanted)
            if placement.saves_residuals
            else Recomputed(local, wanted, len(values))
        )
        leaves = forward_pass(residuals.forward)(*values)
        out, own = leaves[:count], leaves[count:]
        if not packed.reserve(len(residuals.arguments) + len(own)):
            residuals, own = Recomputed(local, wanted, len(values)), []
        needed = [values[i] for i in residuals.arguments]
        return out, packed.pack([*needed, *own], (residuals, wanted))

    def backward(saved: Any, dout: Any) -> tuple[list[Any]]:
        leaves, (residuals, wanted) = packed.unpack(saved)
        own = leaves[len(residuals.arguments) :]

        def pull_back(shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
            pull = residuals.pullback(shards, arrays[:-count])
            douts = list(arrays[-count:])
            return list(pull(douts if shards is None else call.counted_once(shards, douts)))

        arguments = residuals.arguments
        backward_pass = Pass(
            call,
            pull_back,
            (
                *(layout.names[i] for i in arguments),
                *("a residual" for _ in own),
                *(f"the gradient of output {i}" for i in range(count)),
            ),
            (
                *(layout.arguments[i] for i in arguments),
                *(((DEVICE,), *((),) * (leaf.ndim - 1)) for leaf in own),
                *layout.outputs,
            ),
            [layout.arguments[i] for i in wanted],
            layout.sizes,
            backward=True,
        )
        found = placement.place(backward_pass)(*leaves, *materialised(dout))
        placed = dict(zip(wanted, found, strict=True))
        return ([placed.get(i) for i in range(len(layout.arguments))],)

    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    name, advice = f"{call.op_id} on a mesh", way_out(call.kernel)
    leaves = differentiable(reverse_mode_only(name, advice, list(arrays)))
    return jax.tree.unflatten(structures[-1], leaves)


def _is_differentiated(array: Any) -> bool:
    return bool(array.perturbed and jnp.issubdtype(array.value.dtype, jnp.inexact))
