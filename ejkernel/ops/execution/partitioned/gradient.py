"""The gradient rule of partitioned calls: a gradient is a second partitioned call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core.derivatives import reverse_mode_only, way_out
from ...core.gradients import Residuals, materialised
from ...core.partitioning import Shards
from .call import PartitionedCall
from .passes import DEVICE, Pass, Placement
from .residuals import Kept, Recomputed


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
        residuals: Kept | Recomputed = (
            Kept(local, wanted)
            if placement.keeps_residuals
            else Recomputed(local, wanted, len(values))
        )
        leaves = forward_pass(residuals.forward)(*values)
        out, kept = leaves[:count], leaves[count:]
        if not packed.reserve(len(residuals.arguments) + len(kept)):
            residuals, kept = Recomputed(local, wanted, len(values)), []
        needed = [values[i] for i in residuals.arguments]
        return out, packed.pack([*needed, *kept], (residuals, wanted))

    def backward(saved: Any, dout: Any) -> tuple[list[Any]]:
        leaves, (residuals, wanted) = packed.unpack(saved)
        kept = leaves[len(residuals.arguments) :]

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
                *("a residual" for _ in kept),
                *(f"the gradient of output {i}" for i in range(count)),
            ),
            (
                *(layout.arguments[i] for i in arguments),
                *(((DEVICE,), *((),) * (leaf.ndim - 1)) for leaf in kept),
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
