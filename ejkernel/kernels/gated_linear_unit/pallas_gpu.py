"""The gated linear unit for GPU, through Pallas' Triton backend: both products in one kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..tile import Tile
from ..triton_blocks import joint, load, part, store
from .activations import ACTIVATIONS
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

    The tile's sizes are powers of two.
    """
    (rows, depth), columns = x.shape, width_of(weights)
    gate_function = _gelu if activation == "gelu" else ACTIVATIONS[activation]
    given = [bias for bias in biases if bias is not None]
    has_gate_bias, has_up_bias = (bias is not None for bias in biases)
    offset = columns if len(weights) == 1 else 0  # where the columns of the other weight begin

    def body(*refs: Any) -> None:
        x_ref, gate_ref, up_ref, *rest = refs
        bias_refs, out_refs = rest[: len(given)], rest[len(given) :]
        row, my_rows = part(pl.program_id(0) * tile.rows, tile.rows, rows)
        first_column = pl.program_id(1) * tile.columns
        column, my_columns = part(first_column, tile.columns, columns)

        def add(block: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            inner, there = part(block * tile.depth, tile.depth, depth)
            left = load(x_ref.at[row, inner], joint(my_rows, there))
            mask = joint(there, my_columns)
            other = pl.ds(first_column + offset, tile.columns)
            return (
                sums[0]
                + plgpu.dot(left, load(gate_ref.at[inner, column], mask), precision=precision),
                sums[1] + plgpu.dot(left, load(up_ref.at[inner, other], mask), precision=precision),
            )

        zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
        gate, up = lax.fori_loop(0, pl.cdiv(depth, tile.depth), add, (zero, zero))
        added = [load(ref.at[column], my_columns).astype(jnp.float32)[None] for ref in bias_refs]
        if has_gate_bias:
            gate += added.pop(0)
        if has_up_bias:
            up += added.pop(0)
        results = (gate_function(gate) * up, gate, up)
        for out_ref, result in zip(out_refs, results, strict=False):
            store(out_ref.at[row, column], result, joint(my_rows, my_columns))

    out_shape = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    call = pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, tile.rows), pl.cdiv(columns, tile.columns)),
        out_shape=[out_shape] * (3 if save else 1),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="gated_linear_unit",
    )
    results: tuple[jax.Array, ...] = tuple(call(x, weights[0], weights[-1], *given))
    return results


def _gelu(x: jax.Array) -> jax.Array:
    """GELU with an error function made of what Pallas lowers to Triton.

    Abramowitz and Stegun, 7.1.26: its largest error, 1.5e-7, is about that of a float32.
    """
    z = jnp.abs(x) * 0.5**0.5
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = 0.254829592 + t * (
        -0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))
    )
    erf: jax.Array = jnp.where(x < 0, -1.0, 1.0) * (1.0 - t * series * jnp.exp(-z * z))
    return 0.5 * x * (1.0 + erf)
