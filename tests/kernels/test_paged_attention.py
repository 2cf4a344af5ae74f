"""Paged attention against its definition: every implementation, options, gradients, bad input."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.paged_attention import (
    PagedAttention,
    PagedAttentionGpuConfig,
    PagedAttentionTpuConfig,
    PagedAttentionXlaConfig,
    paged_attention_reference,
    pallas_gpu,
    pallas_tpu,
    xla,
)
from ejkernel.modules import paged_attention

# batch, tokens, heads, kv_heads, head_dim, value_dim, page_size, pages per sequence, pages
ODD = (4, 1, 4, 2, 24, 16, 5, 7, 9)
SEVERAL_TOKENS = (3, 3, 4, 1, 16, 16, 16, 3, 9)
CASES = [
    (ODD, {}),
    (ODD, {"window": 20, "logits_soft_cap": 2.0, "sinks": True}),
    (SEVERAL_TOKENS, {"window": 9}),
]


def inputs(batch, tokens, heads, kv_heads, head_dim, value_dim, page_size, per_sequence, pages):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    longest = per_sequence * page_size
    lengths = [longest, 0, *rng.integers(tokens, longest, batch - 2)]
    arrays = (
        normal(batch, tokens, heads, head_dim),
        normal(pages, page_size, kv_heads, head_dim),
        normal(pages, page_size, kv_heads, value_dim),
        jnp.asarray(rng.integers(0, pages, (batch, per_sequence)), jnp.int32),
        jnp.asarray(lengths, jnp.int32),
    )
    return arrays, normal(heads)


EVERY_RUN = {
    "reference": paged_attention_reference,
    "xla-page-by-page": partial(xla.XLA.forward, cfg=PagedAttentionXlaConfig(1)),
    "xla": partial(xla.XLA.forward, cfg=PagedAttentionXlaConfig(3)),
    "xla-at-once": partial(xla.XLA.forward, cfg=PagedAttentionXlaConfig(100)),
    "pallas": partial(pallas_tpu.PALLAS_TPU.forward, cfg=PagedAttentionTpuConfig(2)),
    "triton": partial(
        pallas_gpu.PALLAS_GPU.forward, cfg=PagedAttentionGpuConfig(block_k=16, num_key_splits=2)
    ),
}


def softly(function):
    """Compile time is what these tests take."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.usefixtures("interpreted_pallas")
@pytest.mark.parametrize(("shape", "options"), CASES, ids=["plain", "options", "tokens"])
@pytest.mark.parametrize("name", list(EVERY_RUN)[1:])
def test_every_implementation_equals_the_definition(name, shape, options):
    run = EVERY_RUN[name]
    args, sinks = inputs(*shape)
    options = {"softmax_scale": 0.4, **options}
    if "sinks" in options:
        options["sinks"] = sinks
    expected = paged_attention_reference(*args, **options)
    out = softly(lambda *a: run(*a, **options))(*args)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    assert not np.asarray(out[1]).any()  # a sequence of length 0


@pytest.mark.usefixtures("interpreted_pallas")
@pytest.mark.parametrize("options", [{}, {"window": 7}], ids=["plain", "window"])
@pytest.mark.parametrize("name", EVERY_RUN)
def test_what_no_query_sees_may_be_anything(name, options):
    """Pages of others, given in a table's unused places, and the rest of a sequence's last page."""
    (q, k_pages, v_pages, _, _), _ = inputs(*ODD)
    page_size = k_pages.shape[1]
    table = jnp.asarray([[5, 4, 3, 2, 1, 0, 0]] * 4, jnp.int32)
    length = 3 * page_size + 2  # two tokens in the last page, the fourth
    lengths = jnp.full((4,), length, jnp.int32)
    run = softly(partial(EVERY_RUN[name], softmax_scale=0.4, **options))
    expected = run(q, k_pages, v_pages, table, lengths)
    unseen = [jnp.s_[2, 2:], jnp.s_[1], jnp.s_[0], jnp.s_[6]]
    if options:  # the first page is wholly behind the window
        unseen += [jnp.s_[5]]
    for part in unseen:
        k_pages, v_pages = k_pages.at[part].set(jnp.nan), v_pages.at[part].set(jnp.nan)
    out = run(q, k_pages, v_pages, table, lengths)
    np.testing.assert_array_equal(out, expected)


