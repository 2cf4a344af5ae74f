"""Normalisation of rows on TPU: a step of the grid works on a block of whole rows.

The sums over all rows (the gradients of weight and bias) stay in VMEM while the grid walks over the
blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Implementation, Invocation, Limits

from ..limits import SUBLANES
from . import pallas
from .arguments import Arguments, rows_and_features
from .passes import Cotangents, Gradients, Normalised, passes_of
from .reference import Output


@dataclasses.dataclass(frozen=True)
class NormTpuConfig:
    """Rows of a block in the forward and in the backward pass, multiples of 8."""

    block_m: int = 256
    backward_block_m: int = 128


def normalise(call: Arguments, cfg: NormTpuConfig, interpret: bool = False) -> Normalised:
    """The output and, with a residual, the sum that was normalised."""

    def body(refs: dict[str, Any]) -> None:
        pallas.normalise_block(call, *_access(refs))

    return pallas.normalise(call, body, _launch(call, cfg.block_m, "parallel", interpret))


def differentiate(
    call: Arguments,
    moments: None,
    cotangents: Cotangents,
    cfg: NormTpuConfig,
    interpret: bool = False,
) -> Gradients:
    """The gradients; those of weight and bias in float32."""
    from jax.experimental import pallas as pl

    rows, _ = rows_and_features(call.x)
    block_rows = min(cfg.backward_block_m, rows)

    def body(refs: dict[str, Any]) -> None:
        load, store = _access(refs)
        for name, part in pallas.differentiate_block(call, load, store).items():
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
    launch = _launch(call, block_rows, "arbitrary" if has_sums else "parallel", interpret)
    return pallas.differentiate(call, cotangents, body, launch, sums=1)


def _access(refs: dict[str, Any]) -> tuple[pallas.Load, pallas.Store]:
    def store(name: str, values: jax.Array) -> None:
        refs[name][...] = values.astype(refs[name].dtype)

    return lambda name: refs[name][...], store


def _launch(
    call: Arguments, block_m: int, order: Literal["arbitrary", "parallel"], interpret: bool
) -> dict[str, Any]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, features = rows_and_features(call.x)
    block = min(block_m, rows)

    def spec(array: Any) -> Any:
        if array.shape[0] == rows:  # a weight too, if there is but one row: it is all the same
            return pl.BlockSpec((block, features), lambda i: (i, 0))
        return pl.BlockSpec((1, features), lambda i: (0, 0))

    return {
        "grid": (pl.cdiv(rows, block),),
        "spec": spec,
        "compiler_params": pltpu.CompilerParams(dimension_semantics=(order,)),
        "interpret": interpret,
    }


def _heuristic(inv: Invocation[Any, Any]) -> NormTpuConfig:
    """As many rows as keep all arrays of a step, twice, within 16 MiB of VMEM; not measured."""
    return NormTpuConfig(_rows_of(inv, 2**18), _rows_of(inv, 2**17))


def _space(inv: Invocation[Any, Any]) -> list[NormTpuConfig]:
    blocks = dict.fromkeys(_rows_of(inv, 2**power) for power in (15, 16, 17, 18))
    return [NormTpuConfig(block, block) for block in blocks]


def _rows_of(inv: Invocation[Any, Any], elements: int) -> int:
    """Rows of a block of about so many elements."""
    rows, features = rows_and_features(inv.args[0])
    return min(-(-rows // 8) * 8, max(8, elements // features // 8 * 8))


def implementation(*, centered: bool) -> Implementation[NormTpuConfig, Output]:
    """Layer norm if the values are centered, else RMS norm."""
    return Implementation(
        name="pallas",
        devices=("tpu",),
        config=NormTpuConfig,
        heuristic=_heuristic,
        space=_space,
        supports=pallas.SUPPORTS,
        limits=Limits({"block_m": SUBLANES, "backward_block_m": SUBLANES}),
        **passes_of(normalise, differentiate, centered=centered),
    )
