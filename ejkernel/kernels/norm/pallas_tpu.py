"""Normalisation of rows on TPU: each block of rows is read once and written once.

A block holds whole rows, so the moments are computed where the rows are, in the backward pass too:
nothing but the input is kept for it. The sums over all rows (the gradients of weight and bias) stay
in VMEM while the grid walks over the blocks. The mathematics is that of `norm/xla.py`.

Example:
    >>> import jax.numpy as jnp
    >>> options = dict(eps=0.0, centered=True, rows=8, interpret=True)
    >>> out, summed = forward(jnp.array([[1.0, 3.0]]), **options)
    >>> out.tolist(), summed
    ([[-1.0, 1.0]], None)
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
        rows: Rows of a block, a multiple of 8.
        interpret: Run on any device, slowly.
    """
    shape = x.shape
    inputs = {"x": _matrix(x), "residual": _matrix(residual)}
    inputs |= {"weight": _row(weight), "bias": _row(bias)}
    given = {name: array for name, array in inputs.items() if array is not None}
    outputs = {"out": inputs["x"]} | ({} if residual is None else {"summed": inputs["x"]})

    def body(*refs: Any) -> None:
        ref = dict(zip((*given, *outputs), refs, strict=True))
        block = ref["x"][...]
        if "residual" in ref:
            block = block + ref["residual"][...]
            ref["summed"][...] = block
        values, rstd = _moments(block, eps, centered)
        out = values * rstd
        if "weight" in ref:
            out = out * (ref["weight"][...].astype(jnp.float32) + weight_offset)
        if "bias" in ref:
            out = out + ref["bias"][...].astype(jnp.float32)
        ref["out"][...] = out.astype(x.dtype)

    results = _call(body, given, outputs, rows, "norm_forward", "parallel", interpret)
    summed = None if residual is None else results["summed"].reshape(shape)
    return results["out"].reshape(shape), summed


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
    interpret: bool = False,
) -> Gradients:
    """Gradients of the inputs of :func:`forward`.

    Args:
        x: What was normalised (with a residual, the sum).
        dout: Gradient of the output.
        dsummed: Gradient of the second output; it is added to that of ``x``.
        weight: As in :func:`forward`, and so are the arguments that are not listed here.
        bias: Only asked whether it is there.
        rows: Rows of a block; it may differ from that of :func:`forward`.
    """
    features = x.shape[-1]
    inputs = {"x": _matrix(x), "dout": _matrix(dout), "dsummed": _matrix(dsummed)}
    inputs |= {"weight": _row(weight)}
    given = {name: array for name, array in inputs.items() if array is not None}
    sums = {"dweight": weight, "dbias": bias}
    total = jax.ShapeDtypeStruct((1, features), jnp.float32)
    outputs: dict[str, Any] = {"dx": inputs["x"]}
    outputs |= {name: total for name, array in sums.items() if array is not None}
    count = x.size // features
    partial_block = count % min(rows, count) != 0

    def body(*refs: Any) -> None:
        ref = dict(zip((*given, *outputs), refs, strict=True))
        values, rstd = _moments(ref["x"][...], eps, centered)
        gradient = ref["dout"][...].astype(jnp.float32)
        scaled = gradient
        if "weight" in ref:
            scaled = gradient * (ref["weight"][...].astype(jnp.float32) + weight_offset)
        # Not the cube, which leaves float32 for rows of very small or large numbers.
        average = jnp.mean(scaled * values, -1, keepdims=True)
        dx = rstd * scaled - values * (rstd * (rstd * (rstd * average)))
        if centered:
            dx = dx - rstd * jnp.mean(scaled, axis=-1, keepdims=True)
        if "dsummed" in ref:
            dx = dx + ref["dsummed"][...].astype(jnp.float32)
        ref["dx"][...] = dx.astype(x.dtype)

        def add(name: str, contributions: jax.Array) -> None:
            if partial_block:  # what lies beyond the last row is anything
                row = lax.broadcasted_iota(jnp.int32, contributions.shape, 0)
                real = row + pl.program_id(0) * values.shape[0] < count
                contributions = jnp.where(real, contributions, 0.0)
            block_sum = jnp.sum(contributions, axis=0, keepdims=True)

            @pl.when(pl.program_id(0) == 0)
            def _() -> None:
                ref[name][...] = jnp.zeros_like(ref[name])

            ref[name][...] += block_sum

        if "dweight" in ref:
            add("dweight", gradient * values * rstd)
        if "dbias" in ref:
            add("dbias", gradient)

    # The sums go from block to block, so the blocks must come one after the other.
    order: Literal["parallel", "arbitrary"] = "arbitrary" if len(outputs) > 1 else "parallel"
    results = _call(body, given, outputs, rows, "norm_backward", order, interpret)
    return Gradients(
        results["dx"].reshape(x.shape),
        *(results[name].reshape(features) if name in results else None for name in sums),
    )


def default_rows(rows: int, features: int, *, backward: bool) -> int:
    """Rows of a block: as many as keep all arrays of a step, twice, within 16 MiB of VMEM."""
    elements = 2**17 if backward else 2**18
    return min(_round_up(rows, 8), max(8, elements // features // 8 * 8))


def _call(
    body: Any,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    rows: int,
    name: str,
    order: Literal["parallel", "arbitrary"],
    interpret: bool,
) -> dict[str, jax.Array]:
    count, features = inputs["x"].shape
    block = min(rows, count)

    def spec(array: Any) -> pl.BlockSpec:
        if array.shape[0] == count:  # a weight too, if there is but one row: it is all the same
            return pl.BlockSpec((block, features), lambda i: (i, 0))
        return pl.BlockSpec((1, features), lambda i: (0, 0))

    specs = {key: spec(array) for key, array in (inputs | outputs).items()}
    results = pl.pallas_call(
        body,
        grid=(pl.cdiv(count, block),),
        in_specs=[specs[key] for key in inputs],
        out_specs=[specs[key] for key in outputs],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=(order,)),
        interpret=interpret,
        name=name,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def _moments(block: jax.Array, eps: float, centered: bool) -> tuple[jax.Array, jax.Array]:
    """The values (without their mean, if centered) and the factor that normalises them."""
    values = block.astype(jnp.float32)
    if centered:
        values = values - jnp.mean(values, axis=-1, keepdims=True)
    return values, lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + eps)


def _matrix(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x.reshape(-1, x.shape[-1])


def _row(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x.reshape(1, -1)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
