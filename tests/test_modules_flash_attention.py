"""`ejkernel.modules.flash_attention`: right by value and by gradient, and clear about bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention import FlashAttentionConfig, attention_reference
from ejkernel.modules import flash_attention
from ejkernel.ops import BwdParams, FwdParams, find_labels_in_lowered, policy_override

SMALL = FlashAttentionConfig(
    FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=16)
)


def inputs(batch=2, q_len=50, kv_len=50, heads=4, kv_heads=4, dim=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (batch, q_len, heads, dim), dtype),
        jax.random.normal(keys[1], (batch, kv_len, kv_heads, dim), dtype),
        jax.random.normal(keys[2], (batch, kv_len, kv_heads, dim), dtype),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cfg", [None, SMALL], ids=["heuristic", "small blocks"])
@pytest.mark.parametrize("shape", [{}, {"kv_heads": 1}, {"q_len": 7, "kv_len": 61}])
def test_value_and_every_gradient_equal_the_reference(causal, cfg, shape):
    q, k, v = inputs(**shape)

    def ours(q, k, v):
        return flash_attention(q, k, v, causal=causal, cfg=cfg)

    def naive(q, k, v):
        return attention_reference(q, k, v, causal=causal)

    np.testing.assert_allclose(ours(q, k, v), naive(q, k, v), atol=2e-5)
    weights = jax.random.normal(jax.random.key(9), q.shape)
    got = jax.grad(lambda *a: (ours(*a) * weights).sum(), (0, 1, 2))(q, k, v)
    wanted = jax.grad(lambda *a: (naive(*a) * weights).sum(), (0, 1, 2))(q, k, v)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_it_agrees_with_jax_nn(causal):
    q, k, v = inputs(kv_heads=2)
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    np.testing.assert_allclose(flash_attention(q, k, v, causal), wanted, atol=2e-5)


def test_the_scale_can_be_given():
    q, k, v = inputs()
    wanted = attention_reference(q, k, v, softmax_scale=0.5)
    np.testing.assert_allclose(flash_attention(q, k, v, softmax_scale=0.5), wanted, atol=2e-5)


def test_bfloat16_stays_bfloat16():
    q, k, v = inputs(dtype=jnp.bfloat16)
    out = flash_attention(q, k, v, causal=True)
    assert out.dtype == jnp.bfloat16
    wanted = attention_reference(*(x.astype(jnp.float32) for x in (q, k, v)), causal=True)
    np.testing.assert_allclose(out.astype(jnp.float32), wanted, atol=3e-2)


def test_it_is_labelled_forward_and_backward():
    q, k, v = inputs()
    loss = jax.jit(jax.grad(lambda q: flash_attention(q, k, v, causal=True).sum()))
    (label,) = find_labels_in_lowered(loss.lower(q))
    assert label.startswith("ejkernel_ops#flash_attention@v1:")


def test_it_tunes_when_asked_and_keeps_the_result():
    q, k, v = inputs(batch=1, heads=1, kv_heads=1, dim=8)
    with policy_override(autotune=True):
        out = flash_attention(q, k, v, causal=True)
    np.testing.assert_allclose(out, attention_reference(q, k, v, causal=True), atol=2e-5)
    from ejkernel.ops import default_executor

    assert len(default_executor().selector.persistent) == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": jnp.ones((2, 3, 4))}, ValueError, ["q has shape (2, 3, 4)", "four axes"]),
        (
            {"k": jnp.ones((2, 50, 3, 16)), "v": jnp.ones((2, 50, 3, 16))},
            ValueError,
            ["4 heads", "3"],
        ),
        (
            {"v": jnp.ones((2, 49, 4, 16))},
            ValueError,
            ["k and v differ in length", "(2, 49, 4, 16)"],
        ),
        ({"k": jnp.ones((2, 50, 4, 8))}, ValueError, ["q and k differ in head_dim"]),
        ({"k": jnp.ones((3, 50, 4, 16))}, ValueError, ["batch size"]),
        ({"q": jnp.ones((2, 50, 4, 16), int)}, TypeError, ["q is int32", "floating"]),
        ({"causal": "yes"}, TypeError, ["causal", "'yes'"]),
        ({"q": jnp.ones((2, 0, 4, 16))}, ValueError, ["q", "empty"]),
    ],
)
def test_bad_input_is_named(change, error, words):
    q, k, v = inputs()
    with pytest.raises(error) as caught:
        flash_attention(**{"q": q, "k": k, "v": v, "causal": True, **change})
    for word in ["flash_attention", *words]:
        assert word in str(caught.value)
