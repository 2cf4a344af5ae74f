"""Normalisation of rows on GPU, by Pallas' Triton backend: a program holds rows in registers.

In the backward pass a program walks over its rows and adds up what they contribute to the gradients
of weight and bias; the sums of all programs are added by XLA.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Limit

from ..limits import COUNT, WARPS
from ..sizes import next_power_of_two
from . import pallas
from .arguments import Arguments, Output, rows_and_features


@dataclasses.dataclass(frozen=True)
class NormGpuConfig:
    """Rows and warps of a program.

    Args:
      block_m: rows that a program of the forward pass holds at once, a power of two.
      num_warps: of such a program.
      backward_block_m: rows that a program of the backward pass walks over, one after the other.
      backward_num_warps: of such a program.
    """

    block_m: Annotated[int, Limit(minimum=1, maximum=4096, power_of_two=True)] = 2
    num_warps: Annotated[int, WARPS] = 4
    backward_block_m: Annotated[int, COUNT] = 16
    backward_num_warps: Annotated[int, WARPS] = 4

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> NormGpuConfig:
        """Not measured: forward a tile of 2048 elements, backward 256 programs in all.

        Every thread has about eight elements of a row.
        """
        rows, features = rows_and_features(inv.args[0])
        width = next_power_of_two(features)
        warps = min(16, max(1, width // 256))
        return cls(max(1, 2048 // width), warps, -(-rows // 256), warps)

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[NormGpuConfig]:
        base = cls.heuristic(inv)
        rows, walked = base.block_m, base.backward_block_m
        blocks = [(rows, walked), (2 * rows, 2 * walked), (1, max(1, walked // 2))]
        return [
            cls(block_m, warps, backward_block_m, warps)
            for block_m, backward_block_m in dict.fromkeys(blocks)
            for warps in (1, 2, 4, 8, 16)
            if warps * 32 <= max(32, inv.args[0].shape[-1])  # no thread without an element
        ]


def normalise(call: Arguments, cfg: NormGpuConfig) -> tuple[Output, None]:
    """The output and, with a residual, the sum that was normalised."""
    from jax.experimental import pallas as pl

    shape = rows_and_features(call.x)

    def body(refs: dict[str, Any]) -> None:
        first = pl.program_id(0) * cfg.block_m
        pallas.normalise_block(call, _Tile(refs, first, cfg.block_m, shape))

    return pallas.normalise(call, body, _launch(pl.cdiv(shape[0], cfg.block_m), cfg.num_warps))


def differentiate(
    call: Arguments, moments: None, cotangents: Any, cfg: NormGpuConfig
) -> tuple[jax.Array | None, ...]:
    """The gradients of `x`, weight and bias."""
    from jax.experimental import pallas as pl

    shape = rows_and_features(call.x)
    programs = pl.cdiv(shape[0], cfg.backward_block_m)

    def body(refs: dict[str, Any]) -> None:
        first = pl.program_id(0) * cfg.backward_block_m
        mine = _Tile(refs, pl.program_id(0), 1, (programs, shape[1]))
        once = refs if call.weight is None else refs | {"weight": mine.load("weight")}
        names = [name for name in ("dweight", "dbias") if name in refs]

        def add_row(i: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            parts = pallas.differentiate_block(call, _Tile(once, first + i, 1, shape))
            return tuple(total + parts[n] for n, total in zip(names, totals, strict=True))

        zeros = jnp.zeros(mine.real.shape, jnp.float32)
        totals = lax.fori_loop(0, cfg.backward_block_m, add_row, (zeros,) * len(names))
        for name, total in zip(names, totals, strict=True):
            mine.store(name, total)

    launch = _launch(programs, cfg.backward_num_warps)
    return pallas.differentiate(call, cotangents, body, launch, sums=programs)


class _Tile(pallas.Block):
    """Some rows and all features, padded to powers of two, as Triton wants its tiles."""

    real: jax.Array

    def __init__(self, refs: dict[str, Any], first: Any, rows: int, shape: tuple[int, int]) -> None:
        super().__init__(refs)
        size = (rows, next_power_of_two(shape[1]))
        row, column = (lax.broadcasted_iota(jnp.int32, size, axis) for axis in (0, 1))
        self._index = first + row, column
        self.real = column < shape[1]
        self._mask = self.real & (self._index[0] < shape[0])

    def load(self, name: str) -> jax.Array:
        from ..triton_blocks import load

        ref = self.refs[name]
        if isinstance(ref, jax.Array):  # loaded before
            return ref
        if name in ("weight", "bias"):
            column = lax.iota(jnp.int32, self.real.shape[1])
            return load(ref.at[0, column], column < ref.shape[1])[None, :]
        return load(ref.at[*self._index], self._mask)

    def store(self, name: str, values: jax.Array) -> None:
        from ..triton_blocks import store

        store(self.refs[name].at[*self._index], values, self._mask)


def _launch(programs: int, num_warps: int) -> dict[str, Any]:
    from jax.experimental.pallas import triton as plgpu

    compiler_params = plgpu.CompilerParams(num_warps=num_warps, num_stages=1)
    return {"grid": (programs,), "compiler_params": compiler_params}
