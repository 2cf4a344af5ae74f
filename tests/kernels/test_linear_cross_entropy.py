"""The loss without logits: every implementation against the naive one, by value and gradient."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import targets
from ejkernel.kernels.linear_cross_entropy import (
    LinearCrossEntropy,
    LinearCrossEntropyGpuConfig,
    LinearCrossEntropyTpuConfig,
    LinearCrossEntropyXlaConfig,
    linear_cross_entropy_reference,
    pallas_gpu,
    pallas_tpu,
)
from ejkernel.kernels.linear_cross_entropy.arguments import Arguments, Sizes
from ejkernel.modules import linear_cross_entropy
from ejkernel.ops import NotSupported
from ejkernel.targets.lowering import standing_on

KERNEL = LinearCrossEntropy()
IGNORED = -100


# Most of a test is compiling.
quickly = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def small(rows, vocab):
    """Blocks so small that a test has several of them."""
    return LinearCrossEntropyXlaConfig(rows, rows, vocab)


def arrays_of(shape=(21,), features=6, vocab=19, *, vocab_first=False, bias=False, dtype="float32"):
    numbers = np.random.default_rng(sum(shape) + features + vocab)
    weight = numbers.standard_normal((vocab, features) if vocab_first else (features, vocab))
    made = {
        "hidden": jnp.asarray(numbers.standard_normal((*shape, features)), dtype),
        "weight": jnp.asarray(weight, dtype),
    }
    if bias:
        made["bias"] = jnp.asarray(numbers.standard_normal(vocab), dtype)
    labels = numbers.integers(0, vocab, shape)
    labels = np.where(numbers.random(shape) < 0.3, IGNORED, labels)
    return made, jnp.asarray(labels)


def value_and_gradients(function, arrays, labels, factor=1.7):
    """The loss and the gradients of all arrays; the loss is used with a factor, as in a model."""

    @quickly
    def run(arrays, labels):
        def loss(arrays):
            found = function(**arrays, labels=labels)
            weights = jnp.cos(jnp.arange(found.size, dtype=found.dtype)).reshape(found.shape)
            return (factor * weights * found).sum(), found

        gradients, found = jax.grad(loss, has_aux=True)(arrays)
        return found, gradients

    return run(arrays, labels)


def assert_same(got, wanted, tolerance=2e-5):
    leaves = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in leaves:
        where = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), where
        one, other = (np.asarray(a, np.float64) for a in (x, y))
        scale = max(1.0, float(np.max(np.abs(other))))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale, err_msg=where)


EVERYTHING = {
    "label_smoothing": 0.1,
    "logits_soft_cap": 3.0,
    "z_loss": 0.01,
    "softmax_scale": 0.7,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, False),
        ({"vocab_first": True}, True),
        ({"label_smoothing": 0.2, "softmax_scale": 2.0}, False),
        ({"logits_soft_cap": 2.0, "z_loss": 0.1}, True),
        ({**EVERYTHING, "vocab_first": True}, True),
    ],
    ids=str,
)
def test_xla_equals_the_reference(reduction, options, bias):
    options = {**options, "reduction": reduction}
    vocab_first = options.get("vocab_first", False)
    arrays, labels = arrays_of((3, 7), vocab_first=vocab_first, bias=bias)
    wanted = value_and_gradients(partial(linear_cross_entropy_reference, **options), arrays, labels)
    # One block; then three blocks of rows, and two of words with a rest.
    for cfg in (None, small(8, 8)) if reduction == "mean" else (small(8, 8),):
        ours = partial(linear_cross_entropy, cfg=cfg, **options)
        assert_same(value_and_gradients(ours, arrays, labels), wanted)


@given(
    shape=st.lists(st.integers(1, 6), max_size=2),
    features=st.integers(1, 9),
    vocab=st.integers(1, 40),
    blocks=st.tuples(st.integers(1, 20), st.integers(1, 50)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    names=st.sets(st.sampled_from(sorted(EVERYTHING))),
    flags=st.tuples(st.booleans(), st.booleans()),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_any_shape(shape, features, vocab, blocks, dtype, names, flags, reduction):
    vocab_first, bias = flags
    options = {name: EVERYTHING[name] for name in names} | {"reduction": reduction}
    options |= {"vocab_first": vocab_first}
    arrays, labels = arrays_of(
        tuple(shape), features, vocab, vocab_first=vocab_first, bias=bias, dtype=dtype
    )
    wanted = value_and_gradients(partial(linear_cross_entropy_reference, **options), arrays, labels)
    ours = partial(linear_cross_entropy, cfg=small(*blocks), **options)
    tolerance = 3e-5 if dtype == "float32" else 3e-2
    assert_same(value_and_gradients(ours, arrays, labels), wanted, tolerance)


# --- Pallas --------------------------------------------------------------------------------------


def interpreted_tpu(hidden, weight, labels, bias=None, *, cfg, **options):
    """The kernels for TPU, interpreted, as one differentiable function of the rows."""

    def call_of(arrays):
        given = {"labels": labels, "reduction": "none", **options}
        return Arguments.of(**arrays, **given)

    @jax.custom_vjp
    def losses(arrays):
        return forward(arrays)[0]

    def forward(arrays):
        found, lse = pallas_tpu.losses(call_of(arrays), cfg, interpret=True)
        return found, (arrays, lse)

    def backward(saved, dout):
        arrays, lse = saved
        found = pallas_tpu.gradients(call_of(arrays), lse, dout, cfg, interpret=True)
        by_name = dict(zip(("hidden", "weight", "bias"), found, strict=True))
        return ({name: by_name[name].astype(a.dtype) for name, a in arrays.items()},)

    losses.defvjp(forward, backward)
    arrays = {"hidden": hidden, "weight": weight, "bias": bias}
    return losses({name: array for name, array in arrays.items() if array is not None})


PALLAS_CASES = [
    ({}, False, "float32", (21, 6, 256)),
    ({"vocab_first": True}, True, "float32", (16, 8, 200)),  # a rest of the vocabulary
    ({**EVERYTHING}, True, "float32", (13, 20, 300)),
    ({**EVERYTHING, "vocab_first": True}, False, "bfloat16", (9, 32, 130)),
    ({}, False, "float32", (5, 3, 20)),  # a vocabulary smaller than a block
]


@pytest.mark.parametrize(("options", "bias", "dtype", "sizes"), PALLAS_CASES, ids=str)
def test_interpreted_tpu_kernels_equal_the_reference(options, bias, dtype, sizes):
    n, features, vocab = sizes
    vocab_first = options.get("vocab_first", False)
    arrays, labels = arrays_of(
        (n,), features, vocab, vocab_first=vocab_first, bias=bias, dtype=dtype
    )
    naive = partial(linear_cross_entropy_reference, reduction="none", **options)
    ours = partial(interpreted_tpu, cfg=LinearCrossEntropyTpuConfig(8, 128, 8, 128), **options)
    wanted = value_and_gradients(naive, arrays, labels)
    tolerance = 3e-5 if dtype == "float32" else 3e-2
    assert_same(value_and_gradients(ours, arrays, labels), wanted, tolerance)


@pytest.mark.parametrize(("options", "bias", "dtype", "sizes"), PALLAS_CASES, ids=str)
def test_interpreted_gpu_kernel_equals_the_reference(options, bias, dtype, sizes):
    n, features, vocab = sizes
    vocab_first = options.get("vocab_first", False)
    arrays, labels = arrays_of(
        (n,), features, vocab, vocab_first=vocab_first, bias=bias, dtype=dtype
    )
    cfg = LinearCrossEntropyGpuConfig(16, 64, 16)

    @quickly
    def ours(**arrays):
        return pallas_gpu.losses(Arguments.of(**arrays, **options), cfg, interpret=True)

    @quickly
    def naive(**arrays):
        return linear_cross_entropy_reference(**arrays, reduction="none", **options)

    got, wanted = ours(**arrays, labels=labels), naive(**arrays, labels=labels)
    assert_same(got, wanted, 3e-5 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("target", ["tpu-v5e", "cuda-sm80"])
@pytest.mark.parametrize("vocab_first", [False, True])
def test_pallas_lowers(target, vocab_first):
    platform, suffix = {"tpu": ("tpu", "pallas"), "cud": ("cuda", "triton")}[target[:3]]
    hidden = jax.ShapeDtypeStruct((4, 100, 256), jnp.bfloat16)
    shape = (1000, 256) if vocab_first else (256, 1000)
    weight = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((4, 100), jnp.int32)
    bias = jax.ShapeDtypeStruct((1000,), jnp.bfloat16)
    options = {**EVERYTHING, "vocab_first": vocab_first, "reduction": "none"}
    implementation = KERNEL.implementation(suffix)
    cfg = implementation.heuristic(KERNEL.bind(hidden, weight, labels, bias=bias, **options))

    def both(hidden, weight, labels, bias, dout):
        call = {"cfg": cfg, "bias": bias, **options}
        args = (hidden, weight, labels)
        out, saved = implementation.forward_with_residuals(*args, **call)
        return out, implementation.backward(saved, None, dout, *args, **call)

    dout = jax.ShapeDtypeStruct((4, 100), jnp.float32)
    with standing_on(targets.find(target)):  # newer JAX asks which GPU it is
        traced = jax.jit(both).trace(hidden, weight, labels, bias, dout)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert {"tpu": "tpu_custom_call", "cuda": "triton"}[platform] in text


def test_default_blocks_fit_and_are_what_the_devices_want():
    for rows, features, vocab in ((1, 1, 1), (100, 768, 50257), (8192, 8192, 128_000)):
        hidden = jax.ShapeDtypeStruct((rows, features), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((features, vocab), jnp.bfloat16)
        inv = KERNEL.bind(hidden, weight, jax.ShapeDtypeStruct((rows,), jnp.int32))
        for name in ("xla", "pallas", "triton"):
            implementation = KERNEL.implementation(name)
            space = implementation.space(inv)
            assert space or name == "xla"  # one row leaves it no choice
            for cfg in (implementation.heuristic(inv), *space):
                assert not implementation.limits.reasons_against(cfg, inv)
        assert KERNEL.implementation("xla").heuristic(inv) in KERNEL.candidates(inv)
    assert not pallas_tpu.fits(64, 128, Sizes(8, 32_768, 128, 4), backward=True)


# --- the function users call ---------------------------------------------------------------------


def test_it_is_the_plain_loss():
    arrays, labels = arrays_of((2, 9), features=8, vocab=30)
    logits = arrays["hidden"] @ arrays["weight"]
    kept = labels != IGNORED
    picked = jnp.take_along_axis(logits, jnp.where(kept, labels, 0)[..., None], -1)[..., 0]
    plain = jnp.where(kept, jax.nn.logsumexp(logits, -1) - picked, 0.0)
    np.testing.assert_allclose(
        linear_cross_entropy(**arrays, labels=labels), plain.sum() / kept.sum(), rtol=1e-5
    )


def test_only_the_wanted_gradients_are_right_too():
    arrays, labels = arrays_of(features=8, vocab=30, bias=True)
    ours = partial(linear_cross_entropy, cfg=small(8, 8))
    for name in arrays:

        def loss(array, function, name=name):
            return function(**{**arrays, name: array}, labels=labels)

        got, wanted = (
            quickly(jax.grad(partial(loss, function=function)))(arrays[name])
            for function in (ours, linear_cross_entropy_reference)
        )
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored_give_zero_and_zero_gradients(reduction):
    arrays, labels = arrays_of()
    labels = jnp.full_like(labels, 7)
    ours = partial(linear_cross_entropy, reduction=reduction, ignore_index=7)
    found = value_and_gradients(ours, arrays, labels)
    assert all(float(jnp.abs(leaf).max()) == 0.0 for leaf in jax.tree.leaves(found))


def test_a_label_that_is_no_word_shows():
    arrays, labels = arrays_of()
    for bad in (19, -1):
        loss = linear_cross_entropy(**arrays, labels=labels.at[3].set(bad), reduction="none")
        assert jnp.isnan(loss[3])
        assert int(jnp.isnan(loss).sum()) == 1


def test_large_logits_do_not_overflow():
    arrays, labels = arrays_of()
    arrays["hidden"] = arrays["hidden"] * 1e4
    found = value_and_gradients(linear_cross_entropy, arrays, labels)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(found))


def test_memory_is_that_of_a_block():
    n, features, vocab = 512, 16, 4096
    hidden, weight = jnp.ones((n, features)), jnp.ones((features, vocab))
    labels = jnp.zeros(n, jnp.int32)

    def temporary(function):
        compiled = jax.jit(jax.value_and_grad(function, (0, 1))).lower(hidden, weight, labels)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    ours = temporary(lambda *args: 2.0 * linear_cross_entropy(*args, cfg=small(32, 512)))
    assert ours <= 2.5 * 4 * 32 * vocab
    assert ours <= 0.1 * temporary(linear_cross_entropy_reference)


def test_it_works_under_transformations():
    arrays, labels = arrays_of((4, 6), vocab=12)
    hidden, weight = arrays["hidden"], arrays["weight"]
    ours = partial(linear_cross_entropy, reduction="sum", cfg=small(4, 5))
    naive = partial(linear_cross_entropy_reference, reduction="sum")
    for transform in (
        lambda f: jax.vmap(f, (0, None, 0)),
        lambda f: jax.vmap(jax.grad(f, 1), (0, None, 0)),
        lambda f: jax.grad(jax.checkpoint(f)),
    ):
        got, wanted = (quickly(transform(f))(hidden, weight, labels) for f in (ours, naive))
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("error", "said", "change"),
    [
        (TypeError, "hidden is int32", {"hidden": jnp.ones((4, 3), int)}),
        (TypeError, "labels is float32", {"labels": jnp.ones(4)}),
        (ValueError, r"weight has shape \(3,\)", {"weight": jnp.ones(3)}),
        (ValueError, r"labels has shape \(5,\).*must be \(4,\)", {"labels": jnp.ones(5, int)}),
        (ValueError, "features must be equal.*vocab_first=True", {"weight": jnp.ones((7, 3))}),
        (ValueError, "features must be equal", {"hidden": jnp.ones((4, 5))}),
        (ValueError, r"bias has shape \(3,\); it must be \(7,\)", {"bias": jnp.ones(3)}),
        (
            ValueError,
            "no axis may be empty",
            {"hidden": jnp.ones((0, 3)), "labels": jnp.ones(0, int)},
        ),
        (ValueError, "reduction='avg'", {"reduction": "avg"}),
        (ValueError, "label_smoothing=1.0", {"label_smoothing": 1.0}),
        (ValueError, "logits_soft_cap=0", {"logits_soft_cap": 0}),
        (ValueError, "z_loss=-1", {"z_loss": -1}),
        (TypeError, "softmax_scale must be a number", {"softmax_scale": jnp.ones(())}),
        (TypeError, "ignore_index must be an int", {"ignore_index": 0.5}),
        (NotSupported, "pallas", {"implementation": "pallas"}),
    ],
)
def test_bad_input_is_named(error, said, change):
    call = {
        "hidden": jnp.ones((4, 3)),
        "weight": jnp.ones((3, 7)),
        "labels": jnp.zeros(4, jnp.int32),
    }
    with pytest.raises(error, match=said):
        linear_cross_entropy(**{**call, **change})
