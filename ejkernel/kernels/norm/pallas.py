"""What the kernels for TPU and GPU do with a block of whole rows, read once and written once.

The mathematics is that of `xla.py`. Moments are computed where the rows are, in the backward pass
too: nothing but the input is stored for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Supports

from .arguments import Arguments, Output

Body = Callable[[dict[str, Any]], None]
"""What a kernel does, given references to its blocks or arrays by name."""

_MOST_FEATURES = 16384


class Block:
    """Some rows of all arrays; here, of a kernel whose references are to such blocks."""

    real: jax.Array | None = None  # which columns are features, if not all are

    def __init__(self, refs: dict[str, Any]) -> None:
        self.refs = refs

    def load(self, name: str) -> jax.Array:
        block: jax.Array = self.refs[name][...]
        return block

    def store(self, name: str, values: jax.Array) -> None:
        self.refs[name][...] = values.astype(self.refs[name].dtype)


def normalise(call: Arguments, body: Body, launch: dict[str, Any]) -> tuple[Output, None]:
    """The forward pass, by a kernel that does `normalise_block` for all rows."""
    inputs = _matrices(x=call.x, residual=call.residual, weight=call.weight, bias=call.bias)
    outputs = dict.fromkeys(["out"] if call.residual is None else ["out", "summed"], inputs["x"])
    found = _run(body, inputs, outputs, name="norm_forward", **launch)
    out, *summed = (array.reshape(call.x.shape) for array in found.values())
    return (out, summed[0]) if summed else out, None


def differentiate(
    call: Arguments, cotangents: Any, body: Body, launch: dict[str, Any], sums: int
) -> tuple[jax.Array | None, ...]:
    """The backward pass, by a kernel that does `differentiate_block` for all rows.

    For the gradients of weight and bias, which are of float32, it leaves as many sums, each of some
    rows, as `sums` says.
    """
    dout, dsummed = cotangents
    inputs = _matrices(x=call.x, dout=dout, dsummed=dsummed, weight=call.weight)
    given = {"dweight": call.weight, "dbias": call.bias}
    kind = jax.ShapeDtypeStruct((sums, call.x.shape[-1]), jnp.float32)
    outputs = {"dx": inputs["x"]} | {n: kind for n, array in given.items() if array is not None}
    found = _run(body, inputs, outputs, name="norm_backward", **launch)
    dx = found.pop("dx").reshape(call.x.shape)
    totals = {n: rows[0] if sums == 1 else jnp.sum(rows, axis=0) for n, rows in found.items()}
    return dx, totals.get("dweight"), totals.get("dbias")


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


def normalise_block(call: Arguments, block: Block) -> None:
    """Write `out`, and `summed` if there is a residual."""
    x = block.load("x")
    if call.residual is not None:
        x = x + block.load("residual")
        block.store("summed", x)
    values, rstd = _moments(call, x, block.real)
    out = values * rstd
    if call.weight is not None:
        out = out * _scale(call, block)
    if call.bias is not None:
        out = out + block.load("bias").astype(jnp.float32)
    block.store("out", out)


def differentiate_block(call: Arguments, block: Block) -> dict[str, jax.Array]:
    """Write `dx`, and give what each row contributes to `dweight` and `dbias`, by name."""
    values, rstd = _moments(call, block.load("x"), block.real)
    gradient = block.load("dout").astype(jnp.float32)
    scaled = gradient if call.weight is None else gradient * _scale(call, block)
    # Not the cube, which leaves float32 for rows of very small or large numbers.
    shrink = rstd * (rstd * (rstd * _mean(call, scaled * values)))
    dx = rstd * scaled - values * shrink
    if call.centered:
        dx = dx - rstd * _mean(call, scaled)
    if call.residual is not None:
        dx = dx + block.load("dsummed").astype(jnp.float32)
    block.store("dx", dx)
    parts = {} if call.weight is None else {"dweight": gradient * values * rstd}
    return parts if call.bias is None else parts | {"dbias": gradient}


def _scale(call: Arguments, block: Block) -> jax.Array:
    return block.load("weight").astype(jnp.float32) + call.weight_offset


def _moments(call: Arguments, x: jax.Array, real: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The values (without their mean, if centered) and the factor that normalises them."""
    values = x.astype(jnp.float32)
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
