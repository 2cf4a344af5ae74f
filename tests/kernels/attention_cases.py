"""Inputs of attention, and the comparison with the reference that its tests share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention import FlashAttentionXlaConfig, attention_reference
from ejkernel.kernels.flash_attention.arguments import checked_window
from ejkernel.modules import flash_attention

QUICK: Any = {"xla_backend_optimization_level": 0}  # most of a test is compiling
BLOCKS = FlashAttentionXlaConfig(
    block_q=8,
    block_k=4,
    block_heads=2,
    backward_block_q=4,
    backward_block_k=8,
    backward_block_heads=1,
)
KEY = jax.random.key(7)
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 2, 19, 23, 4


def arrays(
    q_len: int = Q_LEN,
    kv_len: int = KV_LEN,
    *,
    batch: int = BATCH,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
    value_dim: int = DIM,
    dtype: Any = jnp.float32,
) -> dict[str, jax.Array]:
    shapes = {
        "q": (batch, q_len, heads, dim),
        "k": (batch, kv_len, kv_heads, dim),
        "v": (batch, kv_len, kv_heads, value_dim),
    }
    numbers = np.random.default_rng(q_len * 100 + kv_len)
    return {n: jnp.asarray(numbers.standard_normal(s), dtype) for n, s in shapes.items()}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def integers(low: int, high: int, *shape: int, ordered: bool = False) -> jax.Array:
    drawn = np.random.default_rng(3).integers(low, high, shape)
    return jnp.asarray(np.sort(drawn, axis=-1) if ordered else drawn, jnp.int32)


def naive(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
    """The reference, called as users call."""
    if options.get("window") is not None:
        options["window"] = checked_window(options["window"], options.get("causal", False))
    if "dropout_key" in options:
        options["dropout_key"] = jax.random.key_data(options["dropout_key"])
    for name in ("bias", "mask"):
        if name in options:
            x = options[name]
            options[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return attention_reference(q, k, v, **options)


def agree(
    inputs: dict[str, jax.Array],
    options: dict[str, Any],
    cfg: FlashAttentionXlaConfig | None = BLOCKS,
    tolerance: float = 3e-5,
    attention: Callable[..., Any] | None = None,
    constant: Collection[str] = (),
) -> dict[str, Any]:
    """Check the outputs and the gradients of everything that has one; returns the gradients.

    They are those of `flash_attention` with a config, or of the attention that is given; options
    that are `constant` are not differentiated.
    """
    ours = attention or partial(flash_attention, **({"cfg": cfg} if cfg else {}))
    names = {"bias", "sinks"} & set(options) - set(constant)
    learned = {name: options[name] for name in sorted(names)}
    fixed = {name: x for name, x in options.items() if name not in learned}

    def loss_and_out(attention: Any) -> Any:
        def loss(inputs: dict[str, jax.Array]) -> Any:
            out = attention(**inputs, **fixed)
            parts = out if isinstance(out, tuple) else (out,)
            total = jnp.float32(0)
            for seed, part in enumerate(parts):
                seen = jnp.where(jnp.isneginf(part), 0.0, part.astype(jnp.float32))
                total += (seen * normal(*part.shape, seed=seed)).sum()
            return total, parts

        gradient = jax.value_and_grad(loss, has_aux=True)
        return jax.jit(gradient, compiler_options=QUICK)({**inputs, **learned})

    (_, got), got_gradients = loss_and_out(ours)
    (_, wanted), wanted_gradients = loss_and_out(naive)
    pairs = [("out", got[0], wanted[0]), *zip(("lse",), got[1:], wanted[1:], strict=False)]
    pairs += [(f"d{n}", got_gradients[n], wanted_gradients[n]) for n in wanted_gradients]
    for name, mine, truth in pairs:
        assert (mine.shape, mine.dtype) == (truth.shape, truth.dtype), name
        # In numpy: the fixture that isolates tests makes JAX compile even the smallest thing anew.
        mine, truth = np.asarray(mine).astype(np.float32), np.asarray(truth).astype(np.float32)
        scale = max(1.0, float(np.abs(np.where(np.isneginf(truth), 0, truth)).max()))
        np.testing.assert_allclose(
            mine,
            truth,
            rtol=tolerance,
            atol=tolerance * scale,
            err_msg=name,
        )
    return got_gradients
