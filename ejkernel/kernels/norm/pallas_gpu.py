"""Normalisation of rows on GPU, by Pallas' Triton backend: a program holds rows in registers.

In the backward pass a program walks over its rows and adds up what they contribute to the gradients
of weight and bias; the sums of all programs are added by XLA.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Implementation, Invocation, Limit, Limits

from ..limits import COUNT, WARPS
from ..sizes import next_power_of_two
from . import pallas
from .arguments import Arguments, rows_and_features
from .passes import Cotangents, Gradients, Normalised, passes_of
from .reference import Output


@dataclasses.dataclass(frozen=True)
class NormGpuConfig:
    """Rows and warps of a program.

    Args:
      block_m: rows that a program of the forward pass holds at once, a power of two.
      num_warps: of such a program.
      backward_block_m: rows that a program of the backward pass walks over, one after the other.
      backward_num_warps: of such a program.
    """

    block_m: int = 2
    num_warps: int = 4
    backward_block_m: int = 16
    backward_num_warps: int = 4


def normalise(call: Arguments, cfg: NormGpuConfig, interpret: bool = False) -> Normalised:
    """The output and, with a residual, the sum that was normalised."""
    from jax.experimental import pallas as pl

    shape = rows_and_features(call.x)
    programs = pl.cdiv(shape[0], cfg.block_m)

    def body(refs: dict[str, Any]) -> None:
        tile = _Tile(pl.program_id(0) * cfg.block_m, cfg.block_m, shape)
        pallas.normalise_block(call, *_access(refs, tile), tile.real)

    return pallas.normalise(call, body, _launch(programs, cfg.num_warps, interpret))


def differentiate(
    call: Arguments,
    moments: None,
    cotangents: Cotangents,
    cfg: NormGpuConfig,
    interpret: bool = False,
) -> Gradients:
    """The gradients; those of weight and bias in float32."""
    from jax.experimental import pallas as pl

    shape = rows_and_features(call.x)
    programs = pl.cdiv(shape[0], cfg.backward_block_m)

    def body(refs: dict[str, Any]) -> None:
        first = pl.program_id(0) * cfg.backward_block_m
        mine = _Tile(pl.program_id(0), 1, (programs, shape[1]))
        load, store = _access(refs, mine)
        weight = None if call.weight is None else load("weight")
        names = [name for name in ("dweight", "dbias") if name in refs]

        def add_row(i: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            tile = _Tile(first + i, 1, shape)
            load, store = _access(refs, tile, weight)
            parts = pallas.differentiate_block(call, load, store, tile.real)
            return tuple(total + parts[n] for n, total in zip(names, totals, strict=True))

        zeros = jnp.zeros(mine.real.shape, jnp.float32)
        totals = lax.fori_loop(0, cfg.backward_block_m, add_row, (zeros,) * len(names))
        for name, total in zip(names, totals, strict=True):
            store(name, total)

    launch = _launch(programs, cfg.backward_num_warps, interpret)
    return pallas.differentiate(call, cotangents, body, launch, sums=programs)


class _Tile:
    """Some rows and all features, padded to powers of two, as Triton wants its tiles."""

    def __init__(self, first: Any, rows: int, shape: tuple[int, int]) -> None:
        size = (rows, next_power_of_two(shape[1]))
        row, column = (lax.broadcasted_iota(jnp.int32, size, axis) for axis in (0, 1))
        self.index = first + row, column
        self.real = column < shape[1]
        self.mask = self.real & (self.index[0] < shape[0])


def _access(
    refs: dict[str, Any], tile: _Tile, weight: jax.Array | None = None
) -> tuple[pallas.Load, pallas.Store]:
    from ..triton_blocks import load, store

    def load_tile(name: str) -> jax.Array:
        if name == "weight" and weight is not None:
            return weight
        if name in ("weight", "bias"):
            column = lax.iota(jnp.int32, tile.real.shape[1])
            return load(refs[name].at[0, column], column < refs[name].shape[1])[None, :]
        return load(refs[name].at[*tile.index], tile.mask)

    return load_tile, lambda name, values: store(refs[name].at[*tile.index], values, tile.mask)


def _launch(programs: int, num_warps: int, interpret: bool) -> dict[str, Any]:
    from jax.experimental.pallas import triton as plgpu

    compiler_params = plgpu.CompilerParams(num_warps=num_warps, num_stages=1)
    return {"grid": (programs,), "compiler_params": compiler_params, "interpret": interpret}


def _heuristic(inv: Invocation[Any, Any]) -> NormGpuConfig:
    """Not measured: forward a tile of 2048 elements, backward 256 programs in all.

    Every thread has about eight elements of a row.
    """
    rows, features = rows_and_features(inv.args[0])
    width = next_power_of_two(features)
    warps = min(16, max(1, width // 256))
    return NormGpuConfig(max(1, 2048 // width), warps, -(-rows // 256), warps)


def _space(inv: Invocation[Any, Any]) -> list[NormGpuConfig]:
    base = _heuristic(inv)
    rows, walked = base.block_m, base.backward_block_m
    return [
        NormGpuConfig(block_m, warps, backward_block_m, warps)
        for block_m, backward_block_m in dict.fromkeys(
            [(rows, walked), (2 * rows, 2 * walked), (1, max(1, walked // 2))]
        )
        for warps in (1, 2, 4, 8, 16)
        if warps * 32 <= max(32, inv.args[0].shape[-1])  # no thread without an element
    ]


def implementation(*, centered: bool) -> Implementation[NormGpuConfig, Output]:
    """Layer norm if the values are centered, else RMS norm."""
    return Implementation(
        name="triton",
        devices=("gpu",),
        config=NormGpuConfig,
        heuristic=_heuristic,
        space=_space,
        supports=pallas.SUPPORTS,
        limits=Limits(
            {
                "block_m": Limit(minimum=1, maximum=4096, power_of_two=True),
                "num_warps": WARPS,
                "backward_block_m": COUNT,
                "backward_num_warps": WARPS,
            }
        ),
        **passes_of(normalise, differentiate, centered=centered),
    )
