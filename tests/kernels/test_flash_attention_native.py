"""The attention in C++ against the naive one: values, gradients, options, transforms, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from ejkernel.kernels.flash_attention import FlashAttention, FlashAttentionCppConfig
from ejkernel.modules import flash_attention
from ejkernel.ops import Tuner, policy_override
from ejkernel.ops.config.outcome import Verdict
from ejkernel.ops.tuner.session import tune_invocation

pytestmark = pytest.mark.usefixtures("native_library")

KERNEL = FlashAttention()
SMALL = FlashAttentionCppConfig(block_q=24, block_k=32, backward_block_q=12, backward_block_k=48)


def attention(q, k, v, causal=False, softmax_scale=None, cfg=SMALL, **options):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return KERNEL(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=scale,
        implementation="cpu",
        cfg=cfg,
        return_lse=True,
        **options,
    )


def naive(q, k, v, causal=False, softmax_scale=None, **options):
    """The definition, with every option, in float32 and the highest precision."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    (batch, q_len, heads, dim), (_, k_len, kv_heads, _) = q.shape, k.shape
    k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
    if (cap := options.get("logits_soft_cap")) is not None:
        scores = cap * jnp.tanh(scores / cap)
    if (bias := options.get("bias")) is not None:
        scores = scores + bias
        options["mask"] = options.get("mask", True) & (bias > -jnp.inf)
    row, key = jnp.arange(q_len)[:, None], jnp.arange(k_len)[None, :]
    seen = jnp.ones((batch, 1, q_len, k_len), bool)
    left, right = options.get("window") or (None, None)
    if causal:
        seen &= key <= row
    if left is not None:
        seen &= key >= row - left
    if right is not None:
        seen &= key <= row + right
    if (lengths := options.get("q_lengths")) is not None:
        seen &= (row < lengths[:, None, None])[:, None]
    if (lengths := options.get("kv_lengths")) is not None:
        seen &= (key < lengths[:, None, None])[:, None]
    if (ids := options.get("segment_ids")) is not None:
        of_keys = options.get("kv_segment_ids", ids)
        seen &= (ids[:, :, None] == of_keys[:, None, :])[:, None]
    if (mask := options.get("mask")) is not None:
        seen = seen & mask
    scores = jnp.where(seen, scores, -jnp.inf)
    if (sinks := options.get("sinks")) is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (batch, heads, q_len, 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    empty = ~seen.any(-1)
    scores = jnp.where(empty[..., None], 0.0, scores)
    weights = jnp.where(empty[..., None], 0.0, jax.nn.softmax(scores, axis=-1))
    out = jnp.einsum("bhqk,bkhd->bqhd", weights[..., :k_len], v, precision="highest")
    return out, jnp.where(empty, -jnp.inf, jax.nn.logsumexp(scores, axis=-1))


def quick(function):
    """Jitted; most of a test is compiling, so that is kept short."""
    options: Any = {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options)


def inputs(
    batch=2, q_len=37, k_len=53, heads=4, kv_heads=2, dim=8, value_dim=8, dtype=jnp.float32, seed=0
):
    numbers = np.random.default_rng(seed)
    shapes = (
        (batch, q_len, heads, dim),
        (batch, k_len, kv_heads, dim),
        (batch, k_len, kv_heads, value_dim),
    )
    return [jnp.asarray(numbers.standard_normal(shape), dtype) for shape in shapes]


def compare(arrays, tolerance=2e-5, cfg=SMALL, constant=(), **options):
    """Output, log-sum-exp and the gradients of q, k, v, bias and sinks through both outputs."""
    numbers = np.random.default_rng(1)
    q, _, v = arrays
    d_out = jnp.asarray(numbers.standard_normal((*q.shape[:3], v.shape[3])), jnp.float32)
    d_lse = jnp.asarray(numbers.standard_normal((q.shape[0], q.shape[2], q.shape[1])), jnp.float32)
    names = {"bias", "sinks"} & set(options) - set(constant)
    learned = {name: options.pop(name) for name in sorted(names)}

    def run(function):
        def loss(arrays, learned):
            out, lse = function(*arrays, **options, **learned)
            finite = jnp.where(lse == -jnp.inf, 0.0, lse)
            return jnp.sum(d_out * out) + jnp.sum(d_lse * finite), (out, lse)

        run = quick(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, (out, lse)), gradients = run(arrays, learned)
        return [out, lse, *jax.tree.leaves(gradients)]

    for got, wanted in zip(run(partial(attention, cfg=cfg)), run(naive), strict=True):
        got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
        assert got.shape == wanted.shape
        finite = np.where(np.isfinite(wanted), wanted, 0.0)
        size = max(1.0, float(np.abs(finite).max()))
        np.testing.assert_allclose(got, wanted, atol=tolerance * size, rtol=0)


SHAPES = [
    {},
    {"kv_heads": 1, "dim": 17, "value_dim": 33},
    {"q_len": 61, "k_len": 7, "kv_heads": 4},
    {"q_len": 1, "k_len": 100},
    {"batch": 1, "q_len": 5, "k_len": 1, "heads": 1, "kv_heads": 1, "dim": 1, "value_dim": 1},
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_every_gradient_equal_the_reference(shape, causal):
    compare(inputs(**shape), causal=causal)


def test_long_sequences_with_the_heuristic_blocks_and_many_threads():
    arrays = inputs(batch=1, q_len=700, k_len=650, heads=2, kv_heads=1, dim=64, value_dim=64)
    compare(arrays, cfg=None, causal=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 3e-3)])
