"""Train a small transformer (Flax NNX) on the CPU, untuned and tuned: the same loss, sooner.

    pip install '.[examples]'
    python examples/train_transformer.py

Its attention, its norms and its loss are ejkernel's. The first training runs with heuristic
configs; then the operations of its training step are tuned, and the same training runs again.
Tuning changes how fast a step is, not what it computes: the losses have to agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ejkernel.modules import flash_attention, linear_cross_entropy, rms_norm
from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    autotune_lowered,
    set_default_executor,
)


@dataclasses.dataclass(frozen=True)
class Settings:
    batch: int = 4
    length: int = 256
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    vocabulary: int = 512
    steps: int = 60
    learning_rate: float = 3e-3

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


# --- the model -----------------------------------------------------------------------------------


class Norm(nnx.Module):
    def __init__(self, width: int):
        self.weight = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...])


class Block(nnx.Module):
    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        width = settings.width
        self.settings = settings
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        heads = (batch, length, 3, self.settings.heads, self.settings.head_dim)
        q, k, v = jnp.moveaxis(self.qkv(self.attention_norm(x)).reshape(heads), 2, 0)
        attended = flash_attention(q, k, v, causal=True).reshape(batch, length, width)
        x = x + self.out(attended)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(settings.vocabulary, settings.width, rngs=rngs)
        self.positions = nnx.Embed(settings.length, settings.width, rngs=rngs)
        self.blocks = nnx.List([Block(settings, rngs) for _ in range(settings.layers)])
        self.norm = Norm(settings.width)

    def loss(self, tokens: jax.Array) -> jax.Array:
        """Mean cross entropy of every next token; its logits are never in memory."""
        x = self.embedding(tokens[:, :-1]) + self.positions(jnp.arange(tokens.shape[1] - 1))
        for block in self.blocks:
            x = block(x)
        table = self.embedding.embedding[...]
        return linear_cross_entropy(self.norm(x), table, tokens[:, 1:], vocab_first=True)


# --- training ------------------------------------------------------------------------------------


def batches(settings: Settings) -> np.ndarray:
    """Sentences of a small language: every word may be followed by four others.

    A model that knows it has a loss of log 4; one that knows nothing, of log vocabulary.
    """
    random = np.random.default_rng(0)
    followers = random.integers(0, settings.vocabulary, (settings.vocabulary, 4))
    shape = (settings.steps, settings.batch, settings.length + 1)
    tokens = np.empty(shape, np.int32)
    tokens[..., 0] = random.integers(0, settings.vocabulary, shape[:2])
    choices = random.integers(0, 4, shape)
    for position in range(settings.length):
        tokens[..., position + 1] = followers[tokens[..., position], choices[..., position]]
    return tokens


class Training:
    """A jitted training step, and where it begins."""

    def __init__(self, settings: Settings):
        self.data = batches(settings)
        model = Transformer(settings, nnx.Rngs(0))
        definition, self.parameters = nnx.split(model, nnx.Param)
        optimizer = optax.adam(settings.learning_rate)
        self.optimizer_state = optimizer.init(self.parameters)

        def step(parameters, optimizer_state, tokens):
            def loss(parameters):
                return nnx.merge(definition, parameters).loss(tokens)

            value, gradients = jax.value_and_grad(loss)(parameters)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state)
            return optax.apply_updates(parameters, updates), optimizer_state, value

        self.step = jax.jit(step)

    def lower(self) -> jax.stages.Lowered:
        return self.step.lower(self.parameters, self.optimizer_state, self.data[0])

    def run(self, name: str) -> np.ndarray:
        """Train from the beginning; the loss of every step."""
        parameters, optimizer_state, losses = self.parameters, self.optimizer_state, []
        start = time.perf_counter()
        for number, tokens in enumerate(self.data):
            parameters, optimizer_state, loss = self.step(parameters, optimizer_state, tokens)
            losses.append(float(loss))
            if number == 0:  # the first step was compiled too
                start = time.perf_counter()
        per_step = 1e3 * (time.perf_counter() - start) / max(1, len(losses) - 1)
        print(
            f"{name:8}  loss {losses[0]:.4f} -> {losses[-1]:.4f}   {per_step:.1f} ms per step",
            flush=True,
        )
        return np.array(losses)


def tuned(training: Training, store: str | None) -> AutotuningResult:
    selector = ConfigSelectorChain(
        policy=AutotunePolicy(validate_backward=True), persistent=PersistentCache(store)
    )
    start = time.perf_counter()
    result = autotune_lowered(selector, training.lower())
    print(f"tuned {len(result.entries)} operations in {time.perf_counter() - start:.0f} s")
    print(result, flush=True)
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer, untuned and tuned.")
    for field in dataclasses.fields(Settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    parser.add_argument("--store", help="folder or URL of the store (default: the usual one)")
    options = vars(parser.parse_args(arguments))
    store = options.pop("store")

    # Untuned means untuned: this executor has no store to read from.
    set_default_executor(Executor(ConfigSelectorChain(autotune=False)))
    training = Training(Settings(**options))
    before = training.run("untuned")
    with tuned(training, store):
        after = training.run("tuned")

    # Other block sizes add up in another order, and training amplifies what that rounds.
    np.testing.assert_allclose(after, before, rtol=5e-3)
    apart = np.max(np.abs(after - before) / before)
    print(f"the same loss in every step, within {apart:.1e}")


if __name__ == "__main__":
    main()
