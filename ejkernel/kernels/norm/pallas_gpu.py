"""Normalisation of rows on GPU, by Pallas' Triton backend: each row is read once and written once.

A program holds whole rows in registers, so the moments are computed where the rows are, in the
backward pass too: nothing but the input is kept for it. In the backward pass a program walks over
its rows and adds up what they contribute to the gradients of weight and bias; the sums of all
programs are added by XLA. The mathematics is that of `norm/xla.py`.

Example:
    >>> import jax.numpy as jnp
    >>> options = dict(eps=0.0, centered=True, rows=1, num_warps=4, interpret=True)
    >>> out, summed = forward(jnp.array([[1.0, 3.0]]), **options)
    >>> out.tolist(), summed
    ([[-1.0, 1.0]], None)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .xla import Gradients


def forward(
    x: jax.Array,
    *,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    eps: float,
    weight_offset: float = 0.0,
    centered: bool,
    rows: int,
    num_warps: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The output and, with a residual, the sum that was normalised.

    Args:
        x: ``(..., d)``.
        weight: ``(d,)``, or None for ones.
        bias: ``(d,)``, or None for zeros.
        residual: Shape of ``x``, added to it first.
        eps: Added to the mean square.
        weight_offset: Added to the weight.
        centered: Whether the mean is subtracted first (layer norm).
        rows: Rows of a program, a power of two.
        num_warps: Warps of a program.
        interpret: Run on any device, slowly.
    """
    matrix = x.reshape(-1, x.shape[-1])
    inputs = {"x": matrix, "residual": None if residual is None else residual.reshape(matrix.shape)}
    inputs |= {"weight": weight, "bias": bias}
    given = {name: array for name, array in inputs.items() if array is not None}
    like_x = jax.ShapeDtypeStruct(matrix.shape, x.dtype)
    outputs = {"out": like_x} | ({} if residual is None else {"summed": like_x})

    def body(*refs: Any) -> None:
        ref = dict(zip((*given, *outputs), refs, strict=True))
        tile = _Tile(pl.program_id(0) * rows, rows, matrix.shape)
        block = tile.load(ref["x"])
        if "residual" in ref:
            block = block + tile.load(ref["residual"])
            tile.store(ref["summed"], block)
        values, rstd = tile.moments(block, eps, centered)
        out = values * rstd
        if "weight" in ref:
            out = out * (tile.load_features(ref["weight"]) + weight_offset)
        if "bias" in ref:
            out = out + tile.load_features(ref["bias"])
        tile.store(ref["out"], out)

    results = pl.pallas_call(
        body,
        grid=(pl.cdiv(matrix.shape[0], rows),),
        out_shape=list(outputs.values()),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="norm_forward",
    )(*given.values())
    return results[0].reshape(x.shape), None if residual is None else results[1].reshape(x.shape)


