"""`ejkernel.modules.flash_attention`: right by value and by gradient, and clear about bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention import FlashAttentionXlaConfig, attention_reference
from ejkernel.modules import flash_attention
from ejkernel.ops import find_labels_in_lowered, policy_override

SMALL = FlashAttentionXlaConfig(block_q=16, block_k=32, backward_block_q=32, backward_block_k=16)


def inputs(batch=2, q_len=50, kv_len=50, heads=4, kv_heads=4, dim=16, dtype=jnp.float32):
    numbers = np.random.default_rng(0)
    shapes = ((batch, q_len, heads, dim), *[(batch, kv_len, kv_heads, dim)] * 2)
    return tuple(jnp.asarray(numbers.standard_normal(shape), dtype) for shape in shapes)


def naive(q, k, v, **options):
    """The reference, compiled quickly: op by op it would be compiled op by op."""
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda *a: attention_reference(*a, **options), compiler_options=quick)(q, k, v)


@pytest.mark.parametrize(
    ("causal", "cfg", "shape"),
    [
        (False, None, {}),
        (True, None, {"kv_heads": 1}),
        (True, SMALL, {"q_len": 7, "kv_len": 61}),
        (False, SMALL, {"q_len": 61, "kv_len": 7, "kv_heads": 2}),
    ],
)
def test_value_and_every_gradient_equal_the_reference(causal, cfg, shape):
    arrays = inputs(**shape)
    weights = jnp.asarray(np.random.default_rng(9).standard_normal(arrays[0].shape), jnp.float32)

    def out_and_gradients(attention):
        def run(q, k, v, weights):
            out, pull_back = jax.vjp(attention, q, k, v)
            return out, *pull_back(weights)

        return jax.jit(run)(*arrays, weights)

    got = out_and_gradients(lambda *a: flash_attention(*a, causal=causal, cfg=cfg))
    wanted = out_and_gradients(lambda *a: attention_reference(*a, causal=causal))
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_it_agrees_with_jax_nn(causal):
    q, k, v = inputs(kv_heads=2)
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    np.testing.assert_allclose(flash_attention(q, k, v, causal), wanted, atol=2e-5)


def test_the_scale_can_be_given():
    q, k, v = inputs()
    wanted = naive(q, k, v, softmax_scale=0.5)
    np.testing.assert_allclose(flash_attention(q, k, v, softmax_scale=0.5), wanted, atol=2e-5)


def test_bfloat16_stays_bfloat16():
    q, k, v = inputs(dtype=jnp.bfloat16)
    out = flash_attention(q, k, v, causal=True)
    assert out.dtype == jnp.bfloat16
    wanted = naive(*(x.astype(jnp.float32) for x in (q, k, v)), causal=True)
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
    np.testing.assert_allclose(out, naive(q, k, v, causal=True), atol=2e-5)
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
        ({"window": -1}, ValueError, ["window=-1", "0 or more"]),
        ({"window": (3, 2)}, ValueError, ["window=(3, 2)", "causal"]),
        ({"window": (1, 2, 3)}, ValueError, ["window=(1, 2, 3)", "two sides"]),
        ({"window": 1.5}, TypeError, ["window=1.5", "whole number"]),
        ({"window": True}, ValueError, ["window=True"]),
        ({"bias": jnp.ones((2, 3, 50, 50))}, ValueError, ["bias has shape (2, 3, 50, 50)"]),
        ({"bias": jnp.ones((50, 50), bool)}, TypeError, ["bias is bool", "mask"]),
        ({"mask": jnp.ones((49, 50), bool)}, ValueError, ["mask has shape (49, 50)"]),
        ({"mask": jnp.ones((50, 50))}, TypeError, ["mask is float32", "boolean"]),
        (
            {"segment_ids": jnp.ones((2, 49), int)},
            ValueError,
            ["segment_ids has shape (2, 49)", "(2, 50)"],
        ),
        ({"segment_ids": jnp.ones((2, 50))}, TypeError, ["segment_ids is float32", "integer"]),
        ({"kv_segment_ids": jnp.ones((2, 50), int)}, ValueError, ["kv_segment_ids", "queries"]),
        (
            {"q": jnp.ones((2, 7, 4, 16)), "segment_ids": jnp.ones((2, 7), int)},
            ValueError,
            ["segment_ids has shape (2, 7)", "50 keys", "kv_segment_ids"],
        ),
        ({"sinks": jnp.ones(3)}, ValueError, ["sinks has shape (3,)", "(4,)"]),
        ({"sinks": jnp.ones(4, int)}, TypeError, ["sinks is int32"]),
        ({"q_lengths": jnp.ones((2, 1), int)}, ValueError, ["q_lengths has shape (2, 1)"]),
        ({"kv_lengths": jnp.ones(2)}, TypeError, ["kv_lengths is float32"]),
        ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap=0.0", "positive"]),
        ({"logits_soft_cap": "big"}, TypeError, ["logits_soft_cap", "'big'"]),
        ({"softmax_scale": None, "dropout_rate": 0.1}, ValueError, ["dropout_rate=0.1", "key"]),
        ({"dropout_rate": 1.0}, ValueError, ["dropout_rate=1.0", "below 1"]),
        (
            {"dropout_rate": 0.1, "dropout_key": jnp.ones(2)},
            TypeError,
            ["dropout_key is float32", "jax.random.key"],
        ),
        ({"return_lse": "yes"}, TypeError, ["return_lse", "'yes'"]),
        ({"sequence_axis": 3}, TypeError, ["sequence_axis", "3"]),
        ({"q": jnp.ones((2, 0, 4, 16))}, ValueError, ["q", "empty"]),
    ],
)
def test_bad_input_is_named(change, error, words):
    q, k, v = inputs()
    with pytest.raises(error) as caught:
        flash_attention(**{"q": q, "k": k, "v": v, "causal": True, **change})
    for word in ["flash_attention", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "name", ["causal", "softmax_scale", "window", "logits_soft_cap", "dropout_rate", "return_lse"]
)
def test_a_tracer_where_a_constant_belongs_is_named(name):
    q, k, v = inputs()
    with pytest.raises(TypeError, match=f"flash_attention: {name} must be"):
        jax.jit(lambda x: flash_attention(q, k, v, **{name: x}))(1)


def test_dropout_takes_keys_of_both_kinds():
    q, k, v = inputs()
    old, new = jax.random.PRNGKey(3), jax.random.key(3)
    outs = [flash_attention(q, k, v, dropout_rate=0.5, dropout_key=key) for key in (old, new)]
    np.testing.assert_array_equal(*outs)
    without = flash_attention(q, k, v)
    np.testing.assert_array_equal(flash_attention(q, k, v, dropout_key=new), without)
    assert not np.allclose(outs[0], without, atol=1e-2)


def test_heads_shared_out_while_all_devices_have_the_keys():
    """Multi-query attention over a mesh of heads: the keys' gradient is the sum over devices."""
    q, k, v = inputs(q_len=9, kv_len=9, kv_heads=1)
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    by_head, everywhere = jax.sharding.PartitionSpec(None, None, "heads"), jax.P()
    shared = jax.shard_map(
        lambda *a: flash_attention(*a, causal=True),
        mesh=mesh,
        in_specs=(by_head, everywhere, everywhere),
        out_specs=by_head,
    )

    def gradients(attention):
        return jax.jit(jax.grad(lambda *a: (attention(*a) ** 2).sum(), (0, 1, 2)))(q, k, v)

    wanted = gradients(lambda *a: attention_reference(*a, causal=True))
    for mine, theirs in zip(gradients(shared), wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
