"""The gated linear unit for GPU, through Pallas' Triton backend: both products in one kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Implementation, Invocation, Limits, Supports

from ..limits import COUNT, TRITON_SIDE, launch
from .activations import ACTIVATIONS
from .arguments import Arguments, width_of
from .passes import passes_of, row_count


@dataclasses.dataclass(frozen=True)
class GatedLinearUnitGpuConfig:
    """Blocks of the products `(m, k) @ (k, n)`, powers of two, and how the kernel is launched.

    `backward_block_m` are the rows at a time of a gradient that computes the projections again.
    """

    block_m: int = 128
    block_n: int = 64
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 3
    backward_block_m: int = 1024


def project(
    call: Arguments, cfg: GatedLinearUnitGpuConfig, save: bool, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """The output `(m, n)`; with `save` also the two projections, in the dtype of `x`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    from ..triton_blocks import joint, load, part, store

    (rows, depth), columns = call.x.shape, width_of(call.weights)
    gate_function = _gelu if call.activation == "gelu" else ACTIVATIONS[call.activation]
    given = [bias for bias in call.biases if bias is not None]
    offset = columns if len(call.weights) == 1 else 0  # where the other weight's columns begin

    def body(*refs: Any) -> None:
        x_ref, gate_ref, up_ref, *rest = refs
        bias_refs = [None if bias is None else rest.pop(0) for bias in call.biases]
        row, my_rows = part(pl.program_id(0) * cfg.block_m, cfg.block_m, rows)
        first_column = pl.program_id(1) * cfg.block_n
        column, my_columns = part(first_column, cfg.block_n, columns)
        other = pl.ds(first_column + offset, cfg.block_n)

        def add(block: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            inner, there = part(block * cfg.block_k, cfg.block_k, depth)
            left = load(x_ref.at[row, inner], joint(my_rows, there))
            mask = joint(there, my_columns)
            rights = load(gate_ref.at[inner, column], mask), load(up_ref.at[inner, other], mask)
            more = [plgpu.dot(left, right, precision=call.precision) for right in rights]
            return sums[0] + more[0], sums[1] + more[1]

        zero = jnp.zeros((cfg.block_m, cfg.block_n), jnp.float32)
        sums = lax.fori_loop(0, pl.cdiv(depth, cfg.block_k), add, (zero, zero))
        gate, up = (
            total
            if ref is None
            else total + load(ref.at[column], my_columns).astype(jnp.float32)[None]
            for total, ref in zip(sums, bias_refs, strict=True)
        )
        for out_ref, result in zip(rest, (gate_function(gate) * up, gate, up), strict=False):
            store(out_ref.at[row, column], result, joint(my_rows, my_columns))

    results = pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, cfg.block_m), pl.cdiv(columns, cfg.block_n)),
        out_shape=[jax.ShapeDtypeStruct((rows, columns), call.x.dtype)] * (3 if save else 1),
        compiler_params=plgpu.CompilerParams(num_warps=cfg.num_warps, num_stages=cfg.num_stages),
        interpret=interpret,
        name="gated_linear_unit",
    )(call.x, call.weights[0], call.weights[-1], *given)
    return tuple(results)


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


def _heuristic(inv: Invocation[Any, Any]) -> GatedLinearUnitGpuConfig:
    """Not measured: two sums of 64 columns take the registers of one of 128."""
    rows = min(128, max(16, 1 << (row_count(inv) - 1).bit_length()))
    block_k = 32 if inv.args[0].dtype.itemsize > 2 else 64
    return GatedLinearUnitGpuConfig(rows, 64, block_k, num_warps=8 if rows == 128 else 4)


def _space(inv: Invocation[Any, Any]) -> list[GatedLinearUnitGpuConfig]:
    sizes = ((16, 64), (32, 64), (64, 64), (128, 64))
    choices = [(*size, 4) for size in sizes] + [(128, 64, 8), (64, 128, 8), (128, 128, 8)]
    return [
        GatedLinearUnitGpuConfig(block_m, block_n, block_k, num_warps)
        for block_m, block_n, num_warps in choices
        for block_k in (32, 64)
    ]


PALLAS_GPU: Implementation[GatedLinearUnitGpuConfig, jax.Array] = Implementation(
    name="triton",
    devices=("gpu",),
    config=GatedLinearUnitGpuConfig,
    heuristic=_heuristic,
    space=_space,
    supports=Supports(dtypes=("float32", "bfloat16", "float16")),
    limits=Limits(
        {"block_m": TRITON_SIDE, "block_n": TRITON_SIDE, "block_k": TRITON_SIDE}
        | launch("")
        | {"backward_block_m": COUNT}
    ),
    **passes_of(project),
)
