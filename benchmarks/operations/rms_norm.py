"""`rms_norm` beside the formula as one would write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.operations import norms
from benchmarks.side_by_side import Call, Comparison
from ejkernel.modules import rms_norm
from ejkernel.modules.supported import kernel_of


def plain(x: Any, weight: Any) -> jax.Array:
    values = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + 1e-6)
    return (values * scale * weight).astype(x.dtype)


def comparisons() -> Iterator[Comparison]:
    return norms.comparisons(rms_norm, plain, weights=1)


def grid() -> Iterator[Call]:
    return norms.grid(kernel_of("rms_norm"), lambda features: {"eps": 1e-6})
