"""`linear_cross_entropy` beside the loss with all logits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.side_by_side import Call, Comparison
from ejkernel.modules import linear_cross_entropy
from ejkernel.modules.supported import kernel_of

# (rows, features, vocabulary); the last one needs 4 GiB for the plain loss, and minutes.
SIZES = (
    (64, 256, 32_000),
    (256, 512, 8_192),
    (1024, 512, 16_384),
    (512, 1024, 50_257),
    (2048, 768, 32_000),
    (4096, 1024, 131_072),
)


def plain(hidden: Any, weight: Any, labels: Any) -> jax.Array:
    logits = hidden @ weight
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def arrays(rows: int, features: int, vocab: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (rows, features)),
        jax.random.normal(keys[1], (features, vocab)) * features**-0.5,
        jax.random.randint(keys[2], (rows,), 0, vocab),
    )


def comparisons() -> Iterator[Comparison]:
    for rows, features, vocab in SIZES:
        size = f"{rows}x{features}x{vocab} float32"
        arguments = partial(arrays, rows, features, vocab)
        yield Comparison(
            name=f"forward {size}",
            ours=linear_cross_entropy,
            peers={"plain jax": plain},
            arguments=arguments,
            limits={"plain jax": 1.1},
        )
        yield Comparison(
            name=f"forward+backward {size}",
            ours=jax.value_and_grad(linear_cross_entropy, (0, 1)),
            peers={"plain jax": jax.value_and_grad(plain, (0, 1))},
            arguments=arguments,
            limits={"plain jax": 1.1},
            # With fewer rows a chunk of them is all there is.
            memory_limit={"plain jax": 0.1} if rows >= 4096 else {},
        )


def grid() -> Iterator[Call]:
    kernel = kernel_of("linear_cross_entropy")
    for vocab in (1_000, 4_096, 10_000, 32_000):
        for features in (64, 256, 512):
            for rows in (32, 256, 1024):
                hidden = jax.ShapeDtypeStruct((rows, features), jnp.float32)
                weight = jax.ShapeDtypeStruct((features, vocab), jnp.float32)
                labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
                yield Call(
                    f"{rows}x{features}x{vocab}",
                    kernel,
                    (hidden, weight, labels),
                    {"ignore_index": -100, "reduction": "mean"},
                )