def test_half_precision_accumulates_in_float32(dtype, tolerance):
    arrays = inputs(dtype=dtype, k_len=300, dim=32)
    compare(arrays, tolerance=tolerance, causal=True)
    out, lse = attention(*arrays)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    wanted = quick(naive)(*arrays)[0]
    # No worse than rounding the right answer once.
    worst = np.abs(np.asarray(wanted.astype(dtype).astype(jnp.float32) - wanted)).max()
    assert np.abs(np.asarray(out.astype(jnp.float32) - wanted)).max() <= worst + 1e-5


def random_mask(*shape):
    """Half of it is hidden, and all of some rows."""
    numbers = np.random.default_rng(2)
    rows = numbers.random((*shape[:3], 1)) < (0.8 if shape[2] > 1 else 2)
    return jnp.asarray((numbers.random(shape) < 0.5) & rows)


def random_bias(*shape):
    return jnp.asarray(np.random.default_rng(3).standard_normal(shape), jnp.float32)


OPTIONS = {
    "window": {"window": (9, 4)},
    "window left": {"window": (9, None), "causal": True},
    "window right": {"window": (None, 3)},
    "narrow window": {"window": (0, 0)},
    "lengths": {"q_lengths": jnp.array([37, 11]), "kv_lengths": jnp.array([20, 53])},
    "no keys": {"q_lengths": jnp.array([0, 37]), "kv_lengths": jnp.array([53, 0])},
    "causal lengths": {"causal": True, "kv_lengths": jnp.array([5, 30])},
    "soft cap": {"logits_soft_cap": 1.5},
    "soft cap, no keys": {"logits_soft_cap": 1.5, "kv_lengths": jnp.array([0, 53])},
    "sinks": {"sinks": jnp.array([-3.0, 0.0, 2.0, 9.0]), "causal": True},
    "segments": {
        "segment_ids": jnp.arange(74).reshape(2, 37) // 9,
        "kv_segment_ids": jnp.arange(106).reshape(2, 53) // 13,
    },
    "segments in any order": {
        "segment_ids": jnp.arange(74).reshape(2, 37) * 7 % 5,
        "kv_segment_ids": jnp.arange(106).reshape(2, 53) * 3 % 6,
        "causal": True,
    },
    "mask": {"mask": random_mask(2, 4, 37, 53)},
    "mask of all heads": {"mask": random_mask(2, 1, 37, 53), "causal": True},
    "mask of all examples": {"mask": random_mask(1, 4, 37, 53), "logits_soft_cap": 1.5},
    "mask of keys": {"mask": random_mask(2, 1, 1, 53), "window": (9, 4)},
    "mask of queries": {"mask": random_mask(2, 4, 37, 1)},
    "mask of blocks": {"mask": (jnp.arange(37)[:, None] // 12 == jnp.arange(53) // 17)[None, None]},
    "mask that hides all": {"mask": jnp.zeros((1, 1, 1, 1), bool)},
    "bias": {"bias": random_bias(2, 4, 37, 53)},
    "bias of all heads": {"bias": random_bias(2, 1, 37, 53), "causal": True},
    "bias of all examples": {"bias": random_bias(1, 4, 37, 53), "logits_soft_cap": 1.5},
    "bias of keys": {"bias": random_bias(1, 1, 1, 53), "window": (9, 4)},
    "bias of queries": {"bias": random_bias(2, 4, 37, 1), "mask": random_mask(2, 1, 37, 53)},
    "bias that hides": {"bias": jnp.where(random_mask(2, 4, 37, 53), 0.5, -jnp.inf)},
    "scale": {"softmax_scale": -2.5},
    "everything": {
        "causal": True,
        "window": (30, 2),
        "segment_ids": jnp.arange(74).reshape(2, 37) // 20,
        "kv_segment_ids": jnp.arange(106).reshape(2, 53) // 20,
        "q_lengths": jnp.array([30, 37]),
        "kv_lengths": jnp.array([40, 17]),
        "mask": random_mask(2, 4, 37, 53),
        "bias": random_bias(2, 4, 37, 53),
        "logits_soft_cap": 2.0,
        "sinks": jnp.array([-3.0, 0.0, 2.0, 1.0]),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_reference(options):
    compare(inputs(), **options)


@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "bias" in options])
def test_a_bias_without_a_gradient_equals_the_reference(name):
    compare(inputs(), **OPTIONS[name], constant={"bias"})


@pytest.mark.parametrize(("learned", "program"), [("q", "cpu"), ("bias", "xla")])
def test_only_the_gradient_of_a_bias_is_left_to_xla(learned, program):
    q, k, v = inputs()
    arguments = {"q": q, "bias": random_bias(2, 4, 37, 53)}

    def loss(x):
        given = {**arguments, learned: x}
        return attention(given.pop("q"), k, v, **given)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(arguments[learned]).as_text()
    assert "ejkernel_flash_attention_forward" in text
    assert ("ejkernel_flash_attention_backward" in text) == (program == "cpu")


def test_scores_that_jump_upwards_are_followed():
    q, k, v = inputs(batch=1, q_len=20, k_len=400, heads=1, kv_heads=1)
    k = k * jnp.where(jnp.arange(400) > 200, 60.0, 0.1)[None, :, None, None]
    q = jnp.abs(q)
    out, lse = attention(q, jnp.abs(k), v)
    wanted, wanted_lse = quick(naive)(q, jnp.abs(k), v)
    np.testing.assert_allclose(out, wanted, atol=2e-3)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5)


def test_nan_reaches_the_row_it_belongs_to_and_no_other():
    q, k, v = inputs(batch=1, heads=1, kv_heads=1)
    out, _ = attention(q.at[0, 3].set(jnp.nan), k, v)
    assert np.isnan(np.asarray(out[0, 3])).all()
    assert np.isfinite(np.asarray(out)[0, [0, 2, 4, 36]]).all()


def test_vmap_is_one_call_with_a_longer_batch():
    q, k, v = inputs(batch=6)
    stacked = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v)]
    lengths = jnp.array([[5, 53], [10, 20], [53, 1]])
    out, lse = jax.vmap(lambda q, k, v, n: attention(q, k, v, kv_lengths=n))(*stacked, lengths)
    wanted, wanted_lse = attention(q, k, v, kv_lengths=lengths.reshape(6))
    np.testing.assert_array_equal(out.reshape(wanted.shape), wanted)
    np.testing.assert_array_equal(lse.reshape(wanted_lse.shape), wanted_lse)

    def loss(q):
        return attention(q, stacked[1][0], stacked[2][0])[0].sum()

    one_by_one = jnp.stack([jax.grad(loss)(x) for x in stacked[0]])
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(stacked[0]), one_by_one, atol=1e-6)


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(2, 4, 37, 53), (1, 1, 37, 53), (2, 1, 1, 53)])
def test_vmap_over_masks_and_biases(name, shape):
    q, k, v = inputs(batch=6)
    stacked = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v)]
    mask, bias = random_mask(*shape), random_bias(*shape)
    one = {"mask": mask, "bias": bias}[name]
    many = {"mask": [mask, ~mask, mask | True], "bias": [bias, -bias, 0 * bias]}[name]
    tables = jnp.stack(many)
    out, _ = jax.vmap(lambda q, k, v, table: attention(q, k, v, **{name: table}))(*stacked, tables)
    for n in range(3):
        wanted, _ = attention(*(x[n] for x in stacked), **{name: tables[n]})
        np.testing.assert_array_equal(out[n], wanted)
    same, _ = jax.vmap(lambda q, k, v: attention(q, k, v, **{name: one}))(*stacked)
    np.testing.assert_array_equal(same[0], out[0])