def backward(
    x: jax.Array,
    dout: jax.Array,
    *,
    dsummed: jax.Array | None = None,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float,
    weight_offset: float = 0.0,
    centered: bool,
    rows: int,
    num_warps: int,
    interpret: bool = False,
) -> Gradients:
    """Gradients of the inputs of :func:`forward`.

    Args:
        x: What was normalised (with a residual, the sum).
        dout: Gradient of the output.
        dsummed: Gradient of the second output; it is added to that of ``x``.
        weight: As in :func:`forward`, and so are the arguments that are not listed here.
        bias: Only asked whether it is there.
        rows: Rows that a program walks over, one after the other; any number.
    """
    features = x.shape[-1]
    matrix = x.reshape(-1, features)
    count = matrix.shape[0]
    inputs = {"x": matrix, "dout": dout.reshape(matrix.shape)}
    inputs |= {} if dsummed is None else {"dsummed": dsummed.reshape(matrix.shape)}
    inputs |= {} if weight is None else {"weight": weight}
    programs = pl.cdiv(count, rows)
    sums = {"dweight": weight, "dbias": bias}
    kept = [name for name, array in sums.items() if array is not None]
    outputs = {"dx": jax.ShapeDtypeStruct(matrix.shape, x.dtype)}
    outputs |= {name: jax.ShapeDtypeStruct((programs, features), jnp.float32) for name in kept}

    def body(*refs: Any) -> None:
        ref = dict(zip((*inputs, *outputs), refs, strict=True))
        first = pl.program_id(0) * rows
        columns = _Tile(first, 1, matrix.shape)
        scale = None
        if "weight" in ref:
            scale = columns.load_features(ref["weight"]) + weight_offset

        def add_row(i: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            tile = _Tile(first + i, 1, matrix.shape)
            values, rstd = tile.moments(tile.load(ref["x"]), eps, centered)
            gradient = tile.load(ref["dout"]).astype(jnp.float32)
            scaled = gradient if scale is None else gradient * scale
            # Not the cube, which leaves float32 for rows of very small or large numbers.
            average = jnp.sum(scaled * values, axis=1, keepdims=True) / features
            shrink = rstd * (rstd * (rstd * average))
            dx = rstd * scaled - values * shrink
            if centered:
                dx = dx - rstd * (jnp.sum(scaled, axis=1, keepdims=True) / features)
            if "dsummed" in ref:
                dx = dx + tile.load(ref["dsummed"]).astype(jnp.float32)
            tile.store(ref["dx"], dx)
            contributions = {"dweight": gradient * values * rstd, "dbias": gradient}
            return tuple(
                total + contributions[name] for name, total in zip(kept, totals, strict=True)
            )

        zeros = jnp.zeros((1, columns.width), jnp.float32)
        totals = lax.fori_loop(0, rows, add_row, (zeros,) * len(kept))
        for name, total in zip(kept, totals, strict=True):
            _Tile(pl.program_id(0), 1, (programs, features)).store(ref[name], total)

    results = pl.pallas_call(
        body,
        grid=(programs,),
        out_shape=list(outputs.values()),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="norm_backward",
    )(*inputs.values())
    found = dict(zip(outputs, results, strict=True))
    return Gradients(
        found["dx"].reshape(x.shape),
        *(jnp.sum(found[name], axis=0) if name in found else None for name in sums),
    )


def default_rows(rows: int, features: int, *, backward: bool) -> int:
    """Rows of a program: forward a tile of 2048 elements, backward 256 programs in all."""
    if backward:
        return max(1, -(-rows // 256))
    return max(1, 2048 // pl.next_power_of_2(features))


def default_warps(features: int) -> int:
    """Warps of a program: about eight elements of a row in every thread."""
    return min(16, max(1, pl.next_power_of_2(features) // 256))


class _Tile:
    """Some rows and all features, padded to powers of two, as Triton wants its tiles."""

    def __init__(self, first: Any, rows: int, shape: tuple[int, ...]) -> None:
        self.width = pl.next_power_of_2(shape[1])
        self.features = shape[1]
        self.row = first + lax.broadcasted_iota(jnp.int32, (rows, self.width), 0)
        self.column = lax.broadcasted_iota(jnp.int32, (rows, self.width), 1)
        self.real = self.column < self.features
        self.mask = self.real & (self.row < shape[0])

    def load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref.at[self.row, self.column], mask=self.mask, other=0.0)

    def load_features(self, ref: Any) -> jax.Array:
        column = lax.broadcasted_iota(jnp.int32, (self.width,), 0)
        loaded = plgpu.load(ref.at[column], mask=column < self.features, other=0.0)
        return loaded.astype(jnp.float32)[None, :]

    def store(self, ref: Any, values: jax.Array) -> None:
        plgpu.store(ref.at[self.row, self.column], values.astype(ref.dtype), mask=self.mask)

    def moments(self, block: jax.Array, eps: float, centered: bool) -> tuple[jax.Array, jax.Array]:
        """The values (without their mean, if centered) and the factor that normalises them."""
        values = block.astype(jnp.float32)
        if centered:
            mean = jnp.sum(values, axis=1, keepdims=True) / self.features
            values = jnp.where(self.real, values - mean, 0.0)
        square = jnp.sum(values * values, axis=1, keepdims=True) / self.features
        return values, lax.rsqrt(square + eps)
