"""Tune a small transformer offline: lower it, find its operations, tune them, run it tuned.

    make tune          (or: python examples/tune_transformer.py)

The model is a real one: embedding, two layers of attention and MLP, a loss that never holds all
logits at once, and its gradient. What is learned goes to the store: a second run measures nothing.
The last line but one says where the report is: open it in a browser.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from ejkernel import report
from ejkernel.modules import flash_attention
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Work,
    autotune_lowered,
    find_labels_in_lowered,
    set_default_executor,
)

# --- a kernel of our own -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LossConfig:
    rows: int  # tokens whose logits exist at the same time


class ChunkedCrossEntropy(Kernel[LossConfig, jax.Array]):
    """Mean cross-entropy of `hidden @ embedding.T` against `labels`, some rows at a time."""

    def __init__(self) -> None:
        super().__init__(name="chunked_cross_entropy")

    def run(self, hidden, embedding, labels, *, cfg):
        @jax.checkpoint  # logits are made again in the backward pass, not kept
        def chunk_loss(total, chunk):
            rows, wanted = chunk
            logits = rows @ embedding.T
            picked = jnp.take_along_axis(logits, wanted[:, None], axis=1)[:, 0]
            return total + jnp.sum(jax.nn.logsumexp(logits, axis=1) - picked), None

        chunks = (
            hidden.reshape(-1, cfg.rows, hidden.shape[-1]),
            labels.reshape(-1, cfg.rows),
        )
        total, _ = jax.lax.scan(chunk_loss, jnp.float32(0), chunks)
        return total / labels.size

    def heuristic_cfg(self, inv):
        return LossConfig(rows=min(128, inv.args[0].shape[0]))

    def candidate_cfgs(self, inv):
        tokens = inv.args[0].shape[0]
        return [LossConfig(rows) for rows in (64, 256, 512, 1024, 2048) if tokens % rows == 0]

    def work(self, inv):
        """The product that makes the logits, and one more for each gradient: for the report."""
        hidden, embedding, _ = inv.args
        return Work(flops=2 * hidden.size * embedding.shape[0] * (1 + len(inv.differentiated)))


chunked_cross_entropy = ChunkedCrossEntropy()

# --- the model -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int = 1
    length: int = 1024
    layers: int = 2
    heads: int = 4
    head_dim: int = 64
    vocabulary: int = 4096

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def initial_parameters(shape: Shape, key: jax.Array) -> dict:
    def weight(key, *size):
        return jax.random.normal(key, size) * size[0] ** -0.5

    keys = iter(jax.random.split(key, 1 + 4 * shape.layers))
    width = shape.width
    return {
        "embedding": weight(next(keys), shape.vocabulary, width),
        "layers": [
            {
                "qkv": weight(next(keys), width, 3 * width),
                "out": weight(next(keys), width, width),
                "up": weight(next(keys), width, 4 * width),
                "down": weight(next(keys), 4 * width, width),
            }
            for _ in range(shape.layers)
        ],
    }


def normalised(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(layer: dict, x: jax.Array, shape: Shape) -> jax.Array:
    batch, length, width = x.shape
    qkv = (normalised(x) @ layer["qkv"]).reshape(batch, length, 3, shape.heads, shape.head_dim)
    attended = flash_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], causal=True)
    x = x + attended.reshape(batch, length, width) @ layer["out"]
    return x + jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"]


def loss(parameters: dict, tokens: jax.Array, shape: Shape) -> jax.Array:
    x = parameters["embedding"][tokens[:, :-1]]
    for layer in parameters["layers"]:
        x = block(layer, x, shape)
    hidden = normalised(x).reshape(-1, shape.width)
    return chunked_cross_entropy(hidden, parameters["embedding"], tokens[:, 1:].reshape(-1))


# --- the main job --------------------------------------------------------------------------------


def report_event(event: str, **data) -> None:
    if event == "autotune_start":
        print(f"  tuning {data['op_id']} …", flush=True)
    elif event == "autotune_finish":
        print(f"    {data['outcome'].summary()}", flush=True)
    elif event == "cache_hit":
        print(f"  {data['op_id']}: in the store ({data['level']})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune a small transformer on this machine.")
    parser.add_argument("--length", type=int, default=Shape.length, help="sequence length")
    parser.add_argument(
        "--rounds", type=int, default=11, help="runs of the model, before and after"
    )
    parser.add_argument("--store", help="folder or URL of the store (default: the usual one)")
    parser.add_argument(
        "--report", default="tuning_report.html", help="file to write: .html, .md or .json"
    )
    options = parser.parse_args()
    start = time.perf_counter()

    # Before tuning nobody knows better than the heuristics; so says this executor.
    set_default_executor(Executor(ConfigSelectorChain(autotune=False)))

    shape = Shape(length=options.length)
    parameters = initial_parameters(shape, jax.random.key(0))
    tokens = jax.random.randint(
        jax.random.key(1), (shape.batch, shape.length + 1), 0, shape.vocabulary
    )
    step = jax.jit(jax.value_and_grad(lambda parameters, tokens: loss(parameters, tokens, shape)))

    lowered = step.lower(parameters, tokens)
    labels = find_labels_in_lowered(lowered)
    print(f"the lowered program holds {len(labels)} distinct operations of ours:")
    selector = ConfigSelectorChain(
        policy=AutotunePolicy(validate_backward=True),
        persistent=PersistentCache(options.store),
        on_event=report_event,
    )
    start_of_tuning = time.perf_counter()
    result = autotune_lowered(selector, lowered)
    seconds = time.perf_counter() - start_of_tuning
    print()
    print(result)
    print()

    model = report.before_and_after(
        step, (parameters, tokens), result=result, rounds=options.rounds, what="the whole model"
    )
    before, after = statistics.median(model.before), statistics.median(model.after)
    print("the whole model, forward and backward (median of interleaved runs):")
    print(f"  before  {before * 1e3:8.1f} ms")
    print(f"  after   {after * 1e3:8.1f} ms   speedup {model.gain.times:.2f}")

    run = report.Run.of(
        result,
        title=f"A transformer of {shape.layers} layers, {shape.length} tokens",
        seconds=seconds,
        store=selector.persistent,
        model=model,
        command=shlex.join(["python", *sys.argv]),
    )
    written = report.write(run, options.report)
    print(f"\nreport: {written.resolve().as_uri()}")
    print(f"store: {selector.persistent.path} ({time.perf_counter() - start:.1f} s in all)")


if __name__ == "__main__":
    main()
