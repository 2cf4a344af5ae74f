"""The functions that a gate may go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": lambda x: x * jax.nn.sigmoid(x),
        "gelu": lambda x: 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5)),
        "gelu_tanh": lambda x: (
            0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
        ),
        "relu": lambda x: jnp.maximum(x, 0.0),
        "sigmoid": jax.nn.sigmoid,
        "identity": lambda x: x,
    }
)
"""By name; each works element by element, on any device, inside kernels too."""


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """``activation(gate) * up``.

    >>> gated("relu", jnp.array([-1.0, 2.0]), jnp.array([3.0, 4.0])).tolist()
    [0.0, 8.0]
    """
    return ACTIVATIONS[activation](gate) * up
