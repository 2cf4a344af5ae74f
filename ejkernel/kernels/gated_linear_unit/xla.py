"""The gated linear unit in plain JAX, some rows at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ejkernel.ops import Implementation, Invocation, Limits

from ..limits import COUNT
from ..row_blocks import in_row_blocks
from .activations import gated
from .arguments import Arguments, width_of
from .passes import passes_of, projections, row_count


@dataclasses.dataclass(frozen=True)
class GatedLinearUnitXlaConfig:
    """How many rows are computed at a time.

    Args:
      block_m: in the forward pass.
      backward_block_m: in a gradient that computes the projections again.
    """

    block_m: int = 1024
    backward_block_m: int = 1024


def project(call: Arguments, cfg: GatedLinearUnitXlaConfig, save: bool) -> tuple[jax.Array, ...]:
    """The output `(m, n)`; with `save` also the two projections, of all rows at once."""

    def block(x: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        gate, up = projections(dataclasses.replace(call, x=x))
        results = (gated(call.activation, gate, up), *((gate, up) if save else ()))
        return tuple(result.astype(x.dtype) for result in results), None

    rows = call.x.shape[0] if save else cfg.block_m
    results, _ = in_row_blocks(block, (call.x,), rows, like=(call.weights, call.biases))
    return tuple(results)


# Outputs that are computed at once, by the number of arrays that hold the weights.
_AT_ONCE = {1: 2**21, 2: 2**23 - 1}


def _heuristic(inv: Invocation[Any, Any]) -> GatedLinearUnitXlaConfig:
    """All rows at once, unless what XLA writes and reads again is too large (two Zen 3 cores).

    512 rows at a time took 0.78 to 0.99 of the time from 8 million outputs on, and 1.06 with 4 to 6
    million; with both weights in one array 0.74 to 0.96 from 4 million on.
    """
    rows, weights = row_count(inv), inv.args[1:]
    at_once = rows * width_of(weights) <= _AT_ONCE[len(weights)]
    return GatedLinearUnitXlaConfig(rows if at_once else 512)


def _space(inv: Invocation[Any, Any]) -> list[GatedLinearUnitXlaConfig]:
    rows, base = row_count(inv), _heuristic(inv)
    sizes = sorted({min(rows, size) for size in (128, 256, 512, 1024, rows)})
    ahead = [dataclasses.replace(base, block_m=size) for size in sizes]
    if not inv.kwargs.get("recompute"):
        return ahead
    return ahead + [dataclasses.replace(base, backward_block_m=size) for size in sizes]


XLA: Implementation[GatedLinearUnitXlaConfig, jax.Array] = Implementation(
    name="xla",
    config=GatedLinearUnitXlaConfig,
    heuristic=_heuristic,
    space=_space,
    limits=Limits({"block_m": COUNT, "backward_block_m": COUNT}),
    **passes_of(project),
)