def test_scan_and_remat():
    q, k, v = inputs(k_len=37, kv_heads=4)

    def loss(q):
        step = jax.checkpoint(lambda x, _: (attention(x, k, v, causal=True)[0], None))
        return jax.lax.scan(step, q, None, length=3)[0].sum()

    def wanted(q):
        for _ in range(3):
            q = naive(q, k, v, causal=True)[0]
        return q.sum()

    got, wanted = quick(jax.grad(loss))(q), quick(jax.grad(wanted))(q)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_shard_map(check):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = PartitionSpec("data")
    arrays = inputs()

    def loss(q, k, v):
        inner = jax.shard_map(
            lambda q, k, v: attention(q, k, v, causal=True)[0],
            mesh=mesh,
            in_specs=(spec,) * 3,
            out_specs=spec,
            check_vma=check,
        )
        return (inner(q, k, v) ** 2).sum()

    def wanted_loss(q, k, v):
        return (attention(q, k, v, causal=True)[0] ** 2).sum()

    got = quick(jax.grad(loss, (0, 1, 2)))(*arrays)
    wanted = quick(jax.grad(wanted_loss, (0, 1, 2)))(*arrays)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("spec", [("data",), (None, None, "data")], ids=["batch", "heads"])
def test_arrays_that_are_sharded_are_worked_on_where_they_are(kind, spec):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    arrays = inputs(batch=2, heads=4, kv_heads=2)
    out, lse = attention(*arrays)
    gradient = jax.grad(lambda *a: jnp.sum(attention(*a)[0] ** 2), (0, 1, 2))
    expected = gradient(*arrays)
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, PartitionSpec(*spec))
        placed = [jax.device_put(x, sharding) for x in arrays]
        program = jax.jit(attention).lower(*placed).compile()
        assert "ejkernel_flash_attention_forward" in program.as_text()
        assert "all-gather" not in program.as_text()
        found, found_lse = program(*placed)
        gradients = jax.jit(gradient)(*placed)
    np.testing.assert_allclose(found, out, atol=1e-6)
    np.testing.assert_allclose(found_lse, lse, atol=1e-6)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_many_threads_at_once_neither_wait_for_each_other_nor_mix_up():
    arrays = inputs(batch=2, q_len=300, k_len=300, heads=4, kv_heads=4, dim=32, value_dim=32)
    run = jax.jit(jax.value_and_grad(lambda q, k, v: attention(q, k, v, cfg=None)[0].sum()))
    value, gradient = run(*arrays)
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda _: run(*arrays), range(64)))
    for one, other in results:
        np.testing.assert_array_equal(one, value)
        np.testing.assert_array_equal(other, gradient)


