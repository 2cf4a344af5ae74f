"""Gated linear units: every implementation against the naive one, values and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import targets
from ejkernel.kernels.gated_linear_unit import (
    ACTIVATIONS,
    GatedLinearUnit,
    GatedLinearUnitGpuConfig,
    GatedLinearUnitTpuConfig,
    GatedLinearUnitXlaConfig,
    gated_linear_unit_reference,
    pallas_gpu,
    pallas_tpu,
)
from ejkernel.kernels.gated_linear_unit.arguments import Arguments
from ejkernel.kernels.gated_linear_unit.xla import backward
from ejkernel.kernels.implementations import implementation_of
from ejkernel.modules import gated_linear_unit
from ejkernel.ops import NotSupported
from ejkernel.targets.lowering import standing_on

PALLAS = {
    "pallas": (pallas_tpu, GatedLinearUnitTpuConfig(16, 16, 16, backward_block_m=8)),
    "triton": (pallas_gpu, GatedLinearUnitGpuConfig(16, 16, 16, backward_block_m=8)),
}
FAST_COMPILE: Any = {"xla_backend_optimization_level": 0}


def inputs(m, k, n, dtype=jnp.float32, *, stacked=False):
    """x, the weights, two biases and a gradient of the output."""
    numbers = np.random.default_rng(m + k + n)
    weights = [(k, 2 * n)] if stacked else [(k, n), (k, n)]
    shapes = [(m, k), *weights, (n,), (n,), (m, n)]
    arrays = [jnp.asarray(numbers.standard_normal(shape), dtype) for shape in shapes]
    return arrays[0], tuple(arrays[1:-3]), tuple(arrays[-3:-1]), arrays[-1]


def value_and_gradients(function, dout, *arrays):
    def run(dout, *arrays):
        out, pull_back = jax.vjp(function, *arrays)
        return [out, *pull_back(dout)]

    return jax.jit(run, compiler_options=FAST_COMPILE)(dout, *arrays)


def assert_close(got, expected, tolerance=2e-5):
    assert len(got) == len(expected)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        limit = tolerance * max(1.0, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=limit, err_msg=str(index))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_gradients(activation):
    x, weights, _, dout = inputs(9, 5, 7)
    got = value_and_gradients(partial(gated_linear_unit, activation=activation), dout, x, *weights)
    expected = value_and_gradients(
        partial(gated_linear_unit_reference, activation=activation), dout, x, *weights
    )
    assert_close(got, expected)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("silu", jax.nn.silu),
        ("gelu", partial(jax.nn.gelu, approximate=False)),
        ("gelu_tanh", jax.nn.gelu),
        ("relu", jax.nn.relu),
    ],
)
def test_activations_are_those_of_jax(name, plain):
    x = jnp.linspace(-4.0, 4.0, 101)
    np.testing.assert_allclose(ACTIVATIONS[name](x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_biases_and_recomputation(stacked, recompute):
    x, weights, biases, dout = inputs(23, 6, 10, stacked=stacked)
    cfg = GatedLinearUnitXlaConfig(block_m=8, backward_block_m=8)  # of 23 rows 7 are left over

    def ours(x, b_gate, b_up, *weights):
        options = {"b_gate": b_gate, "b_up": b_up, "recompute": recompute, "cfg": cfg}
        return gated_linear_unit(x, *weights, **options)

    def naive(x, b_gate, b_up, *weights):
        return gated_linear_unit_reference(x, *weights, activation="silu", b_gate=b_gate, b_up=b_up)

    arrays = (x, *biases, *weights)
    assert_close(
        value_and_gradients(ours, dout, *arrays), value_and_gradients(naive, dout, *arrays)
    )
    np.testing.assert_allclose(ours(*arrays), naive(*arrays), rtol=1e-4, atol=1e-4)


def test_shapes_of_inputs_and_of_a_stack():
    x, (w_gate, w_up), (b_gate, b_up), _ = inputs(12, 4, 6)
    expected = gated_linear_unit(x, w_gate, w_up, b_gate=b_gate, b_up=b_up)
    wide = gated_linear_unit(
        x, jnp.concatenate([w_gate, w_up], 1), b_gate=jnp.concatenate([b_gate, b_up])
    )
    deep = gated_linear_unit(
        x.reshape(2, 3, 2, 4), jnp.stack([w_gate, w_up], 1), b_gate=jnp.stack([b_gate, b_up])
    )
    one = gated_linear_unit(x[0], w_gate, w_up, b_gate=b_gate, b_up=b_up)
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(deep.reshape(12, 6), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one, expected[0], rtol=1e-5, atol=1e-5)


def test_low_precision():
    x, weights, _, dout = inputs(16, 64, 8, jnp.bfloat16)
    got = value_and_gradients(gated_linear_unit, dout, x, *weights)
    expected = value_and_gradients(
        partial(gated_linear_unit_reference, activation="silu"), dout, x, *weights
    )
    assert_close(got, expected, 2e-2)


def test_recomputation_saves_memory():
    x, weights, _, dout = inputs(2048, 16, 256)

    def temporary(recompute):
        def run(x, w_gate, w_up, dout):
            out, pull_back = jax.vjp(
                partial(gated_linear_unit, recompute=recompute), x, w_gate, w_up
            )
            return out, pull_back(dout)

        compiled = jax.jit(run).lower(x, *weights, dout).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(True) < 0.7 * temporary(False)


# --- Pallas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", PALLAS)
def test_interpreted_kernels_equal_the_reference(name, stacked):
    x, weights, biases, _ = inputs(21, 24, 32, stacked=stacked)
    module, cfg = PALLAS[name]

    def pallas(x, *weights):
        options = dict(zip(("b_gate", "b_up"), biases, strict=True))
        call = Arguments.of(x, *weights, activation="gelu", **options)
        return module.project(call, cfg, save=True, interpret=True)

    expected = gated_linear_unit_reference(
        x, *weights, activation="gelu", b_gate=biases[0], b_up=biases[1]
    )
    w_gate, w_up = weights if not stacked else jnp.split(weights[0], 2, axis=1)
    out, (gate, up) = jax.jit(pallas, compiler_options=FAST_COMPILE)(x, *weights)
    assert_close([out], [expected])
    assert_close([gate, up], [x @ w_gate + biases[0], x @ w_up + biases[1]])


@pytest.mark.parametrize("name", PALLAS)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_the_pallas_implementations(name, recompute):
    module, cfg = PALLAS[name]
    project = partial(module.project, interpret=True)
    item = implementation_of(Arguments.of, project, backward, name=name)
    x, weights, biases, dout = inputs(19, 16, 16)
    options = {
        "activation": "silu",
        "recompute": recompute,
        **dict(zip(("b_gate", "b_up"), biases, strict=True)),
    }

    def run(x, *weights):
        out, saved = item.forward_with_residuals(x, *weights, cfg=cfg, **options)
        *gradients, named = item.backward(saved, None, dout, x, *weights, cfg=cfg, **options)
        return [out, *gradients, named["b_gate"], named["b_up"]]

    got = jax.jit(run, compiler_options=FAST_COMPILE)(x, *weights)
    expected = value_and_gradients(
        lambda x, a, b, c, d: gated_linear_unit_reference(
            x, a, b, activation="silu", b_gate=c, b_up=d
        ),
        dout,
        x,
        *weights,
        *biases,
    )
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("platform", "suffix", "target"),
    [("tpu", "pallas", "tpu-v5e"), ("cuda", "triton", "cuda-sm80")],
)
def test_configs_and_activations_lower(platform, suffix, target, stacked, dtype):
    kernel = GatedLinearUnit()
    weights = [(320, 512)] if stacked else [(320, 256), (320, 256)]
    call = [jax.ShapeDtypeStruct(shape, dtype) for shape in [(1000, 320), *weights]]
    inv = kernel.bind(*call, activation="silu")
    implementation = kernel.implementation(suffix)
    configs, ahead = implementation.space(inv), implementation.forward_with_residuals
    for cfg, activation in zip(configs[:: len(configs) // 5], ACTIVATIONS, strict=False):
        run = jax.jit(partial(ahead, cfg=cfg, activation=activation))
        with standing_on(targets.find(target)):
            run.trace(*call).lower(lowering_platforms=(platform,))


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": jnp.ones((3, 5))}, ValueError, ["x (3, 5)", "w_gate (4, 6)", "equal"]),
        ({"x": jnp.ones((3, 4), int)}, TypeError, ["x is int", "floating"]),
        ({"w_up": jnp.ones((4, 7))}, ValueError, ["w_gate", "(4, 6)", "w_up", "(4, 7)"]),
        ({"w_up": None, "w_gate": jnp.ones((4, 7))}, ValueError, ["(4, 7)", "(k, 2, n)"]),
        ({"w_up": jnp.ones((4, 6), jnp.bfloat16)}, TypeError, ["w_up bfloat16", "cast"]),
        ({"activation": "sine"}, ValueError, ["'sine'", "'silu'", "'gelu'"]),
        ({"b_gate": jnp.ones((5,))}, ValueError, ["b_gate", "(5,)", "(6,)"]),
        ({"b_up": jnp.ones((6,), int)}, TypeError, ["b_up is int"]),
        ({"precision": "exact"}, ValueError, ["precision", "'exact'"]),
        ({"recompute": 2}, TypeError, ["recompute", "2"]),
        ({"w_gate": jnp.ones((4, 0))}, ValueError, ["w_gate", "(4, 0)", "empty"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_named(change, error, words):
    arguments: dict[str, Any] = {
        "x": jnp.ones((3, 4)),
        "w_gate": jnp.ones((4, 6)),
        "w_up": jnp.ones((4, 6)),
    }
    with pytest.raises(error) as raised:
        gated_linear_unit(**{**arguments, **change})
    for word in ("gated_linear_unit", *words):
        assert word in str(raised.value)


def test_a_requested_implementation_that_cannot_run_says_why():
    with pytest.raises(NotSupported, match="this is a cpu"):
        gated_linear_unit(jnp.ones((3, 4)), jnp.ones((4, 6)), implementation="triton")
