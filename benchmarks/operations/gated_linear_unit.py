"""`gated_linear_unit` beside the plain formulation in JAX."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.side_by_side import Call, Comparison
from ejkernel.modules import gated_linear_unit
from ejkernel.modules.gated_linear_unit import _kernel

# m, k, n: decoding, and layers of small models
SIZES = (
    (1, 512, 1536),
    (16, 512, 1536),
    (128, 256, 1024),
    (512, 512, 1536),
    (1000, 384, 1000),
    (2048, 512, 2048),
    (4096, 512, 1408),
)


LIMIT = {"plain jax": 1.0}


def plain(x: Any, w_gate: Any, w_up: Any) -> Any:
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def plain_stacked(x: Any, w: Any) -> Any:
    gate, up = jnp.split(x @ w, 2, axis=-1)
    return jax.nn.silu(gate) * up


def arguments(m: int, k: int, n: int, *, stacked: bool = False, backward: bool = False) -> Any:
    numbers = np.random.default_rng(m + k)
    weights = [(k, 2 * n)] if stacked else [(k, n), (k, n)]
    shapes = [(m, k), *weights, *([(m, n)] if backward else [])]
    scales = [1.0, *(k**-0.5 for _ in weights), 1.0]
    return tuple(
        jnp.asarray(scale * numbers.standard_normal(shape), jnp.float32)
        for shape, scale in zip(shapes, scales, strict=False)
    )


def with_gradients(function: Any, *arrays: Any) -> Any:
    *primals, dout = arrays
    out, pull_back = jax.vjp(function, *primals)
    return out, *pull_back(dout)


def comparisons() -> Iterator[Comparison]:
    for m, k, n in SIZES:
        for stacked, peer in ((False, plain), (True, plain_stacked)):
            size = f"{m}x{k}x{n}{', stacked' if stacked else ''}"
            make = partial(arguments, m, k, n, stacked=stacked)
            yield Comparison(f"forward {size}", gated_linear_unit, {"plain jax": peer}, make, LIMIT)
            yield Comparison(
                f"forward+backward {size}",
                partial(with_gradients, gated_linear_unit),
                {"plain jax": partial(with_gradients, peer)},
                partial(make, backward=True),
                LIMIT,
            )
    m, k, n = 4096, 256, 1024
    yield Comparison(
        f"forward+backward {m}x{k}x{n}, recompute",
        partial(with_gradients, partial(gated_linear_unit, recompute=True)),
        {"plain jax": partial(with_gradients, plain)},
        partial(arguments, m, k, n, backward=True),
        memory_limit={"plain jax": 0.4},
    )


def grid() -> Iterator[Call]:
    for m in (1, 16, 128, 512, 1024, 2048, 4096):
        for k, n in ((128, 512), (256, 1024), (512, 1408), (384, 1000), (512, 256)):
            shapes = ((m, k), (k, n), (k, n))
            arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
            yield Call(f"{m}x{k}x{n}", _kernel, arrays, {"activation": "silu"})
