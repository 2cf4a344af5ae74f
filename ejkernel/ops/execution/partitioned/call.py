"""One call to partition: what a device runs of it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core.invocation import Invocation, StaticPart
from ...core.kernel import Kernel
from ...core.partitioning import Layout, Shards
from ...utils.meta import label

logger = logging.getLogger(__name__)

_warned: set[str] = set()

Run = Callable[[Invocation[Any, Any], Kernel[Any, Any]], Any]


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
        if shards is None:
            inv = dataclasses.replace(self.inv, args=args, kwargs=kwargs)
            return jax.tree.flatten(self.run_whole(inv, self.kernel))
        args, kwargs = shards.localized(args, kwargs)
        inv = dataclasses.replace(self.inv, args=args, kwargs=kwargs)
        return jax.tree.flatten(self.run(inv, self.kernel))

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
