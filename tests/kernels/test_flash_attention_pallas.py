"""The Pallas kernels of flash attention, interpreted: values and gradients by the definition."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention import (
    FlashAttention,
    attention_reference,
)
from ejkernel.kernels.flash_attention.options import Options
from ejkernel.kernels.flash_attention.pallas_gpu import kernels as pallas_gpu
from ejkernel.kernels.flash_attention.pallas_tpu import kernels as pallas_tpu
from ejkernel.kernels.flash_attention.passes import Results
from ejkernel.kernels.flash_attention.tiles import Tiles

# What the kernels serve, by the names of keywords.
NAMES = [
    field.name
    for field in dataclasses.fields(Options)
    if not field.name.startswith(("first_", "dropout"))
]
RNG = np.random.default_rng(0)
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 150, 140, 4, 2, 24, 16


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def segments(length):
    return jnp.asarray(np.sort(RNG.integers(0, 3, (BATCH, length))), jnp.int32)


def chance(*shape):
    return jnp.asarray(RNG.random(shape) > 0.4)


CASES = {
    "causal": Options(True, 0.3, sinks=normal(HEADS)),
    "window": Options(False, 0.3, window=(40, 20), logits_soft_cap=2.0),
    "values": Options(
        True,
        0.3,
        window=(100, 0),
        logits_soft_cap=3.0,
        sinks=normal(HEADS),
        mask=chance(1, HEADS, Q_LEN, KV_LEN),
        segment_ids=segments(Q_LEN),
        kv_segment_ids=segments(KV_LEN),
        q_lengths=jnp.array([Q_LEN - 3, 5]),
        kv_lengths=jnp.array([KV_LEN - 5, 0]),
    ),
    "bias": Options(
        False, 0.3, bias=normal(1, HEADS, Q_LEN, KV_LEN), mask=chance(BATCH, 1, 1, KV_LEN)
    ),
}


def plain(q, k, v, options):
    given = {name: getattr(options, name) for name in NAMES}
    return attention_reference(q, k, v, **given, return_lse=True)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("module", [pallas_tpu, pallas_gpu], ids=["tpu", "gpu"])
def test_values_and_gradients_equal_the_definition(module, case):
    options = CASES[case]
    blocks = (128, 128) if module is pallas_tpu else (64, 32)
    q = normal(BATCH, Q_LEN, HEADS, HEAD_DIM)
    k = normal(BATCH, KV_LEN, KV_HEADS, HEAD_DIM)
    v = normal(BATCH, KV_LEN, KV_HEADS, VALUE_DIM)
    dout = normal(BATCH, Q_LEN, HEADS, VALUE_DIM)
    launch = {"block_q": blocks[0], "block_k": blocks[1], "interpret": True}

    @jax.jit
    def expectation(q, k, v, sinks):
        def loss(q, k, v, sinks):
            out, lse = plain(q, k, v, dataclasses.replace(options, sinks=sinks))
            return jnp.sum(out * dout) + jnp.sum(jnp.sin(jnp.where(lse > -jnp.inf, lse, 0.0)))

        wanted = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
        return plain(q, k, v, options), jax.grad(loss, wanted)(q, k, v, sinks)

    def ours(q, k, v):
        out, lse = module.forward(q, k, v, options, **launch)
        dlse = jnp.where(lse > -jnp.inf, jnp.cos(lse), 0.0)
        results = Results(q, k, v, out, lse, dout, dlse)
        *grads, named = module.backward(results, options, **launch)
        return (out, lse), (*grads, *named.values())

    fast_to_compile = {"xla_backend_optimization_level": 0}
    values, gradients = jax.jit(ours, compiler_options=fast_to_compile)(q, k, v)
    expected, expected_gradients = expectation(q, k, v, options.sinks)
    jax.tree.map(close, (values, gradients), (expected, tuple(expected_gradients)))


@pytest.mark.parametrize("left", [None, 0, 5, 40])
@pytest.mark.parametrize("right", [None, 0, 7])
@pytest.mark.parametrize("lengths", [(60, 60), (45, 100), (100, 33)])
def test_exactly_the_tiles_that_somebody_sees_are_visited(left, right, lengths):
    tiles = Tiles(*lengths, block_q=16, block_k=8, left=left, right=right)
    i, j = np.arange(tiles.padded_q_len)[:, None], np.arange(tiles.padded_kv_len)
    visible = np.broadcast_to(j < tiles.kv_len, (tiles.padded_q_len, tiles.padded_kv_len))
    visible = visible & (True if right is None else j <= i + right)
    visible = visible & (True if left is None else j >= i - left)

    def in_blocks(x):
        return x.reshape(tiles.q_blocks, 16, tiles.k_blocks, 8).swapaxes(1, 2)

    # Rows that only fill the last block are nobody, but they do not make a tile ragged.
    blocks, any_row = in_blocks(visible & (i < tiles.q_len)), in_blocks(visible)
    for a in range(tiles.q_blocks):
        begin, end = tiles.keys_of(a)
        seen = [b for b in range(tiles.k_blocks) if blocks[a, b].any()]
        assert seen == list(range(begin, end)), (begin, end)
        whole = [b for b in range(tiles.k_blocks) if any_row[a, b].all()]
        assert whole == list(range(*tiles.whole_keys_of(a)))
        assert whole == [b for b in range(tiles.k_blocks) if tiles.whole(a, b)]
        assert len(seen) <= tiles.key_steps
    for b in range(tiles.k_blocks):
        begin, end = tiles.queries_of(b)
        seen = [a for a in range(tiles.q_blocks) if blocks[a, b].any()]
        assert seen == list(range(begin, end)), (begin, end)
        whole = [a for a in range(tiles.q_blocks) if any_row[a, b].all()]
        first, last = tiles.whole_queries_of(b)
        assert whole == list(range(int(first), int(last)))
        assert len(seen) <= tiles.query_steps


def test_what_is_not_served_is_said():
    kernel = FlashAttention()
    support = {item.name: item.supports for item in kernel.implementations}
    wide = jax.ShapeDtypeStruct((1, 8, 1, 512), jnp.float32)
    inv = kernel.bind(wide, wide, wide, causal=False, softmax_scale=1.0, dropout_rate=0.1)
    assert "head_dim is 512" in " ".join(support["triton"].reasons_against(inv))
    assert "dropout_rate" in " ".join(support["pallas"].reasons_against(inv))
    half = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.float16)
    inv = kernel.bind(half, half, half, causal=False, softmax_scale=1.0)
    assert "float16" in " ".join(support["pallas"].reasons_against(inv))
    assert not support["triton"].reasons_against(inv)


@pytest.mark.parametrize("name", ["pallas", "triton", "cpu"])
def test_where_xla_computes_the_gradient_of_a_bias_it_has_blocks_of_its_own(name):
    """Blocks of another implementation's kernels are not for XLA's: on a GPU they are tiny."""
    kernel = FlashAttention()
    q, lse = jax.ShapeDtypeStruct((1, 300, 4, 16), jnp.float32), jnp.ones((1, 4, 300))
    xla, other = kernel.implementation("xla"), kernel.implementation(name)

    def backward_pass(implementation, **blocks):
        def run(lse, out, dout, q, k, v, bias):
            options = {"causal": True, "softmax_scale": 0.25, "bias": bias}
            options |= {"cfg": implementation.config(**blocks)}
            options |= {"differentiated": frozenset({"bias"})}
            return implementation.backward(lse, out, dout, q, k, v, **options)

        return str(jax.make_jaxpr(run)(lse, q, q, q, q, q, jnp.ones((1, 4, 300, 300))))

    small = {"backward_block_q": 16, "backward_block_k": 32}
    assert backward_pass(other, **small) == backward_pass(xla)
    assert backward_pass(xla, **small) != backward_pass(xla)
