"""What the benchmarks of `rms_norm` and `layer_norm` have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.side_by_side import Call, Comparison

# (rows, features): one token, a small batch, and what training steps have.
SIZES = (
    (1, 1024),
    (16, 256),
    (128, 1024),
    (1024, 256),
    (1024, 1024),
    (4096, 768),
    (4096, 1024),
    (2048, 4096),
    (4096, 4096),
    (16384, 1024),
)


def arrays(rows: int, features: int, dtype: str, weights: int) -> tuple[jax.Array, ...]:
    """The input, a gradient of the output, and the weights of the features."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (rows, features), dtype)
    dout = jax.random.normal(keys[1], (rows, features), dtype)
    return (x, dout, *(jax.random.normal(key, (features,)) for key in keys[2 : 2 + weights]))


def forward(function: Callable[..., Any], x: Any, dout: Any, *weights: Any) -> Any:
    del dout
    return function(x, *weights)


def forward_and_backward(function: Callable[..., Any], x: Any, dout: Any, *weights: Any) -> Any:
    out, pull_back = jax.vjp(function, x, *weights)
    return out, pull_back(dout)


def comparisons(
    ours: Callable[..., Any], plain: Callable[..., Any], weights: int
) -> Iterator[Comparison]:
    """Both passes over all sizes, against the formula as one would write it."""
    for dtype in ("float32", "bfloat16"):
        for rows, features in SIZES:
            for name, both in (
                ("forward", forward),
                ("forward+backward", forward_and_backward),
            ):
                yield Comparison(
                    name=f"{name} {rows}x{features} {dtype}",
                    ours=partial(both, ours),
                    peers={"plain jax": partial(both, plain)},
                    arguments=partial(arrays, rows, features, dtype, weights),
                    # Forward the programs are the same, and small ones differ by a few percent.
                    limits={"plain jax": 1.0},
                    tolerance=1e-4 if dtype == "float32" else 3e-2,
                )


def grid(kernel: Any, keywords: Callable[[int], dict[str, Any]]) -> Iterator[Call]:
    """Calls over rows and features, the weight by position."""
    for features in (128, 512, 768, 1024, 2048, 4096):
        for rows in (16, 128, 512, 2048, 4096, 8192):
            if rows * features > 2**24:
                continue
            x = jax.ShapeDtypeStruct((rows, features), jnp.float32)
            weight = jax.ShapeDtypeStruct((features,), jnp.float32)
            yield Call(f"{rows}x{features}", kernel, (x, weight), keywords(features))
