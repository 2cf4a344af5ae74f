"""The gated linear unit for GPU, through Pallas' Triton backend: both products in one kernel."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Self

import jax

from ejkernel.ops import Invocation, Supports

from ..limits import COUNT, TRITON_SIDE, WARPS, TritonBlocks
from ..triton_blocks import compiler_params, erf, joint, load, part, products, store
from .arguments import Arguments, sizes
from .reference import ACTIVATIONS
from .xla import implementation


@dataclasses.dataclass(frozen=True)
class GatedLinearUnitGpuConfig(TritonBlocks):
    """Blocks of the products `(m, k) @ (k, n)`, powers of two, and how the kernel is launched.

    `backward_block_m` are the rows at a time of a gradient that computes the projections again.
    """

    block_n: Annotated[int, TRITON_SIDE] = 64
    num_warps: Annotated[int, WARPS] = 4
    backward_block_m: Annotated[int, COUNT] = 1024

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        """Not measured: two sums of 64 columns take the registers of one of 128."""
        rows = min(128, max(16, 1 << (sizes(*inv.args)[0] - 1).bit_length()))
        block_k = 32 if inv.args[0].dtype.itemsize > 2 else 64
        return cls(rows, 64, block_k, num_warps=8 if rows == 128 else 4)

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        narrow = [(block_m, 64, 4) for block_m in (16, 32, 64, 128)]
        choices = [*narrow, (128, 64, 8), (64, 128, 8), (128, 128, 8)]
        return [cls(m, n, k, num_warps) for m, n, num_warps in choices for k in (32, 64)]


def project(
    call: Arguments, cfg: GatedLinearUnitGpuConfig, save: bool, interpret: bool = False
) -> tuple[jax.Array, Any]:
    """The output; with `save`, unless they are to be computed again, also the two projections."""
    from jax.experimental import pallas as pl

    rows, columns, depth = sizes(call.x, *call.weights)
    activation = ACTIVATIONS[call.activation]
    if call.activation == "gelu":
        activation = lambda x: 0.5 * x * (1.0 + erf(x * 0.5**0.5))  # noqa: E731
    outputs = 3 if save and not call.recompute else 1
    offset = columns if len(call.weights) == 1 else 0  # where the other weight's columns begin

    def body(x_ref: Any, gate_ref: Any, up_ref: Any, *refs: Any) -> None:
        row, my_rows = part(pl.program_id(0) * cfg.block_m, cfg.block_m, rows)
        first_column = pl.program_id(1) * cfg.block_n
        column, my_columns = part(first_column, cfg.block_n, columns)
        other = pl.ds(first_column + offset, cfg.block_n)

        sums = products(
            lambda inner: x_ref.at[row, inner],
            (lambda inner: gate_ref.at[inner, column], lambda inner: up_ref.at[inner, other]),
            (my_rows, my_columns),
            depth,
            cfg,
            precision=call.precision,
        )
        biases = (load(ref.at[column], my_columns)[None] for ref in refs[: len(call.biases)])
        gate, up = call.biased(sums, biases)
        out_refs, results = refs[len(call.biases) :], (activation(gate) * up, gate, up)
        for out_ref, result in zip(out_refs, results, strict=False):
            store(out_ref.at[row, column], result, joint(my_rows, my_columns))

    results = pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, cfg.block_m), pl.cdiv(columns, cfg.block_n)),
        out_shape=[jax.ShapeDtypeStruct((rows, columns), call.x.dtype)] * outputs,
        compiler_params=compiler_params(cfg),
        interpret=interpret,
        name="gated_linear_unit",
    )(call.x, call.weights[0], call.weights[-1], *call.biases.values())
    return call.results(*results)


PALLAS_GPU = implementation(
    project,
    name="triton",
    devices=("gpu",),
    config=GatedLinearUnitGpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16", "float16")),
)
