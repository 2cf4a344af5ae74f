r"""The passes that all implementations share, around one function that projects and gates.

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
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation

from ..dot import dot
from ..dtypes import accumulation_dtype
from ..row_blocks import in_row_blocks
from .activations import gated
from .arguments import Arguments

Project = Callable[[Arguments, Any, bool], tuple[jax.Array, ...]]
"""`project(call, cfg, save)`: the output, and with `save` both projections in the dtype of `x`."""

Saved = tuple[jax.Array, jax.Array] | None
"""Both projections; None: they are computed again."""


def passes_of(project: Project) -> dict[str, Any]:
    """What an `Implementation` wants to know about its passes."""

    def forward(x: jax.Array, *weights: jax.Array, cfg: Any, **options: Any) -> jax.Array:
        (out,) = project(Arguments.of(x, *weights, **options), cfg, False)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def forward_with_residuals(
        x: jax.Array, *weights: jax.Array, cfg: Any, **options: Any
    ) -> tuple[jax.Array, Saved]:
        call = Arguments.of(x, *weights, **options)
        out, *saved = project(call, cfg, not call.recompute)
        return out.reshape(*x.shape[:-1], out.shape[-1]), (saved[0], saved[1]) if saved else None

    return {
        "forward": forward,
        "forward_with_residuals": forward_with_residuals,
        "backward": backward,
        "reads_out": False,
    }


def backward(
    saved: Saved, out: None, dout: jax.Array, x: jax.Array, *weights: Any, cfg: Any, **options: Any
) -> tuple[Any, ...]:
    """The gradients, from the projections of any implementation.

    Four plain products, and work by element that XLA fuses into what is around it: there is nothing
    left for a kernel to bring together, so TPU and GPU use this too.
    """
    call = Arguments.of(x, *weights, **options)
    wide = accumulation_dtype(x.dtype)

    def block(x: jax.Array, dout: jax.Array, saved: Saved) -> tuple[jax.Array, Any]:
        gate, up = saved or projections(dataclasses.replace(call, x=x))
        _, pull_back = jax.vjp(partial(gated, call.activation), gate.astype(wide), up.astype(wide))
        gradients = pull_back(dout.astype(wide))
        biased = zip(call.biases, gradients, strict=True)
        dbiases = [None if bias is None else jnp.sum(g, axis=0) for bias, g in biased]
        parts = gradients if len(weights) == 2 else [jnp.concatenate(gradients, axis=1)]
        parts = [part.astype(x.dtype) for part in parts]
        pairs = zip(parts, call.weights, strict=True)
        dx = sum(_dot(call, part, w, (1, 1)) for part, w in pairs)
        dweights = [_dot(call, x, part, (0, 0)) for part in parts]
        return jnp.asarray(dx).astype(x.dtype), (dweights, dbiases)

    rows = (call.x, dout.reshape(-1, dout.shape[-1]), saved)
    at_once = call.x.shape[0] if saved else cfg.backward_block_m
    dx, (dweights, dbiases) = in_row_blocks(block, rows, at_once, like=(call.weights, call.biases))
    named = zip(("b_gate", "b_up"), call.biases, dbiases, strict=True)
    by_keyword = {name: g.astype(bias.dtype) for name, bias, g in named if bias is not None}
    shaped = (g.reshape(w.shape).astype(w.dtype) for g, w in zip(dweights, weights, strict=True))
    return (dx.reshape(x.shape), *shaped, *([by_keyword] if by_keyword else []))


def row_count(inv: Invocation[Any, Any]) -> int:
    """How many rows the `x` of a call has."""
    return math.prod(inv.args[0].shape[:-1])


def projections(call: Arguments) -> tuple[jax.Array, jax.Array]:
    """``x @ w + b`` for the gate and for the other, in float32 (float64 for float64)."""
    products = [_dot(call, call.x, w, (1, 0)) for w in call.weights]
    gate, up = products if len(products) == 2 else jnp.split(products[0], 2, axis=1)
    b_gate, b_up = (b if b is None else b.astype(gate.dtype)[None, :] for b in call.biases)
    return gate if b_gate is None else gate + b_gate, up if b_up is None else up + b_up


def _dot(call: Arguments, left: jax.Array, right: jax.Array, summed: tuple[int, int]) -> jax.Array:
    """The product in the precision of a call, and in the dtype that sums are kept in."""
    wide = accumulation_dtype(left.dtype)
    return dot(left, right, summed, dtype=wide, precision=call.precision)
