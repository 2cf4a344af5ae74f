"""Every implementation of gated linear attention versus the recurrence, by value and gradient."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import targets
from ejkernel.kernels.gated_linear_attention import (
    GatedLinearAttention,
    GatedLinearAttentionGpuConfig,
    GatedLinearAttentionTpuConfig,
    GatedLinearAttentionXlaConfig,
    gated_linear_attention_reference,
    pallas_gpu,
    pallas_tpu,
    steps,
    xla,
)
from ejkernel.targets.lowering import standing_on

NAMES = ("out", "state", "dq", "dk", "dv", "dg", "dinitial")
SCALE = 0.3
quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def inputs(
    batch=2, length=37, heads=3, key_dim=8, value_dim=5, decay="channel", strength=0.3, seed=0
) -> tuple[Any, ...]:
    """`q, k, v, g, initial_state, dout, dstate`, in float64."""
    random = np.random.default_rng(seed)
    keys, values = (batch, length, heads, key_dim), (batch, length, heads, value_dim)
    state = (batch, heads, key_dim, value_dim)
    shapes = {"channel": keys, "head": keys[:3]}
    g = -random.gamma(0.3, strength, shapes[decay]) if decay in shapes else None
    q, k, v, start, dout, dstate = (
        random.normal(size=shape) for shape in (keys, keys, values, state, values, state)
    )
    return q, k, v, g, start, dout, dstate


def expected(arrays) -> tuple[Any, ...]:
    """The recurrence and JAX's own gradients of it, in float64."""
    with jax.enable_x64(True):
        q, k, v, g, start, dout, dstate = jax.tree.map(jnp.asarray, arrays)

        def run(q, k, v, g, start):
            return gated_linear_attention_reference(
                q, k, v, g, scale=SCALE, initial_state=start, return_state=True
            )

        def both(q, k, v, g, start, dout, dstate):
            results, pull_back = jax.vjp(run, q, k, v, g, start)
            return *results, *pull_back((dout, dstate))

        return jax.tree.map(np.asarray, quick(both)(q, k, v, g, start, dout, dstate))


def assert_same(got, wanted, tolerance=3e-6) -> None:
    for name, x, y in zip(NAMES, got, wanted, strict=True):
        if y is None:
            assert x is None
            continue
        assert x.shape == y.shape, name
        largest = max(1e-6, np.abs(y).max())
        np.testing.assert_allclose(
            np.asarray(x, np.float64) / largest, y / largest, atol=tolerance, err_msg=name
        )


def run(arrays, passes, cfg) -> tuple[Any, ...]:
    """Results and gradients, by the two passes of an implementation."""

    def both(q, k, v, g, start, dout, dstate):
        options = {"cfg": cfg, "scale": SCALE, "initial_state": start, "return_state": True}
        tokens = (q, k, v) if g is None else (q, k, v, g)
        results, residuals = passes.forward_with_residuals(*tokens, **options)
        *gradients, last = passes.backward(residuals, None, (dout, dstate), *tokens, **options)
        dg = gradients[3] if g is not None else None
        return *results, *gradients[:3], dg, last["initial_state"]

    return quick(both)(*float32(arrays))


def run_xla(arrays, chunk_size, rows=64) -> tuple[Any, ...]:
    return run(arrays, xla.XLA, xla_config(chunk_size, rows))


def xla_config(chunk_size, rows) -> GatedLinearAttentionXlaConfig:
    return GatedLinearAttentionXlaConfig(chunk_size, rows, chunk_size, rows)


PALLAS = {
    "pallas": (pallas_tpu.PALLAS_TPU, GatedLinearAttentionTpuConfig(chunk_size=8)),
    "triton": (pallas_gpu.PALLAS_GPU, GatedLinearAttentionGpuConfig(chunk_size=8, block_v=8)),
}


def float32(arrays):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)


@pytest.mark.parametrize(
    ("decay", "strength"), [("channel", 0.3), ("channel", 60.0), ("head", 60.0), ("none", 1.0)]
)
def test_steps_and_chunks_equal_the_recurrence(decay, strength):
    arrays = inputs(decay=decay, strength=strength)
    wanted = expected(arrays)
    for chunk_size, rows in ((1, 64), (1, 4), (16, 1)):
        assert_same(run_xla(arrays, chunk_size, rows), wanted)


@pytest.mark.usefixtures("interpreted_pallas")
@pytest.mark.parametrize("name", PALLAS)
@pytest.mark.parametrize("decay", ["channel", "head", "none"])
def test_interpreted_pallas_equals_the_recurrence(decay, name):
    arrays = inputs(1, 21, 2, 8, 16, decay=decay, strength=5.0)
    assert_same(run(arrays, *PALLAS[name]), expected(arrays))


