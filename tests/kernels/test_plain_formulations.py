"""What users would write in plain JAX computes what the reference does, or says that it cannot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention.kernel import FlashAttention
from ejkernel.kernels.gated_linear_unit.kernel import GatedLinearUnit
from ejkernel.kernels.grouped_matmul.kernel import GroupedMatmul


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


Q, K, V = normal(0, 2, 12, 4, 8), normal(1, 2, 12, 2, 8), normal(2, 2, 12, 2, 8)
IDS = jnp.repeat(jnp.arange(3), 4)[None].repeat(2, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softmax_scale": 0.3},
        {"window": (3, 0), "causal": True},
        {"window": (None, 2)},
        {"segment_ids": IDS, "causal": True},
        {"segment_ids": IDS, "kv_segment_ids": IDS, "mask": jnp.ones((1, 1, 12, 12), bool)},
        {"bias": normal(3, 2, 4, 12, 12)},
        {"kv_lengths": jnp.array([12, 7], jnp.int32)},
    ],
    ids=lambda options: "+".join(options) or "no options",
)
def test_attention(options):
    got = FlashAttention.plain(Q, K, V, **options)
    np.testing.assert_allclose(got, FlashAttention.reference(Q, K, V, **options), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 3.0},
        {"sinks": jnp.zeros(4)},
        {"return_lse": True},
        {"dropout_rate": 0.5, "dropout_key": jnp.zeros(2, jnp.uint32)},
    ],
    ids="+".join,
)
def test_attention_that_jax_cannot_express_says_so(options):
    with pytest.raises(NotImplementedError, match=next(iter(sorted(options)))):
        FlashAttention.plain(Q, K, V, **options)


def test_attention_of_other_value_sizes_says_so():
    with pytest.raises(NotImplementedError, match="head size"):
        FlashAttention.plain(Q, K, V[..., :4])


def test_grouped_matmul():
    lhs, rhs, sizes = normal(0, 6, 4), normal(1, 3, 4, 5), jnp.array([1, 3, 2], jnp.int32)
    for transposed in (False, True):
        matrices = rhs.swapaxes(1, 2) if transposed else rhs
        got = GroupedMatmul.plain(lhs, matrices, sizes, transpose_rhs=transposed)
        wanted = GroupedMatmul.reference(lhs, matrices, sizes, transpose_rhs=transposed)
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    with pytest.raises(NotImplementedError, match="group_offset"):
        GroupedMatmul.plain(lhs, rhs, sizes, group_offset=jnp.zeros((), jnp.int32))


@pytest.mark.parametrize("biases", [{}, {"b_gate": jnp.ones(5), "b_up": 2 * jnp.ones(5)}])
def test_gated_linear_unit(biases):
    x, gate, up = normal(0, 2, 3, 4), normal(1, 4, 5), normal(2, 4, 5)
    wanted = GatedLinearUnit.reference(x, gate, up, activation="silu", **biases)
    got = GatedLinearUnit.plain(x, gate, up, activation="silu", **biases)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    joined = jnp.concatenate([gate, up], axis=1)
    got = GatedLinearUnit.plain(x, joined, activation="silu", **biases)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
