"""One small call of every operation, for tests that walk all of them.

`call(name)` gives a function of floating arrays alone and those arrays, so that it can be
differentiated, exported and lowered like any other. An operation that is not here fails the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import modules

BATCH, LENGTH = 2, 12


def arrays_of(name: str, dtype: Any = "float32", batch: int = BATCH) -> tuple[jax.Array, ...]:
    """The floating arrays of an operation's call."""
    random = np.random.default_rng(list(modules.OPERATIONS).index(name))

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), dtype)

    if name == "flash_attention":
        # 48 rows per key head: enough for the C++ kernel to serve the call.
        return normal(batch, 24, 4, 8), normal(batch, LENGTH, 2, 8), normal(batch, LENGTH, 2, 8)
    if name == "paged_attention":
        return normal(batch, 2, 4, 8), normal(5, 4, 2, 8), normal(5, 4, 2, 8)
    if name == "ragged_paged_attention":
        return normal(batch * 3, 4, 8), normal(5, 4, 2, 8), normal(5, 4, 2, 8)
    if name == "grouped_matmul":
        return normal(batch * 6, 4), normal(3, 4, 5)
    if name == "rms_norm":
        return normal(batch, 5, 8), normal(8)
    if name == "layer_norm":
        return normal(batch, 5, 8), normal(8), normal(8)
    if name == "linear_cross_entropy":
        return normal(batch, 5, 8), normal(8, 11)
    if name == "gated_linear_attention":
        decay = -jnp.abs(normal(batch, LENGTH, 2, 4))
        return (*(normal(batch, LENGTH, 2, 4) for _ in range(3)), decay)
    if name == "gated_linear_unit":
        return normal(batch, 3, 6), normal(6, 8), normal(6, 8)
    raise AssertionError(f"{name} has no call here: add one")


def function_of(name: str, **options: Any) -> Callable[..., Any]:
    """The operation as a function of the arrays of `arrays_of`, with these keywords."""
    operation = getattr(modules, name)

    def function(*arrays: Any) -> Any:
        batch = arrays[0].shape[0]
        if name == "flash_attention":
            return operation(*arrays, causal=True, **options)
        if name == "paged_attention":
            table = jnp.tile(jnp.array([[3, 1]], jnp.int32), (batch, 1))
            lengths = jnp.full((batch,), 6, jnp.int32)
            return operation(*arrays, table, lengths, **options)
        if name == "ragged_paged_attention":
            table, lengths = jnp.array([[3, 1], [0, 2]], jnp.int32), jnp.array([6, 5], jnp.int32)
            starts = jnp.array([0, 4, 5], jnp.int32)
            return operation(*arrays, table, lengths, starts, **options)
        if name == "grouped_matmul":
            return operation(*arrays, jnp.array([5, 0, 6], jnp.int32), **options)
        if name == "layer_norm":
            return operation(*arrays, **options)
        if name == "linear_cross_entropy":
            labels = jnp.arange(arrays[0].shape[1], dtype=jnp.int32)
            return operation(*arrays, jnp.tile(labels, (batch, 1)), **options)
        return operation(*arrays, **options)

    function.__name__ = name
    return function


def loss_of(name: str, **options: Any) -> Callable[..., Any]:
    """A number that depends on every output of the call, each in its own way."""
    function = function_of(name, **options)

    def loss(*arrays: Any) -> Any:
        out = function(*arrays)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(jnp.sin(out) * weights)

    return loss