@settings(max_examples=4, deadline=None)
@given(
    length=st.integers(1, 40),
    heads=st.integers(1, 3),
    key_dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    decay=st.sampled_from(["channel", "head"]),
    strength=st.sampled_from([0.01, 1.0, 1000.0]),
    chunk_size=st.sampled_from([1, 4, 32]),
)
def test_any_sizes(length, heads, key_dim, value_dim, decay, strength, chunk_size):
    arrays = inputs(1, length, heads, key_dim, value_dim, decay, strength)
    assert_same(run_xla(arrays, chunk_size, rows=2), expected(arrays))


def test_several_segments_of_steps(monkeypatch):
    """Rows that are long enough for the backward pass to keep states on the way."""
    monkeypatch.setattr(steps, "SEGMENT", 8)
    arrays = inputs(length=37)
    assert_same(run_xla(arrays, 1), expected(arrays))


@pytest.mark.parametrize("chunk_size", [1, 16])
@pytest.mark.parametrize("decay", ["channel", "head"])
def test_small_decays_behind_large_ones_are_not_lost(decay, chunk_size):
    """Differences of running sums would have forgotten them: 1e30 + 0.1 is 1e30."""
    q, k, v, g, start, dout, dstate = inputs(decay=decay)
    g[:, 5] = -1e30
    g[:, 9] = -3000.0
    arrays = (q, k, v, g, start, dout, dstate)
    assert_same(run_xla(arrays, chunk_size), expected(arrays))


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_half_precision_is_computed_in_float32(chunk_size):
    arrays = [x.astype(jnp.bfloat16) for x in float32(inputs())]
    options = {"scale": SCALE, "cfg": xla_config(chunk_size, 8), "return_state": True}
    *tokens, start = arrays[:5]
    out, state = quick(partial(xla.XLA.forward, **options))(*tokens, initial_state=start)
    assert out.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    wanted = expected([np.asarray(x, np.float64) for x in arrays])
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(state, wanted[1], rtol=1e-5, atol=1e-5)


def test_memory_of_the_gradient_is_linear_in_the_length():
    """One state per step would take 64 MiB; all temporaries together take less than 12."""

    def run(q, k, v, g, dout):
        return xla.XLA.backward(None, None, dout, q, k, v, g, scale=1.0, cfg=xla_config(1, 1))

    shape = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.float32)
    memory = jax.jit(run).lower(*[shape] * 5).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 12 * 2**20


@pytest.mark.parametrize("decay", ["channel", "head", "none"])
@pytest.mark.parametrize(
    ("target", "platform", "name"),
    [("tpu-v5e", "tpu", "pallas"), ("cuda-sm80", "cuda", "triton")],
    ids=["tpu", "cuda"],
)
def test_pallas_lowers(target, platform, name, decay):
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    tokens, state = shape(1, 100, 2, 64), shape(1, 2, 64, 64)
    g = {"channel": [tokens], "head": [shape(1, 100, 2)], "none": []}[decay]
    cfg = dataclasses.replace(PALLAS[name][1], chunk_size=32)
    implementation = GatedLinearAttention().implementation(name)
    forward, backward = (
        jax.jit(partial(run, cfg=cfg, scale=1.0, return_state=True))
        for run in (implementation.forward, implementation.backward)
    )
    inputs, states = (tokens, tokens, tokens, *g), shape(2, 4, 64, 64)
    with standing_on(targets.find(target)):
        for traced in (
            forward.trace(*inputs, initial_state=state),
            backward.trace(states, None, (tokens, state), *inputs, initial_state=state),
        ):
            traced.lower(lowering_platforms=(platform,))


def test_candidates_are_different_and_agree():
    kernel = GatedLinearAttention()
    q, k, v, g, *_ = float32(inputs(heads=4, length=9))
    inv = kernel.bind(q, k, v, g, scale=SCALE)
    candidates = kernel.candidates(inv)
    assert len(set(candidates)) == len(candidates) > 4
    assert xla.XLA.heuristic(inv) in candidates
    wanted = quick(partial(gated_linear_attention_reference, scale=SCALE))(q, k, v, g)
    for cfg in candidates:
        assert isinstance(cfg, GatedLinearAttentionXlaConfig)
        out = quick(partial(xla.XLA.forward, cfg=cfg, scale=SCALE))(q, k, v, g)
        np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_the_tuner_is_given_decays():
    kernel = GatedLinearAttention()
    q, k, v, g, start, *_ = float32(inputs())
    inv = kernel.bind(q, k, v, g, scale=SCALE, initial_state=start)
    args, kwargs = kernel.make_inputs(inv, jax.random.key(0))
    assert [x.shape for x in args] == [x.shape for x in (q, k, v, g)]
    assert float(args[3].max()) < 0
    assert kwargs["initial_state"].shape == start.shape
    assert kwargs["scale"] == SCALE
