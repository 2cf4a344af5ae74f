"""The gated linear unit written the obvious way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype
from ..promotion import usual_promotion

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: (
        0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    ),
    "relu": lambda x: jnp.maximum(x, 0.0),
    "sigmoid": jax.nn.sigmoid,
    "identity": lambda x: x,
}
"""By name; each works element by element, on any device, inside kernels too."""


@usual_promotion
def gated_linear_unit_reference(
    x: jax.Array, *weights: Any, activation: str, b_gate: Any = None, b_up: Any = None, **_: Any
) -> jax.Array:
    r"""Two projections, of which one gates the other.

    .. math::
        \mathrm{out} = f(x W_\mathrm{gate} + b_\mathrm{gate}) \odot
            (x W_\mathrm{up} + b_\mathrm{up})

    Arguments are those of :class:`.kernel.GatedLinearUnit`. ``precision`` and ``recompute`` are not
    used: this is as exact as float32 (or float64) is, and JAX differentiates it.

    >>> x, w = jnp.array([[1.0]]), jnp.array([[2.0]])
    >>> gated_linear_unit_reference(x, w, 3 * w, activation="relu").tolist()
    [[12.0]]
    """
    wide = accumulation_dtype(x.dtype)
    if len(weights) == 1:
        weights = tuple(jnp.split(weights[0].reshape(weights[0].shape[0], -1), 2, axis=1))
    gate, up = (jnp.dot(x.astype(wide), w.astype(wide), precision="highest") for w in weights)
    gate = gate if b_gate is None else gate + b_gate.astype(wide)
    up = up if b_up is None else up + b_up.astype(wide)
    return (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