def test_the_definition_is_attention_over_the_tokens_that_the_pages_hold():
    (q, k_pages, v_pages, table, lengths), _ = inputs(*ODD)
    out = paged_attention(q[:, 0], k_pages, v_pages, table, lengths)
    for b in (0, 2, 3):
        k = np.concatenate([k_pages[p] for p in table[b]])[: lengths[b]]
        v = np.concatenate([v_pages[p] for p in table[b]])[: lengths[b]]
        for h in range(4):
            scores = k[:, h // 2] @ np.asarray(q[b, 0, h]) / np.sqrt(24)
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ v[:, h // 2]
            np.testing.assert_allclose(out[b, h], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_types_are_summed_in_float32(dtype):
    (q, k, v, table, lengths), _ = inputs(*ODD)
    short = [x.astype(dtype) for x in (q, k, v)]
    out = paged_attention(*short, table, lengths)
    exact = paged_attention_reference(*(x.astype(jnp.float32) for x in short), table, lengths)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=1e-2, atol=1e-2)


def test_gradients_of_queries_pages_and_sinks():
    (q, k, v, table, lengths), sinks = inputs(*ODD)
    weights = jnp.cos(jnp.arange(16.0))

    def loss(function, q, k, v, sinks):
        out = function(q, k, v, table, lengths, window=9, logits_soft_cap=2.0, sinks=sinks)
        return jnp.sum(out * weights)

    every = (1, 2, 3, 4)
    ours = jax.grad(loss, every)(paged_attention, q, k, v, sinks)
    expected = jax.grad(loss, every)(paged_attention_reference, q, k, v, sinks)
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert np.asarray(theirs).any()


def test_pages_beyond_the_length_are_not_looked_at_and_wrong_ones_are_clamped_in_jit():
    (q, k, v, table, _), _ = inputs(*ODD)
    lengths = jnp.full((4,), 5, jnp.int32)  # one page of seven
    unused = table.at[:, 1:].set(-1)
    out = paged_attention(q, k, v, table, lengths)
    np.testing.assert_array_equal(paged_attention(q, k, v, unused, lengths), out)
    poisoned = k.at[jnp.setdiff1d(jnp.arange(9), table[:, 0], size=5)].set(jnp.nan)
    np.testing.assert_array_equal(paged_attention(q, poisoned, v, unused, lengths), out)
    wild = table.at[0, 0].set(10**6)
    clamped = jax.jit(paged_attention)(q, k, v, wild, lengths)
    expected = paged_attention(q, k, v, table.at[0, 0].set(8), lengths)
    np.testing.assert_allclose(clamped, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": jnp.ones((4, 24))}, ValueError, r"q has shape \(4, 24\)"),
        ({"q": jnp.ones((4, 4, 24), int)}, TypeError, "q is int32.*floating"),
        ({"q": jnp.ones((4, 5, 24))}, ValueError, "5 heads and k_pages.*2.*multiple"),
        ({"q": jnp.ones((4, 4, 8))}, ValueError, "differ in head_dim"),
        ({"v_pages": jnp.ones((9, 4, 2, 16))}, ValueError, "differ in more"),
        ({"k_pages": jnp.ones((9, 5, 24))}, ValueError, r"k_pages has shape \(9, 5, 24\)"),
        ({"page_table": jnp.zeros((4, 7))}, TypeError, "page_table is float32"),
        ({"page_table": jnp.zeros((3, 7), int)}, ValueError, r"page_table has shape \(3, 7\)"),
        ({"lengths": jnp.zeros((4, 1), int)}, ValueError, r"lengths has shape \(4, 1\)"),
        ({"page_table": jnp.full((4, 7), 9)}, ValueError, r"page_table\[0, 0\] is 9.*0 to 8"),
        ({"page_table": jnp.full((4, 7), -1)}, ValueError, "is -1"),
        ({"lengths": jnp.full((4,), 36)}, ValueError, "36.*0 to 35"),
        ({"window": -1}, ValueError, "window=-1"),
        ({"window": 1.5}, ValueError, "window=1.5"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap=0.0"),
        ({"sinks": jnp.ones((2,))}, ValueError, r"sinks is float32 of shape \(2,\)"),
        ({"softmax_scale": "big"}, TypeError, "softmax_scale must be a number"),
    ],
)
def test_bad_input_is_named(changes, error, words):
    (q, k, v, table, lengths), _ = inputs(*ODD)
    given = {"q": q, "k_pages": k, "v_pages": v, "page_table": table, "lengths": lengths}
    with pytest.raises(error, match=words):
        paged_attention(**{**given, **changes})


def test_the_tuner_gets_valid_inputs_and_candidates():
    kernel = PagedAttention()
    args, _ = inputs(*ODD)
    inv = kernel.bind(*args, softmax_scale=0.4)
    (made, kwargs) = kernel.make_inputs(inv, jax.random.key(0))
    assert int(made[3].max()) < 9
    assert int(made[4].min()) > 0
    assert int(made[4].max()) == 35
    expected = paged_attention_reference(*made, **kwargs)
    candidates = kernel.candidates(inv)
    assert len(candidates) > 1
    assert all(isinstance(cfg, PagedAttentionXlaConfig) for cfg in candidates)
    np.testing.assert_allclose(kernel(*made, cfg=candidates[-1], **kwargs), expected, atol=2e-5)
