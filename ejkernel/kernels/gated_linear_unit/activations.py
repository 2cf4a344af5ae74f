"""The functions that a gate may go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp


def _gelu(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1.0 + jax.lax.erf(x * 0.5**0.5))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": lambda x: x * jax.nn.sigmoid(x),
        "gelu": _gelu,
        "gelu_tanh": _gelu_tanh,
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


def gated_gradients(
    activation: str, gate: jax.Array, up: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of ``gate`` and ``up``."""
    _, pull_back = jax.vjp(lambda gate, up: gated(activation, gate, up), gate, up)
    dgate, dup = pull_back(dout)
    return dgate, dup
