"""Normalisation of rows on TPU: a step of the grid works on a block of whole rows.

The sums over all rows (the gradients of weight and bias) stay in VMEM while the grid walks over the
blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation

from ..limits import SUBLANES
from . import pallas
from .arguments import Arguments, Output, rows_and_features


@dataclasses.dataclass(frozen=True)
class NormTpuConfig:
    """Rows of a block in the forward and in the backward pass, multiples of 8."""

    block_m: Annotated[int, SUBLANES] = 256
    backward_block_m: Annotated[int, SUBLANES] = 128

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> NormTpuConfig:
        """As many rows as keep all arrays of a step, twice, within 16 MiB of VMEM; not measured."""
        return cls(_rows_of(inv, 2**18), _rows_of(inv, 2**17))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[NormTpuConfig]:
        blocks = dict.fromkeys(_rows_of(inv, 2**power) for power in (15, 16, 17, 18))
        return [cls(block, block) for block in blocks]


def _rows_of(inv: Invocation[Any, Any], elements: int) -> int:
    """Rows of a block of about so many elements."""
    rows, features = rows_and_features(inv.args[0])
    return min(-(-rows // 8) * 8, max(8, elements // features // 8 * 8))


def normalise(call: Arguments, cfg: NormTpuConfig) -> tuple[Output, None]:
    """The output and, with a residual, the sum that was normalised."""

    def body(refs: dict[str, Any]) -> None:
        pallas.normalise_block(call, pallas.Block(refs))

    return pallas.normalise(call, body, _launch(call, cfg.block_m, "parallel"))


def differentiate(
    call: Arguments, moments: None, cotangents: Any, cfg: NormTpuConfig
) -> tuple[jax.Array | None, ...]:
    """The gradients of `x`, weight and bias."""
    from jax.experimental import pallas as pl

    rows, _ = rows_and_features(call.x)
    block_rows = min(cfg.backward_block_m, rows)

    def body(refs: dict[str, Any]) -> None:
        for name, part in pallas.differentiate_block(call, pallas.Block(refs)).items():
            if rows % block_rows:  # what lies beyond the last row is anything
                row = lax.broadcasted_iota(jnp.int32, part.shape, 0)
                part = jnp.where(row + pl.program_id(0) * block_rows < rows, part, 0.0)
            add(refs[name], jnp.sum(part, axis=0, keepdims=True))

    def add(total: Any, part: jax.Array) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += part

    # Sums go from block to block, so the blocks must come one after the other.
    has_sums = call.weight is not None or call.bias is not None
    launch = _launch(call, block_rows, "arbitrary" if has_sums else "parallel")
    return pallas.differentiate(call, cotangents, body, launch, sums=1)


def _launch(call: Arguments, block_m: int, order: Any) -> dict[str, Any]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, features = rows_and_features(call.x)
    block = min(block_m, rows)

    def spec(array: Any) -> Any:
        if array.shape[0] == rows:  # a weight too, if there is but one row: it is all the same
            return pl.BlockSpec((block, features), lambda i: (i, 0))
        return pl.BlockSpec((1, features), lambda i: (0, 0))

    compiler_params = pltpu.CompilerParams(dimension_semantics=(order,))
    return {"grid": (pl.cdiv(rows, block),), "spec": spec, "compiler_params": compiler_params}