def test_it_serves_a_plain_call_and_leaves_what_it_cannot_do_to_xla():
    q, k, v = inputs(q_len=41, k_len=43)
    lowered = jax.jit(lambda *a: flash_attention(*a, causal=True)).lower(q, k, v)
    assert "ejkernel_flash_attention_forward" in lowered.as_text()
    lowered = jax.jit(flash_attention).lower(q[:, :1], k, v)  # too few rows to be worth it
    assert "ejkernel_flash_attention_forward" not in lowered.as_text()
    with jax.enable_x64(True):
        double = [x.astype(jnp.float64) for x in (q, k, v)]
        lowered = jax.jit(lambda *a: flash_attention(*a, causal=True)).lower(*double)
    assert "ejkernel_flash_attention_forward" not in lowered.as_text()


def test_it_is_tuned_like_any_other_kernel():
    arrays = inputs(batch=1, q_len=33, k_len=33, heads=2, kv_heads=2)
    inv = KERNEL.bind(*arrays, causal=True, softmax_scale=1.0)
    cpp = KERNEL.implementation("cpu")
    assert cpp.heuristic(inv).block_q
    assert len(cpp.space(inv)) == len(set(cpp.space(inv))) > 1
    with policy_override(autotune=True):
        out = FlashAttention()(*arrays, causal=True, softmax_scale=1.0)
    wanted = quick(partial(naive, causal=True, softmax_scale=1.0))(*arrays)[0]
    np.testing.assert_allclose(out, wanted, atol=2e-5)


def test_a_worker_process_loads_the_library_too():
    arrays = inputs(batch=1, q_len=65, k_len=65, heads=2, kv_heads=2)
    inv = KERNEL.bind(*arrays, causal=True, softmax_scale=1.0).abstract()
    tuner = Tuner(isolation="process", effort="quick", progress=False)
    outcome = tune_invocation(tuner, inv.differentiate(), KERNEL)
    assert outcome.measured != "forward"
    refused = [trial for trial in outcome.trials if trial.verdict is not Verdict.MEASURED]
    assert all(trial.verdict is Verdict.DUPLICATE for trial in refused), refused
    assert len(outcome.trials) - len(refused) > 1
