"""RMS norm and layer norm: every implementation against the naive one, by value and gradient."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import targets
from ejkernel.kernels.norm import (
    LayerNorm,
    NormGpuConfig,
    NormTpuConfig,
    NormXlaConfig,
    RmsNorm,
    layer_norm_reference,
    rms_norm_reference,
)
from ejkernel.modules import layer_norm, rms_norm, support_table
from ejkernel.ops import Kernel, NotSupported
from ejkernel.targets.lowering import standing_on

OPERATIONS = {
    "rms_norm": (rms_norm, rms_norm_reference),
    "layer_norm": (layer_norm, layer_norm_reference),
}
KERNELS = {"rms_norm": RmsNorm(), "layer_norm": LayerNorm()}
PALLAS = {
    "pallas": NormTpuConfig(block_m=8, backward_block_m=8),
    "triton": NormGpuConfig(block_m=4, backward_block_m=4),
}


def blocks(rows):
    return NormXlaConfig(backward_block_m=rows)


def arrays_of(shape, options, dtype=jnp.float32, weights=jnp.float32):
    """The arrays of a call by name; values away from the mean that layer norm subtracts."""
    numbers = np.random.default_rng(len(shape) + shape[-1])
    made = {"x": jnp.asarray(numbers.standard_normal(shape) * 2 + 1, dtype)}
    for name in ("weight", "bias"):
        if name in options:
            made[name] = jnp.asarray(numbers.standard_normal(shape[-1]) + 1, weights)
    if "residual" in options:
        made["residual"] = jnp.asarray(numbers.standard_normal(shape), dtype)
    return made


def value_and_gradients(function, arrays):
    """The outputs, and the gradients of every array against fixed random weights of the outputs."""

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(arrays):
        out, pull_back = jax.vjp(lambda arrays: function(**arrays), arrays)
        leaves, structure = jax.tree.flatten(out)
        numbers = np.random.default_rng(5)
        cotangent = [jnp.asarray(numbers.standard_normal(o.shape), o.dtype) for o in leaves]
        return out, pull_back(jax.tree.unflatten(structure, cotangent))[0]

    return run(arrays)


def assert_same(got, wanted, tolerance=3e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        where = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), where
        one, other = (np.asarray(a, np.float64) for a in (x, y))
        scale = max(1.0, float(np.max(np.abs(other))))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale, err_msg=where)


def options_of(operation):
    names = ("weight", "bias", "residual") if operation == "layer_norm" else ("weight", "residual")
    return [set(c) for n in range(len(names) + 1) for c in itertools.combinations(names, n)]


EVERY = [(operation, frozenset(o)) for operation in OPERATIONS for o in options_of(operation)]
every = pytest.mark.parametrize(
    ("operation", "options"), EVERY, ids=[f"{o}-{'-'.join(sorted(s)) or 'plain'}" for o, s in EVERY]
)


@every
def test_xla_equals_the_reference(operation, options):
    ours, naive = OPERATIONS[operation]
    arrays = arrays_of((3, 7, 12), options)
    offset = {"weight_offset": 1.0} if "weight" in options else {}
    wanted = value_and_gradients(partial(naive, eps=1e-3, **offset), arrays)
    for cfg in (None, blocks(4)):  # 21 rows: five blocks and a rest of one
        got = value_and_gradients(partial(ours, eps=1e-3, cfg=cfg, **offset), arrays)
        assert_same(got, wanted)


@given(
    operation=st.sampled_from(sorted(OPERATIONS)),
    leading=st.lists(st.integers(1, 5), max_size=3),
    features=st.integers(1, 40),
    rows=st.one_of(st.none(), st.integers(1, 20)),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    options=st.sets(st.sampled_from(["weight", "bias", "residual"])),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_any_shape(operation, leading, features, rows, dtype, options):
    ours, naive = OPERATIONS[operation]
    options = options if operation == "layer_norm" else options - {"bias"}
    arrays = arrays_of((*leading, features), options, dtype)
    cfg = None if rows is None else blocks(rows)
    wanted = value_and_gradients(partial(naive, eps=1e-2), arrays)
    got = value_and_gradients(partial(ours, eps=1e-2, cfg=cfg), arrays)
    # A gradient that is a difference of larger terms is as exact as the dtype of its output.
    assert_same(got, wanted, tolerance={jnp.float32: 5e-5, jnp.float16: 4e-3}.get(dtype, 3e-2))


# --- Pallas --------------------------------------------------------------------------------------


def interpreted(operation, name):
    """The operation by an interpreted kernel, with the gradient of that."""
    item = dataclasses.replace(KERNELS[operation].implementation(name), devices=None)

    class Interpreted(Kernel):
        implementations = (item,)

    kernel = Interpreted(name=f"interpreted_{operation}")
    return lambda x, weight=None, **options: kernel(
        x, *([] if weight is None else [weight]), cfg=PALLAS[name], eps=1e-3, **options
    )


@pytest.mark.usefixtures("interpreted_pallas")
@pytest.mark.parametrize("name", PALLAS)
@pytest.mark.parametrize(
    ("operation", "options", "shape", "dtype"),
    [
        ("rms_norm", {"weight"}, (2, 10, 20), jnp.float32),
        ("rms_norm", {"weight", "residual"}, (13, 32), jnp.float32),
        ("rms_norm", set(), (1, 7), jnp.float32),
        ("layer_norm", {"weight", "bias", "residual"}, (19, 20), jnp.float32),
        ("layer_norm", {"bias"}, (16, 20), jnp.float32),
        ("layer_norm", {"weight", "bias"}, (9, 33), jnp.bfloat16),
    ],
)
def test_interpreted_pallas_equals_the_reference(name, operation, options, shape, dtype):
    ours = interpreted(operation, name)
    arrays = arrays_of(shape, options, dtype)
    offset = {"weight_offset": 1.0} if "weight" in options else {}
    wanted = value_and_gradients(partial(OPERATIONS[operation][1], eps=1e-3, **offset), arrays)
    got = value_and_gradients(partial(ours, **offset), arrays)
    assert_same(got, wanted, tolerance=3e-2 if dtype == jnp.bfloat16 else 3e-5)


@pytest.mark.parametrize("target", ["tpu-v5e", "cuda-sm80"])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_pallas_lowers(target, operation):
    kernel = KERNELS[operation]
    platform, suffix = {"tpu": ("tpu", "pallas"), "cud": ("cuda", "triton")}[target[:3]]
    x = jax.ShapeDtypeStruct((3, 100, 768), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((768,), jnp.float32)
    inv = kernel.bind(x, weight, eps=1e-6, residual=x)
    implementation = kernel.implementation(suffix)
    for cfg in implementation.space(inv)[:2]:

        def both(x, weight, residual, dout, cfg=cfg):
            options = {"residual": residual, "cfg": cfg, "eps": 1e-6}
            _, saved = implementation.forward_with_residuals(x, weight, **options)
            return implementation.backward(saved, None, (dout, dout), x, weight, **options)

        with standing_on(targets.find(target)):  # newer JAX asks which GPU it is
            traced = jax.jit(both).trace(x, weight, x, x)
            assert "custom_call" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_heuristics_are_among_what_is_allowed():
    kernel = KERNELS["rms_norm"]
    for rows, features in ((1, 1), (7, 100), (4096, 1024), (100_000, 16384)):
        inv = kernel.bind(jax.ShapeDtypeStruct((rows, features), jnp.bfloat16), eps=1e-6)
        for item in kernel.implementations:
            configs = [item.heuristic(inv), *item.space(inv)]
            assert len(configs) > 1
            assert [item.limits.reasons_against(cfg, inv) for cfg in configs] == [[]] * len(configs)
        assert kernel.implementation("xla").heuristic(inv).backward_block_m <= rows


# --- the functions users call --------------------------------------------------------------------


def test_large_means_do_not_spoil_layer_norm():
    x = jax.random.normal(jax.random.key(0), (64, 256)) + 1000.0
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    np.testing.assert_allclose(layer_norm(x, eps=0.0), exact, atol=1e-3)
    dx = jax.grad(lambda x: (layer_norm(x, eps=0.0) ** 3).sum())(x)
    dc = jax.grad(lambda x: (layer_norm(x, eps=0.0) ** 3).sum())(x - 1000.0)
    np.testing.assert_allclose(dx, dc, atol=2e-3)


def test_it_works_under_transformations():
    x = jax.random.normal(jax.random.key(1), (4, 5, 16))
    w = jnp.linspace(0.5, 2.0, 16)
    wanted = rms_norm_reference(x, weight=w)
    np.testing.assert_allclose(jax.vmap(lambda x: rms_norm(x, w))(x), wanted, atol=1e-5)
    by_row = jax.vmap(jax.grad(lambda w, x: rms_norm(x, w).sum()), (None, 0))(w, x)
    naive = jax.vmap(jax.grad(lambda w, x: rms_norm_reference(x, weight=w).sum()), (None, 0))(w, x)
    np.testing.assert_allclose(by_row, naive, atol=1e-4)
    remat = jax.grad(jax.checkpoint(lambda x: (rms_norm(x, w) ** 2).sum()))(x)
    naive = jax.grad(lambda x: (rms_norm_reference(x, weight=w) ** 2).sum())(x)
    np.testing.assert_allclose(remat, naive, atol=1e-4)


def test_the_output_is_not_kept_for_the_gradient():
    x = jnp.ones((64, 256))
    _, pull_back = jax.vjp(lambda x: rms_norm(x, jnp.ones(256)), x)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(pull_back) if hasattr(leaf, "nbytes"))
    assert stored < 1.5 * x.nbytes


def test_options_have_defaults_that_mean_nothing_is_done():
    x = jnp.array([[1.0, -1.0, 1.0, 1.0]])
    np.testing.assert_allclose(rms_norm(x, eps=0.0), x, atol=1e-6)
    assert rms_norm(x.astype(jnp.bfloat16), jnp.ones(4)).dtype == jnp.bfloat16
    assert rms_norm(x[0], jnp.ones(4)).shape == (4,)


@pytest.mark.parametrize(
    ("error", "said", "call"),
    [
        (ValueError, r"x has shape \(\)", lambda x: rms_norm(jnp.float32(1))),
        (ValueError, "no empty axis", lambda x: rms_norm(x[:0])),
        (TypeError, "x is int32", lambda x: rms_norm(x.astype(int))),
        (
            ValueError,
            r"weight has shape \(3,\).*must be \(4,\)",
            lambda x: rms_norm(x, jnp.ones(3)),
        ),
        (ValueError, r"bias has shape \(2, 4\)", lambda x: layer_norm(x, bias=x)),
        (TypeError, "bias is int32", lambda x: layer_norm(x, bias=jnp.arange(4))),
        (ValueError, r"residual is float32\[1, 4\]", lambda x: rms_norm(x, residual=x[:1])),
        (ValueError, "residual is bfloat16", lambda x: rms_norm(x, residual=x.astype("bfloat16"))),
        (ValueError, "eps=-1", lambda x: rms_norm(x, eps=-1.0)),
        (TypeError, "eps must be a number", lambda x: rms_norm(x, eps=x)),
        (ValueError, "none is given", lambda x: rms_norm(x, weight_offset=1.0)),
        (NotSupported, "pallas", lambda x: rms_norm(x, implementation="pallas")),
    ],
)
def test_bad_input_is_named(error, said, call):
    with pytest.raises(error, match=said):
        call(jnp.ones((2, 4)))


def test_what_is_supported_is_printed():
    x = jax.ShapeDtypeStruct((2, 20_000), jnp.float32)
    table = str(support_table("rms_norm", x, eps=1e-6))
    assert "xla" in table
    assert "yes" in table
