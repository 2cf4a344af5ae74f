r"""The gated linear unit in plain JAX, some rows at a time.

With :math:`g = x W_g + b_g` and :math:`u = x W_u + b_u`, and :math:`\mathrm{do}` the gradient of
the output:

.. math::
    \mathrm{dg} = \mathrm{do} \odot u \odot f'(g), \quad
    \mathrm{du} = \mathrm{do} \odot f(g), \quad
    \mathrm{dx} = \mathrm{dg} \, W_g^T + \mathrm{du} \, W_u^T, \quad
    \mathrm{dW}_g = x^T \mathrm{dg}, \quad \mathrm{dW}_u = x^T \mathrm{du} .

The gradient needs :math:`g` and :math:`u`. Kept from the forward pass they take twice the memory of
the output; computed again, block by block, they take none, for a third more products. Everything
else (:math:`f(g)`, :math:`f'(g)`) is computed again in either case.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Implementation, Invocation, Limits

from ..dtypes import accumulation_dtype
from ..limits import COUNT
from ..row_blocks import in_row_blocks
from .activations import gated, gated_gradients
from .arguments import Arguments, width_of

Saved = tuple[jax.Array, jax.Array] | None
"""Both projections, in the dtype of `x`; None: they are computed again."""


@dataclasses.dataclass(frozen=True)
class GatedLinearUnitXlaConfig:
    """How many rows are computed at a time.

    Args:
      block_m: in the forward pass.
      backward_block_m: in a gradient that computes the projections again.
    """

    block_m: int = 1024
    backward_block_m: int = 1024


def forward(
    x: jax.Array, *weights: jax.Array, cfg: GatedLinearUnitXlaConfig, **options: Any
) -> jax.Array:
    """The output; both projections exist for one block of rows only."""
    call = Arguments.of(x, *weights, **options)

    def block(x: jax.Array) -> tuple[jax.Array, None]:
        projected = _projections(dataclasses.replace(call, x=x))
        return gated(call.activation, *projected).astype(x.dtype), None

    out, _ = in_row_blocks(block, (call.x,), cfg.block_m, like=(call.weights, call.biases))
    return rows_like(x, out)


def forward_with_residuals(
    x: jax.Array, *weights: jax.Array, cfg: GatedLinearUnitXlaConfig, **options: Any
) -> tuple[jax.Array, Saved]:
    """The output and both projections, unless these are to be computed again."""
    call = Arguments.of(x, *weights, **options)
    if call.recompute:
        return forward(x, *weights, cfg=cfg, **options), None
    gate, up = _projections(call)
    out = gated(call.activation, gate, up).astype(x.dtype)
    return rows_like(x, out), (gate.astype(x.dtype), up.astype(x.dtype))


def backward(
    saved: Saved,
    out: None,
    dout: jax.Array,
    x: jax.Array,
    *weights: jax.Array,
    cfg: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """The gradients, from the projections of any implementation.

    Four plain products, and work by element that XLA fuses into what is around it: there is nothing
    left for a kernel to bring together, so TPU and GPU use this too.
    """
    call = Arguments.of(x, *weights, **options)
    wide = accumulation_dtype(x.dtype)

    def block(x: jax.Array, dout: jax.Array, saved: Saved) -> tuple[jax.Array, Any]:
        gate, up = saved or _projections(dataclasses.replace(call, x=x))
        gradients = gated_gradients(
            call.activation, gate.astype(wide), up.astype(wide), dout.astype(wide)
        )
        biased = zip(call.biases, gradients, strict=True)
        dbiases = [None if bias is None else jnp.sum(g, axis=0) for bias, g in biased]
        parts = gradients if len(weights) == 2 else [jnp.concatenate(gradients, axis=1)]
        parts = [part.astype(x.dtype) for part in parts]
        pairs = zip(parts, call.weights, strict=True)
        dx = sum(_dot(part, w, ((1,), (1,)), call.precision) for part, w in pairs)
        dweights = [_dot(x, part, ((0,), (0,)), call.precision) for part in parts]
        return jnp.asarray(dx).astype(x.dtype), (dweights, dbiases)

    rows = (call.x, dout.reshape(-1, dout.shape[-1]), saved)
    at_once = call.x.shape[0] if saved else cfg.backward_block_m
    dx, (dweights, dbiases) = in_row_blocks(block, rows, at_once, like=(call.weights, call.biases))
    named = zip(("b_gate", "b_up"), call.biases, dbiases, strict=True)
    by_keyword = {name: g.astype(bias.dtype) for name, bias, g in named if bias is not None}
    shaped = (g.reshape(w.shape).astype(w.dtype) for g, w in zip(dweights, weights, strict=True))
    return (dx.reshape(x.shape), *shaped, *([by_keyword] if by_keyword else []))


def rows_like(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of results with the leading axes of `x`."""
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def row_count(inv: Invocation[Any, Any]) -> int:
    """How many rows the `x` of a call has."""
    return math.prod(inv.args[0].shape[:-1])


def _projections(call: Arguments) -> tuple[jax.Array, jax.Array]:
    """``x @ w + b`` for the gate and for the other, in float32 (float64 for float64)."""
    products = [_dot(call.x, w, ((1,), (0,)), call.precision) for w in call.weights]
    gate, up = products if len(products) == 2 else jnp.split(products[0], 2, axis=1)
    b_gate, b_up = (b if b is None else b.astype(gate.dtype)[None, :] for b in call.biases)
    return gate if b_gate is None else gate + b_gate, up if b_up is None else up + b_up


def _dot(
    left: jax.Array,
    right: jax.Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    precision: lax.PrecisionLike,
) -> jax.Array:
    wide = accumulation_dtype(left.dtype)
    axes = (contracted, ((), ()))
    return lax.dot_general(left, right, axes, precision=precision, preferred_element_type=wide)


# Outputs that are computed at once, by the number of arrays that hold the weights.
_AT_ONCE = {1: 2**21, 2: 2**23 - 1}


def _heuristic(inv: Invocation[Any, Any]) -> GatedLinearUnitXlaConfig:
    """All rows at once, unless what XLA writes and reads again is too large (two Zen 3 cores).

    512 rows at a time took 0.78 to 0.99 of the time from 8 million outputs on, and 1.06 with 4 to 6
    million; with both weights in one array 0.74 to 0.96 from 4 million on.
    """
    rows, weights = row_count(inv), inv.args[1:]
    at_once = rows * width_of(weights) <= _AT_ONCE[len(weights)]
    return GatedLinearUnitXlaConfig(rows if at_once else 512)


def _space(inv: Invocation[Any, Any]) -> list[GatedLinearUnitXlaConfig]:
    rows, base = row_count(inv), _heuristic(inv)
    sizes = sorted({min(rows, size) for size in (128, 256, 512, 1024, rows)})
    ahead = [dataclasses.replace(base, block_m=size) for size in sizes]
    if not inv.kwargs.get("recompute"):
        return ahead
    return ahead + [dataclasses.replace(base, backward_block_m=size) for size in sizes]


XLA: Implementation[GatedLinearUnitXlaConfig, jax.Array] = Implementation(
    name="xla",
    config=GatedLinearUnitXlaConfig,
    heuristic=_heuristic,
    space=_space,
    limits=Limits({"block_m": COUNT, "backward_block_m": COUNT}),
    forward=forward,
    forward_with_residuals=forward_with_residuals,
    backward=backward,
    reads_out=False,
)
