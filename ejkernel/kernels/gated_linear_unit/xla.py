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

Weights are one or two arrays: ``(k, 2 n)``, or ``(k, n)`` twice. One is never cut into two: that
would copy it, which for few rows takes longer than the product.

Example:
    >>> import jax.numpy as jnp
    >>> x, weights = jnp.ones((5, 3)), (jnp.ones((3, 2)), jnp.ones((3, 2)))
    >>> forward(x, weights, (None, None), activation="relu", rows=2)[0].tolist()
    [9.0, 9.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.core.varying import vary_alike

from ..dtypes import accumulation_dtype
from ..slicing import put_in_dim, take_in_dim
from .activations import gated, gated_gradients

Weights: TypeAlias = tuple[jax.Array, ...]
Biases: TypeAlias = tuple[jax.Array | None, jax.Array | None]


class Gradients(NamedTuple):
    """Of the inputs; each weight and bias has its own."""

    x: jax.Array
    weights: Weights
    biases: Biases


def forward(
    x: jax.Array,
    weights: Weights,
    biases: Biases,
    *,
    activation: str,
    rows: int,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """The output ``(m, n)``, ``rows`` rows at a time: both projections exist only so far."""

    def block(x: jax.Array) -> jax.Array:
        return gated(activation, *projections(x, weights, biases, precision)).astype(x.dtype)

    if rows >= x.shape[0]:
        return block(x)

    def add(first: jax.Array, out: jax.Array) -> jax.Array:
        at, _ = _block_at(first, rows, x.shape[0])
        tile = block(take_in_dim(x, at, rows))
        return put_in_dim(out, tile, at)

    empty = jnp.zeros((x.shape[0], width_of(weights)), x.dtype)
    out: jax.Array = _over_blocks(x.shape[0], rows, add, vary_alike(empty, x, weights, biases))
    return out


def forward_and_projections(
    x: jax.Array,
    weights: Weights,
    biases: Biases,
    *,
    activation: str,
    precision: lax.PrecisionLike = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The output, and what :func:`backward` needs beside the inputs, in the dtype of ``x``."""
    gate, up = projections(x, weights, biases, precision)
    out = gated(activation, gate, up).astype(x.dtype)
    return out, (gate.astype(x.dtype), up.astype(x.dtype))


def backward(
    x: jax.Array,
    weights: Weights,
    biases: Biases,
    dout: jax.Array,
    *,
    saved: tuple[jax.Array, jax.Array] | None,
    activation: str,
    rows: int,
    precision: lax.PrecisionLike = None,
) -> Gradients:
    """The gradients; without ``saved`` projections they are computed again, ``rows`` at a time."""

    def block(
        x: jax.Array, dout: jax.Array, saved: tuple[jax.Array, jax.Array] | None
    ) -> Gradients:
        gate, up = projections(x, weights, biases, precision) if saved is None else saved
        wide = accumulation_dtype(x.dtype)
        dgate, dup = gated_gradients(
            activation, gate.astype(wide), up.astype(wide), dout.astype(wide)
        )
        return _pull_back(x, weights, biases, dgate, dup, precision)

    if saved is not None or rows >= x.shape[0]:
        return _in_dtypes_of(block(x, dout, saved), x, weights, biases)

    def add(first: jax.Array, sums: Gradients) -> Gradients:
        at, mine = _block_at(first, rows, x.shape[0])
        # Rows that the last block shares with the one before have been added already. Their
        # gradients are linear in dout.
        dout_block = jnp.where(mine, take_in_dim(dout, at, rows), 0)
        new = block(take_in_dim(x, at, rows), dout_block, None)
        before = take_in_dim(sums.x, at, rows)
        dx = jnp.where(mine, new.x.astype(x.dtype), before)
        return Gradients(
            put_in_dim(sums.x, dx, at),
            *jax.tree.map(jnp.add, sums[1:], new[1:]),
        )

    start: Gradients = jax.tree.map(
        lambda like: jnp.zeros(like.shape, like.dtype),
        jax.eval_shape(lambda: block(x[:rows], dout[:rows], None)),
    )
    start = vary_alike(start._replace(x=jnp.zeros_like(x)), dout, weights, biases)
    return _in_dtypes_of(_over_blocks(x.shape[0], rows, add, start), x, weights, biases)


def projections(
    x: jax.Array, weights: Weights, biases: Biases, precision: lax.PrecisionLike
) -> tuple[jax.Array, jax.Array]:
    """``x @ w + b`` for the gate and for the other, in float32 (float64 for float64)."""
    products = [_dot(x, w, ((1,), (0,)), precision) for w in weights]
    gate, up = products if len(products) == 2 else jnp.split(products[0], 2, axis=1)
    b_gate, b_up = biases
    return (
        gate if b_gate is None else gate + b_gate.astype(gate.dtype)[None, :],
        up if b_up is None else up + b_up.astype(up.dtype)[None, :],
    )


def width_of(weights: Weights) -> int:
    """Columns of the output."""
    columns = math.prod(weights[0].shape[1:])
    return columns if len(weights) == 2 else columns // 2


def _pull_back(
    x: jax.Array,
    weights: Weights,
    biases: Biases,
    dgate: jax.Array,
    dup: jax.Array,
    precision: lax.PrecisionLike,
) -> Gradients:
    dbiases = tuple(
        None if bias is None else jnp.sum(gradient, axis=0)
        for bias, gradient in zip(biases, (dgate, dup), strict=True)
    )
    parts = [dgate, dup] if len(weights) == 2 else [jnp.concatenate([dgate, dup], axis=1)]
    parts = [part.astype(x.dtype) for part in parts]
    dx = sum(_dot(part, w, ((1,), (1,)), precision) for part, w in zip(parts, weights, strict=True))
    dweights = tuple(_dot(x, part, ((0,), (0,)), precision) for part in parts)
    return Gradients(jnp.asarray(dx), dweights, (dbiases[0], dbiases[1]))


def _in_dtypes_of(
    gradients: Gradients, x: jax.Array, weights: Weights, biases: Biases
) -> Gradients:
    cast: Gradients = jax.tree.map(
        lambda gradient, like: gradient.astype(like.dtype),
        gradients,
        Gradients(x, weights, biases),
    )
    return cast


def _over_blocks(
    total_rows: int, rows: int, add: Callable[[jax.Array, Any], Any], state: Any
) -> Any:
    blocks = -(-total_rows // rows)
    return lax.fori_loop(0, blocks, lambda i, state: add(i * rows, state), state)


def _block_at(first: jax.Array, rows: int, total_rows: int) -> tuple[jax.Array, jax.Array]:
    """Where a block is read, and which of its rows are not those of the block before.

    The last block begins early rather than reach beyond the end.
    """
    at = jnp.minimum(first, total_rows - rows)
    return at, (at + jnp.arange(rows))[:, None] >= first


def _dot(
    left: jax.Array,
    right: jax.Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    precision: lax.PrecisionLike,
) -> jax.Array:
    return lax.dot_general(
        left,
        right,
        (contracted, ((), ())),
        precision=precision,
        preferred_element_type=accumulation_dtype(left.dtype),
    )
