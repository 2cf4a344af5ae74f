"""`grouped_matmul` beside `jax.lax.ragged_dot` and a dense product of as many rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.side_by_side import Call, Comparison
from ejkernel.modules import grouped_matmul
from ejkernel.modules.grouped_matmul import _kernel

# m, k, n, groups: decoding, one group, few groups, layers of small mixtures of experts
SIZES = (
    (8, 512, 1024, 8),
    (16, 1024, 1024, 32),
    (64, 512, 512, 8),
    (256, 256, 512, 1),
    (512, 512, 512, 2),
    (1000, 384, 640, 5),
    (1024, 512, 1024, 8),
    (2048, 512, 1024, 16),
    (4096, 256, 512, 64),
)


def arguments(m: int, k: int, n: int, groups: int, dtype: Any, *, backward: bool) -> Any:
    numbers = np.random.default_rng(m + groups)
    sizes = numbers.multinomial(m, numbers.dirichlet(np.full(groups, 2.0)))
    lhs, rhs = numbers.standard_normal((m, k)), numbers.standard_normal((groups, k, n)) / k**0.5
    arrays = [jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype), jnp.asarray(sizes, jnp.int32)]
    if backward:
        arrays.append(jnp.asarray(numbers.standard_normal((m, n)), dtype))
    return tuple(arrays)


def with_gradients(function: Any, lhs: Any, rhs: Any, sizes: Any, dout: Any) -> Any:
    out, pull_back = jax.vjp(lambda lhs, rhs: function(lhs, rhs, sizes), lhs, rhs)
    return out, *pull_back(dout)


def comparisons() -> Iterator[Comparison]:
    for dtype in (jnp.float32, jnp.bfloat16):
        for m, k, n, groups in SIZES if dtype == jnp.float32 else SIZES[6:7]:
            size = f"{m}x{k}x{n}, {groups} groups, {jnp.dtype(dtype).name}"
            make = partial(arguments, m, k, n, groups, dtype)
            tolerance = 1e-4 if dtype == jnp.float32 else 3e-2
            yield Comparison(
                f"forward {size}",
                grouped_matmul,
                {"ragged_dot": jax.lax.ragged_dot},
                partial(make, backward=False),
                {"ragged_dot": 1.0},
                tolerance,
            )
            yield Comparison(
                f"forward+backward {size}",
                partial(with_gradients, grouped_matmul),
                {"ragged_dot": partial(with_gradients, jax.lax.ragged_dot)},
                partial(make, backward=True),
                {"ragged_dot": 1.0},
                tolerance,
            )


def grid() -> Iterator[Call]:
    for m in (16, 128, 512, 2048):
        for k, n in ((128, 512), (512, 128), (256, 1024), (512, 512)):
            for groups in (4, 16):
                shapes = ((m, k), (groups, k, n))
                arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
                sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
                yield Call(f"{m}x{k}x{n}, {groups} groups", _kernel, (*arrays, sizes))
