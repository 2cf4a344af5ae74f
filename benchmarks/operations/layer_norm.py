"""`layer_norm` beside the formula as one would write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.operations import norms
from benchmarks.side_by_side import Call, Comparison
from ejkernel.modules import layer_norm
from ejkernel.modules.supported import kernel_of


def plain(x: Any, weight: Any, bias: Any) -> jax.Array:
    values = x.astype(jnp.float32)
    values = values - jnp.mean(values, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + 1e-5)
    return (values * scale * weight + bias).astype(x.dtype)


def comparisons() -> Iterator[Comparison]:
    return norms.comparisons(layer_norm, plain, weights=2)


def grid() -> Iterator[Call]:
    return norms.grid(
        kernel_of("layer_norm"),
        lambda features: {"eps": 1e-5, "bias": jax.ShapeDtypeStruct((features,), jnp.float32)},
    )
