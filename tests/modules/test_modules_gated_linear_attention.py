"""`ejkernel.modules.gated_linear_attention`: right by value and gradient, clear about bad input."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.gated_linear_attention import (
    GatedLinearAttention,
    GatedLinearAttentionXlaConfig,
    gated_linear_attention_reference,
)
from ejkernel.modules import gated_linear_attention
from ejkernel.ops import NotSupported, find_labels_in_lowered

quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
CHUNKS = GatedLinearAttentionXlaConfig(chunk_size=8, backward_chunk_size=4)


def inputs(decay="channel", batch=2, length=21, heads=2, dim=8):
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (batch, length, heads, dim)
    q, k, v = (jax.random.normal(key, shape) for key in keys[:3])
    shapes = {"channel": shape, "head": shape[:3]}
    g = jax.nn.log_sigmoid(jax.random.normal(keys[3], shapes[decay])) if decay in shapes else None
    return q, k, v, g, jax.random.normal(keys[4], (batch, heads, dim, dim))


def both(function, q, k, v, g, state, **options):
    """Value and every gradient, of a loss that uses the output and the last state."""

    def loss(arrays):
        out, last = function(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            arrays.get("g"),
            initial_state=arrays["state"],
            return_state=True,
            **options,
        )
        return (out**2).sum() + jnp.sin(last).sum(), (out, last)

    arrays = {"q": q, "k": k, "v": v, "state": state} | ({} if g is None else {"g": g})
    return quick(jax.value_and_grad(loss, has_aux=True))(arrays)


def assert_same(got, wanted):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * max(1.0, float(jnp.abs(y).max())))


@pytest.mark.parametrize(
    ("decay", "segments"), [("channel", True), ("head", False), ("none", True)]
)
def test_value_and_every_gradient_equal_the_recurrence(decay, segments):
    arrays = inputs(decay)
    # The same id may come again; it is another segment all the same.
    ids = jnp.array([[0] * 7 + [1] * 14, [3] * 2 + [4] + [3] * 18]) if segments else None
    wanted = both(gated_linear_attention_reference, *arrays, segment_ids=ids)
    for cfg in (None, CHUNKS):
        got = both(gated_linear_attention, *arrays, segment_ids=ids, cfg=cfg)
        assert_same(got, wanted)


@pytest.mark.parametrize("cfg", [None, CHUNKS])
def test_minus_infinity_forgets_and_has_no_gradient(cfg):
    q, k, v, g, state = inputs()
    g = g.at[:, 5].set(-jnp.inf)

    def loss(g):
        out = gated_linear_attention(q, k, v, g, initial_state=state, cfg=cfg)
        return (out**2).sum(), out

    dg, out = quick(jax.grad(loss, has_aux=True))(g)
    assert bool(jnp.isfinite(dg).all())
    assert not dg[:, 5].any()
    tail = quick(gated_linear_attention_reference)(*(x[:, 5:] for x in (q, k, v, g)))
    np.testing.assert_allclose(out[:, 5:], tail, atol=1e-5)


def test_the_scale_can_be_given():
    q, k, v, g, _ = inputs()
    half = quick(partial(gated_linear_attention, scale=0.5))(q, k, v, g)
    one = quick(partial(gated_linear_attention, scale=1.0))(q, k, v, g)
    np.testing.assert_allclose(half, 0.5 * one, atol=1e-6)


def test_bfloat16_stays_bfloat16_and_the_state_is_float32():
    q, k, v, g = (x.astype(jnp.bfloat16) for x in inputs()[:4])
    out, state = gated_linear_attention(q, k, v, g, return_state=True)
    assert out.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    wanted = gated_linear_attention_reference(*(x.astype(jnp.float32) for x in (q, k, v, g)))
    np.testing.assert_allclose(out.astype(jnp.float32), wanted, rtol=1e-2, atol=2e-2)


def test_vmap():
    q, k, v, g, _ = inputs()
    stacked = [jnp.stack([x, 2 * x]) for x in (q, k, v)]
    out = quick(jax.vmap(gated_linear_attention, (0, 0, 0, None)))(*stacked, g)
    np.testing.assert_allclose(out[1], 8 * out[0], rtol=1e-4, atol=1e-5)
    wanted = quick(gated_linear_attention_reference)(q, k, v, g)
    np.testing.assert_allclose(out[0], wanted, atol=1e-5)


def test_it_is_labelled():
    q, k, v, g, _ = inputs()
    (label,) = find_labels_in_lowered(jax.jit(gated_linear_attention).lower(q, k, v, g))
    assert label.startswith("ejkernel_ops#gated_linear_attention@v1:")


@pytest.mark.parametrize(
    ("implementation", "dim", "reason"),
    [
        ("pallas", 7, "key_dim is 7; it must be a multiple of 8 and at most 256"),
        ("triton", 24, "key_dim is 24; it must be a power of two from 16 to 128"),
        ("triton", 64, None),
    ],
)
def test_implementations_say_what_they_cannot_serve(implementation, dim, reason):
    kernel = GatedLinearAttention()
    q, k, v, g, _ = inputs(dim=dim, length=1)
    reasons = kernel.implementation(implementation).supports.reasons_against(
        kernel.bind(q, k, v, g, scale=1.0)
    )
    assert reasons == ([] if reason is None else [reason])


def test_an_implementation_of_another_device_is_refused():
    q, k, v, g, _ = inputs(length=1)
    with pytest.raises(NotSupported, match="it runs on tpu devices"):
        gated_linear_attention(q, k, v, g, implementation="pallas")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": jnp.ones((2, 3, 4))}, ValueError, ["q has shape (2, 3, 4)", "four axes"]),
        ({"k": jnp.ones((2, 21, 2, 4))}, ValueError, ["k has shape (2, 21, 2, 4)", "that of q"]),
        ({"v": jnp.ones((2, 20, 2, 8))}, ValueError, ["v has shape (2, 20, 2, 8)", "length"]),
        ({"g": jnp.ones((2, 21))}, ValueError, ["g has shape (2, 21)", "per head"]),
        ({"q": jnp.ones((2, 21, 2, 8), int)}, TypeError, ["q is int32", "floating"]),
        ({"v": jnp.ones((2, 21, 2, 0))}, ValueError, ["v has shape", "empty"]),
        ({"initial_state": jnp.ones((2, 2, 8))}, ValueError, ["(2, 2, 8, 8)"]),
        ({"segment_ids": jnp.ones((2, 21))}, TypeError, ["segment_ids is float32"]),
        ({"segment_ids": jnp.ones((2, 20), int)}, ValueError, ["segment_ids has shape (2, 20)"]),
        ({"return_state": "yes"}, TypeError, ["return_state", "'yes'"]),
    ],
)
def test_bad_input_is_named(change, error, words):
    q, k, v, g, _ = inputs()
    with pytest.raises(error) as caught:
        gated_linear_attention(**{"q": q, "k": k, "v": v, "g": g, **change})
    for word in ["gated_linear_attention", *words]:
        assert word in str(caught.value)
