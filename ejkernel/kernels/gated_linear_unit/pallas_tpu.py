"""The gated linear unit for TPU: both products and the gate in one kernel.

A grid step adds one block of the shared axis to two sums in scratch memory; the last one applies
the gate, so the projections are never written to memory unless the gradient wants them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Implementation, Invocation, Limits, Supports

from ..limits import COUNT, LANES
from .activations import gated
from .arguments import Arguments, width_of
from .passes import passes_of, row_count


@dataclasses.dataclass(frozen=True)
class GatedLinearUnitTpuConfig:
    """Blocks of the products `(m, k) @ (k, n)`, and the rows at a time of a recomputing gradient.

    Blocks are multiples of 128, and cut to whole axes where these are smaller.
    """

    block_m: int = 512
    block_n: int = 512
    block_k: int = 512
    backward_block_m: int = 1024


def project(
    call: Arguments, cfg: GatedLinearUnitTpuConfig, save: bool, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """The output `(m, n)`; with `save` also the two projections, in the dtype of `x`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (rows, depth), columns = call.x.shape, width_of(call.weights)
    block_m, block_n = min(cfg.block_m, rows), min(cfg.block_n, columns)
    block_k = min(cfg.block_k, depth)
    column_blocks, depth_blocks = pl.cdiv(columns, block_n), pl.cdiv(depth, block_k)
    given = [bias.reshape(1, columns) for bias in call.biases if bias is not None]

    def body(*refs: Any) -> None:
        x_ref, gate_ref, up_ref, *rest = refs
        bias_refs = [None if bias is None else rest.pop(0) for bias in call.biases]
        *out_refs, gate_sum, up_sum = rest
        block = pl.program_id(2)

        @pl.when(block == 0)
        def _() -> None:
            gate_sum[...] = jnp.zeros_like(gate_sum)
            up_sum[...] = jnp.zeros_like(up_sum)

        def real(part: jax.Array, axis: int) -> jax.Array:
            if depth % block_k == 0:
                return part
            # What a block holds beyond its array is undefined.
            inside = lax.broadcasted_iota(jnp.int32, part.shape, axis) < depth - block * block_k
            return jnp.where(inside, part.astype(jnp.float32), 0.0).astype(part.dtype)

        left = real(x_ref[...], 1)
        for weight_ref, sum_ref in ((gate_ref, gate_sum), (up_ref, up_sum)):
            right = real(weight_ref[...], 0)
            sum_ref[...] += jnp.dot(
                left, right, precision=call.precision, preferred_element_type=jnp.float32
            )

        @pl.when(block == depth_blocks - 1)
        def _() -> None:
            gate, up = (
                total[...] if ref is None else total[...] + ref[...].astype(jnp.float32)
                for total, ref in zip((gate_sum, up_sum), bias_refs, strict=True)
            )
            results = (gated(call.activation, gate, up), gate, up)
            for out_ref, result in zip(out_refs, results, strict=False):
                out_ref[...] = result.astype(out_ref.dtype)

    skipped = column_blocks if len(call.weights) == 1 else 0
    weight_block, out_block = (block_k, block_n), (block_m, block_n)
    results = pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, block_m), column_blocks, depth_blocks),
        in_specs=[
            pl.BlockSpec((block_m, block_k), lambda i, j, k: (i, k)),
            pl.BlockSpec(weight_block, lambda i, j, k: (k, j)),
            pl.BlockSpec(weight_block, lambda i, j, k: (k, j + skipped)),
            *(pl.BlockSpec((1, block_n), lambda i, j, k: (0, j)) for _ in given),
        ],
        out_specs=[pl.BlockSpec(out_block, lambda i, j, k: (i, j))] * (3 if save else 1),
        out_shape=[jax.ShapeDtypeStruct((rows, columns), call.x.dtype)] * (3 if save else 1),
        scratch_shapes=[pltpu.VMEM(out_block, jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="gated_linear_unit",
    )(call.x, call.weights[0], call.weights[-1], *given)
    return tuple(results)


def _halves_are_whole_blocks(inv: Invocation[Any, Any]) -> str | None:
    """With both weights in one array: columns of each that are a multiple of 128."""
    if len(inv.args) == 3 or width_of(inv.args[1:]) % 128 == 0:
        return None
    shape = inv.args[1].shape
    return f"w_gate {shape} holds both weights, and half of its columns are no multiple of 128"


def _block_divides_the_halves(
    cfg: GatedLinearUnitTpuConfig, inv: Invocation[Any, Any]
) -> str | None:
    columns = width_of(inv.args[1:])
    if len(inv.args) == 3 or columns % min(cfg.block_n, columns) == 0:
        return None
    return f"block_n={cfg.block_n} must divide the {columns} columns of each weight in w_gate"


def _block_n(inv: Invocation[Any, Any], largest: int) -> int:
    """Columns of a block; where one array holds both weights, such that they divide it."""
    columns = width_of(inv.args[1:])
    if len(inv.args) == 3:
        return largest
    return next((size for size in (largest, 512, 256) if columns % size == 0), 128)


def _heuristic(inv: Invocation[Any, Any]) -> GatedLinearUnitTpuConfig:
    """Not measured: two weight blocks, three results and two sums within 16 MiB."""
    wide = inv.args[0].dtype.itemsize > 2
    rows = min(256 if wide else 512, -(-row_count(inv) // 128) * 128)
    return GatedLinearUnitTpuConfig(rows, _block_n(inv, 512), 512)


def _space(inv: Invocation[Any, Any]) -> list[GatedLinearUnitTpuConfig]:
    return [
        GatedLinearUnitTpuConfig(block_m, block_n, block_k)
        for block_m in (128, 256, 512)
        for block_n in sorted({_block_n(inv, largest) for largest in (256, 512, 1024)})
        for block_k in (256, 512, 1024)
    ]


PALLAS_TPU: Implementation[GatedLinearUnitTpuConfig, jax.Array] = Implementation(
    name="pallas",
    devices=("tpu",),
    config=GatedLinearUnitTpuConfig,
    heuristic=_heuristic,
    space=_space,
    supports=Supports(dtypes=("float32", "bfloat16"), rules=(_halves_are_whole_blocks,)),
    limits=Limits(
        {"block_m": LANES, "block_n": LANES, "block_k": LANES, "backward_block_m": COUNT},
        rules=(_block_divides_the_halves,),
    ),
    **passes_of(project),
)
