"""The gated linear unit for TPU: both products and the gate in one kernel.

A grid step adds one block of the shared axis to two sums in scratch memory; the last one applies
the gate, so the projections are never written to memory unless the gradient wants them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation, Supports

from ..dot import dot
from ..limits import COUNT, TpuBlocks
from ..tpu_blocks import clear, keep_inside
from .arguments import Arguments, sizes
from .xla import implementation


@dataclasses.dataclass(frozen=True)
class GatedLinearUnitTpuConfig(TpuBlocks):
    """Blocks of the products `(m, k) @ (k, n)`, and the rows at a time of a recomputing gradient.

    Blocks are multiples of 128, and cut to whole axes where these are smaller.
    """

    backward_block_m: Annotated[int, COUNT] = 1024

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        """Not measured: two weight blocks, three results and two sums within 16 MiB."""
        most = 256 if inv.args[0].dtype.itemsize > 2 else 512
        return cls(min(most, -(-sizes(*inv.args)[0] // 128) * 128), _block_n(inv, 512), 512)

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        widths = sorted({_block_n(inv, largest) for largest in (256, 512, 1024)})
        blocks = itertools.product((128, 256, 512), widths, (256, 512, 1024))
        return list(itertools.starmap(cls, blocks))

    def unfit(self, inv: Invocation[Any, Any]) -> str | None:
        """With both weights in one array, no block may reach from one into the other."""
        half = _half(inv)
        if half % min(self.block_n, half or 1) == 0:
            return None
        return f"block_n={self.block_n} must divide the {half} columns of each weight in w_gate"


def _half(inv: Invocation[Any, Any]) -> int:
    """Columns of each weight, where one array holds both; else 0, which any block divides."""
    return 0 if len(inv.args) == 3 else sizes(*inv.args)[1]


def _block_n(inv: Invocation[Any, Any], largest: int) -> int:
    return next((size for size in (largest, 512, 256) if _half(inv) % size == 0), 128)


def project(
    call: Arguments, cfg: GatedLinearUnitTpuConfig, save: bool, interpret: bool = False
) -> tuple[jax.Array, Any]:
    """The output; with `save`, unless they are to be computed again, also the two projections."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, columns, depth = sizes(call.x, *call.weights)
    block_m, block_n, block_k = cfg.within(rows, columns, depth)
    column_blocks, depth_blocks = pl.cdiv(columns, block_n), pl.cdiv(depth, block_k)
    given = [bias.reshape(1, columns) for bias in call.biases.values()]

    def body(x_ref: Any, gate_ref: Any, up_ref: Any, *refs: Any) -> None:
        block, sums = pl.program_id(2), refs[-2:]
        clear(block == 0, *sums)
        left = keep_inside(x_ref[...], 1, block, depth)
        for weight_ref, sum_ref in zip((gate_ref, up_ref), sums, strict=True):
            right = keep_inside(weight_ref[...], 0, block, depth)
            sum_ref[...] += dot(left, right, (1, 0), precision=call.precision)

        @pl.when(block == depth_blocks - 1)
        def _() -> None:
            biases = (ref[...] for ref in refs[: len(given)])
            gate, up = call.biased((total[...] for total in sums), biases)
            results = (call.gated(gate, up), gate, up)
            for out_ref, result in zip(refs[len(given) : -2], results, strict=False):
                out_ref[...] = result.astype(out_ref.dtype)

    skipped = column_blocks if len(call.weights) == 1 else 0
    weight_block, out_block = (block_k, block_n), (block_m, block_n)
    outputs = 3 if save and not call.recompute else 1
    results = pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, block_m), column_blocks, depth_blocks),
        in_specs=[
            pl.BlockSpec((block_m, block_k), lambda i, j, k: (i, k)),
            pl.BlockSpec(weight_block, lambda i, j, k: (k, j)),
            pl.BlockSpec(weight_block, lambda i, j, k: (k, j + skipped)),
            *(pl.BlockSpec((1, block_n), lambda i, j, k: (0, j)) for _ in given),
        ],
        out_specs=[pl.BlockSpec(out_block, lambda i, j, k: (i, j))] * outputs,
        out_shape=[jax.ShapeDtypeStruct((rows, columns), call.x.dtype)] * outputs,
        scratch_shapes=[pltpu.VMEM(out_block, jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="gated_linear_unit",
    )(call.x, call.weights[0], call.weights[-1], *given)
    return call.results(*results)


def _halves_are_whole_blocks(inv: Invocation[Any, Any]) -> str | None:
    """With both weights in one array: columns of each that are a multiple of 128."""
    if _half(inv) % 128 == 0:
        return None
    shape = inv.args[1].shape
    return f"w_gate {shape} holds both weights, and half of its columns are no multiple of 128"


PALLAS_TPU = implementation(
    project,
    name="pallas",
    devices=("tpu",),
    config=GatedLinearUnitTpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16"), rules=(_halves_are_whole_blocks,)),
)
