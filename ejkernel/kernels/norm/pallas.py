"""What the kernels for TPU and GPU do with a block of whole rows, read once and written once.

The mathematics is that of `xla.py`. Moments are computed where the rows are, in the backward pass
too: nothing but the input is kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Supports

from .arguments import Arguments
from .passes import Cotangents, Gradients, Normalised

Load = Callable[[str], jax.Array]
Store = Callable[[str, jax.Array], None]
Body = Callable[[dict[str, Any]], None]
"""What a kernel does, given references to its blocks or arrays by name."""

_MOST_FEATURES = 16384


def normalise(call: Arguments, body: Body, launch: dict[str, Any]) -> Normalised:
    """The forward pass, by a kernel that does `normalise_block` for all rows."""
    inputs = _matrices(x=call.x, residual=call.residual, weight=call.weight, bias=call.bias)
    outputs = dict.fromkeys(["out"] if call.residual is None else ["out", "summed"], inputs["x"])
    found = _run(body, inputs, outputs, name="norm_forward", **launch)
    out, *summed = (array.reshape(call.x.shape) for array in found.values())
    return Normalised(out, summed[0] if summed else None)


def differentiate(
    call: Arguments, cotangents: Cotangents, body: Body, launch: dict[str, Any], sums: int
) -> Gradients:
    """The backward pass, by a kernel that does `differentiate_block` for all rows.

    For the gradients of weight and bias it leaves as many sums, each of some rows, as `sums` says.
    """
    dout, dsummed = cotangents
    inputs = _matrices(x=call.x, dout=dout, dsummed=dsummed, weight=call.weight)
    given = {"dweight": call.weight, "dbias": call.bias}
    kind = jax.ShapeDtypeStruct((sums, call.x.shape[-1]), jnp.float32)
    outputs = {"dx": inputs["x"]} | {n: kind for n, array in given.items() if array is not None}
    found = _run(body, inputs, outputs, name="norm_backward", **launch)
    totals = (_total(found[name]) if name in found else None for name in given)
    return Gradients(found["dx"].reshape(call.x.shape), *totals)


def _total(rows: jax.Array) -> jax.Array:
    """The sum of rows; of one row it is that, without a kernel of its own."""
    return rows[0] if rows.shape[0] == 1 else jnp.sum(rows, axis=0)


def _matrices(**arrays: jax.Array | None) -> dict[str, jax.Array]:
    """The arrays that are given, as matrices of rows; a weight is one row."""
    return {n: a.reshape(-1, a.shape[-1]) for n, a in arrays.items() if a is not None}


def _run(
    body: Body,
    inputs: dict[str, jax.Array],
    outputs: dict[str, Any],
    spec: Callable[[Any], Any] | None = None,
    **launch: Any,
) -> dict[str, jax.Array]:
    from jax.experimental import pallas as pl

    if spec is not None:
        launch["in_specs"] = [spec(array) for array in inputs.values()]
        launch["out_specs"] = [spec(array) for array in outputs.values()]
    results = pl.pallas_call(
        lambda *refs: body(dict(zip((*inputs, *outputs), refs, strict=True))),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs.values()],
        **launch,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def normalise_block(
    call: Arguments, load: Load, store: Store, real: jax.Array | None = None
) -> None:
    """Write `out`, and `summed` if there is a residual.

    `load` and `store` read and write a block of the array of a name. `real` says which columns of
    the block are features, if not all are.
    """
    block = load("x")
    if call.residual is not None:
        block = block + load("residual")
        store("summed", block)
    values, rstd = _moments(call, block, real)
    out = values * rstd
    if (scale := _scale_of(call, load)) is not None:
        out = out * scale
    if call.bias is not None:
        out = out + load("bias").astype(jnp.float32)
    store("out", out)


def differentiate_block(
    call: Arguments, load: Load, store: Store, real: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Write `dx`, and give what each row contributes to `dweight` and `dbias`, by name."""
    values, rstd = _moments(call, load("x"), real)
    gradient = load("dout").astype(jnp.float32)
    scale = _scale_of(call, load)
    scaled = gradient if scale is None else gradient * scale
    # Not the cube, which leaves float32 for rows of very small or large numbers.
    shrink = rstd * (rstd * (rstd * _mean(call, scaled * values)))
    dx = rstd * scaled - values * shrink
    if call.centered:
        dx = dx - rstd * _mean(call, scaled)
    if call.residual is not None:
        dx = dx + load("dsummed").astype(jnp.float32)
    store("dx", dx)
    parts: dict[str, jax.Array] = {}
    if call.weight is not None:
        parts["dweight"] = gradient * values * rstd
    if call.bias is not None:
        parts["dbias"] = gradient
    return parts


def _scale_of(call: Arguments, load: Load) -> jax.Array | None:
    """The factor of each feature, or None if there is none."""
    return None if call.weight is None else load("weight").astype(jnp.float32) + call.weight_offset


def _moments(
    call: Arguments, block: jax.Array, real: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The values (without their mean, if centered) and the factor that normalises them."""
    values = block.astype(jnp.float32)
    if call.centered:
        values = values - _mean(call, values)
        values = values if real is None else jnp.where(real, values, 0.0)
    return values, lax.rsqrt(_mean(call, values * values) + call.eps)


def _mean(call: Arguments, values: jax.Array) -> jax.Array:
    """The mean of each row, `(rows, 1)`; columns that are no features are zero."""
    return jnp.sum(values, axis=-1, keepdims=True) / call.x.shape[-1]


def _rows_fit(inv: Invocation[Any, Any]) -> str | None:
    """Rows that fit on the chip."""
    features = inv.args[0].shape[-1]
    if features <= _MOST_FEATURES:
        return None
    return f"x has {features} features; rows of at most {_MOST_FEATURES} fit on the chip"


SUPPORTS = Supports(
    dtypes=("float32", "bfloat16", "float16"), without=("feature_axes",), rules=(_rows_fit,)
)
