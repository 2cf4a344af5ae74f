"""Tune the training step of a small transformer: one call, and what it was worth.

    make tune          (or: python examples/tune_transformer.py)

The model is a real one: embedding, two layers of attention and MLP, a loss over a large vocabulary,
its gradient, and an update of the parameters. It is written twice, with ejkernel's operations and
in plain JAX; the last line says how much faster the first is than the second, and than itself with
default configs. What is learned goes to the store: a second run measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel.modules import flash_attention, gated_linear_unit, linear_cross_entropy, rms_norm

# --- the same operations twice -------------------------------------------------------------------


def plain_norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def plain_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def plain_mlp(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


def plain_loss(hidden, embedding, labels):
    logits = jax.nn.log_softmax(hidden @ embedding.T)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


class Operations(NamedTuple):
    norm: Callable[..., jax.Array]
    attention: Callable[..., jax.Array]
    mlp: Callable[..., jax.Array]
    loss: Callable[..., jax.Array]


PLAIN = Operations(plain_norm, plain_attention, plain_mlp, plain_loss)
OURS = Operations(
    rms_norm,
    functools.partial(flash_attention, causal=True),
    gated_linear_unit,
    functools.partial(linear_cross_entropy, vocab_first=True),
)

# --- the model -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int = 1
    length: int = 2048
    layers: int = 2
    heads: int = 4
    head_dim: int = 64
    vocabulary: int = 4096

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def initial_parameters(shape: Shape, key: jax.Array) -> dict:
    def weight(*size):
        return jax.random.normal(next(keys), size) * size[0] ** -0.5

    keys = iter(jax.random.split(key, 1 + 5 * shape.layers))
    width = shape.width
    return {
        "embedding": weight(shape.vocabulary, width),
        "layers": [
            {
                "norms": jnp.ones((2, width)),
                "qkv": weight(width, 3 * width),
                "out": weight(width, width),
                "gate": weight(width, 2 * width),
                "up": weight(width, 2 * width),
                "down": weight(2 * width, width),
            }
            for _ in range(shape.layers)
        ],
        "norm": jnp.ones(width),
    }


def loss(use: Operations, shape: Shape, parameters: dict, tokens: jax.Array) -> jax.Array:
    x = parameters["embedding"][tokens[:, :-1]]
    heads = (*x.shape[:2], 3, shape.heads, shape.head_dim)
    for layer in parameters["layers"]:
        qkv = (use.norm(x, layer["norms"][0]) @ layer["qkv"]).reshape(heads)
        attended = use.attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + attended.reshape(x.shape) @ layer["out"]
        x = x + use.mlp(use.norm(x, layer["norms"][1]), layer["gate"], layer["up"]) @ layer["down"]
    hidden = use.norm(x, parameters["norm"]).reshape(-1, shape.width)
    return use.loss(hidden, parameters["embedding"], tokens[:, 1:].reshape(-1))


def train_step(use: Operations, shape: Shape) -> Callable[..., tuple[jax.Array, dict]]:
    @jax.jit
    def step(parameters: dict, tokens: jax.Array) -> tuple[jax.Array, dict]:
        value, gradients = jax.value_and_grad(functools.partial(loss, use, shape))(
            parameters, tokens
        )
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)

    return step


# --- the main job --------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune a small transformer on this machine.")
    parser.add_argument("--length", type=int, default=Shape.length, help="sequence length")
    parser.add_argument("--store", help="folder or URL of the store (default: the usual one)")
    parser.add_argument("--force", action="store_true", help="measure again what is stored")
    parser.add_argument(
        "--report", default="tuning_report.html", help="file to write: .html, .md or .json"
    )
    options = parser.parse_args()
    start = time.perf_counter()

    shape = Shape(length=options.length)
    parameters = initial_parameters(shape, jax.random.key(0))
    size = (shape.batch, shape.length + 1)
    tokens = jax.random.randint(jax.random.key(1), size, 0, shape.vocabulary)
    result = ejkernel.tune(
        train_step(OURS, shape),
        parameters,
        tokens,
        against=train_step(PLAIN, shape),
        effort="quick",
        seconds=60,
        store=options.store,
        force=options.force,
    )
    page = result.report(options.report)
    print(f"\nreport: {page.resolve().as_uri()}")
    print(f"store: {result.run.store} ({time.perf_counter() - start:.0f} s in all)")
    print(result.verdict)


if __name__ == "__main__":
    main()
