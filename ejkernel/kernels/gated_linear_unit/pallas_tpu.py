"""The gated linear unit for TPU: both products and the gate in one kernel.

A grid step adds one block of the shared axis to two sums in scratch memory; the last one applies
the gate, so the projections are never written to memory unless the gradient wants them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tile import Tile
from .activations import gated
from .xla import Biases, Weights, width_of


def forward(
    x: jax.Array,
    weights: Weights,
    biases: Biases,
    *,
    activation: str,
    tile: Tile,
    save: bool = False,
    precision: lax.PrecisionLike = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """The output ``(m, n)``; with ``save`` also the two projections, in the dtype of ``x``.

    The tile's sizes are multiples of 128, or whole axes. Of one weight ``(k, 2 n)``, ``n`` must be
    a multiple of the tile's columns.
    """
    (rows, depth), columns = x.shape, width_of(weights)
    tile = tile.within(rows, columns, depth)
    column_blocks, depth_blocks = pl.cdiv(columns, tile.columns), pl.cdiv(depth, tile.depth)
    given = [bias.reshape(1, columns) for bias in biases if bias is not None]
    has_gate_bias, has_up_bias = (bias is not None for bias in biases)

    def body(*refs: Any) -> None:
        x_ref, gate_ref, up_ref, *rest = refs
        bias_refs = [rest.pop(0) for _ in given]
        *out_refs, gate_sum, up_sum = rest
        block = pl.program_id(2)

        @pl.when(block == 0)
        def _() -> None:
            gate_sum[...] = jnp.zeros_like(gate_sum)
            up_sum[...] = jnp.zeros_like(up_sum)

        def real(part: jax.Array, axis: int) -> jax.Array:
            if depth % tile.depth == 0:
                return part
            # What a block holds beyond its array is undefined.
            inside = lax.broadcasted_iota(jnp.int32, part.shape, axis) < depth - block * tile.depth
            return jnp.where(inside, part.astype(jnp.float32), 0.0).astype(part.dtype)

        left = real(x_ref[...], 1)
        for weight_ref, sum_ref in ((gate_ref, gate_sum), (up_ref, up_sum)):
            sum_ref[...] += jnp.dot(
                left,
                real(weight_ref[...], 0),
                precision=precision,
                preferred_element_type=jnp.float32,
            )

        @pl.when(block == depth_blocks - 1)
        def _() -> None:
            waiting = list(bias_refs)
            gate, up = gate_sum[...], up_sum[...]
            if has_gate_bias:
                gate += waiting.pop(0)[...].astype(jnp.float32)
            if has_up_bias:
                up += waiting.pop(0)[...].astype(jnp.float32)
            results = (gated(activation, gate, up), gate, up)
            for out_ref, result in zip(out_refs, results, strict=False):
                out_ref[...] = result.astype(out_ref.dtype)

    skipped = column_blocks if len(weights) == 1 else 0
    weight_block, out_block = (tile.depth, tile.columns), (tile.rows, tile.columns)
    out_spec = pl.BlockSpec(out_block, lambda i, j, k: (i, j))
    out_shape = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    call = pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, tile.rows), column_blocks, depth_blocks),
        in_specs=[
            pl.BlockSpec((tile.rows, tile.depth), lambda i, j, k: (i, k)),
            pl.BlockSpec(weight_block, lambda i, j, k: (k, j)),
            pl.BlockSpec(weight_block, lambda i, j, k: (k, j + skipped)),
            *(pl.BlockSpec((1, tile.columns), lambda i, j, k: (0, j)) for _ in given),
        ],
        out_specs=[out_spec] * (3 if save else 1),
        out_shape=[out_shape] * (3 if save else 1),
        scratch_shapes=[pltpu.VMEM(out_block, jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="gated_linear_unit",
    )
    results: tuple[jax.Array, ...] = tuple(call(x, weights[0], weights[-1], *given))
    return results
