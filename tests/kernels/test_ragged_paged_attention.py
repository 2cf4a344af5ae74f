"""Packed tokens over pages against the definition: every implementation, updates, bad input."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.paged_attention import (
    PagedAttentionCppConfig,
    RaggedPagedAttention,
    RaggedPagedAttentionGpuConfig,
    RaggedPagedAttentionTpuConfig,
    RaggedPagedAttentionXlaConfig,
    pallas_gpu,
    pallas_tpu,
    ragged_paged_attention_reference,
    xla,
)
from ejkernel.kernels.paged_attention.native import RAGGED_CPP
from ejkernel.modules import paged_attention, ragged_paged_attention, update_pages
from ejkernel.modules.pages import OutOfPages, PagePool

PAGES, PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM, VALUE_DIM = 40, 5, 2, 4, 24, 16
RNG = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


# Nine new tokens of 17, one of one, nine of 30, none of none, one of nine; three rows are nobody's.
LENGTHS, STARTS = jnp.array([17, 1, 30, 0, 9], jnp.int32), jnp.array([0, 9, 10, 19, 19, 20])
TABLE = jnp.asarray(RNG.permutation(PAGES)[:30].reshape(5, 6), jnp.int32)
Q = normal(23, HEADS, HEAD_DIM)
K_PAGES = normal(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
V_PAGES = normal(PAGES, PAGE_SIZE, KV_HEADS, VALUE_DIM)
INT8 = jnp.asarray(RNG.integers(-127, 128, K_PAGES.shape), jnp.int8)
OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window": 3},
    "cap, sinks": {"logits_soft_cap": 2.0, "sinks": normal(HEADS)},
    "scales of heads and pages": {
        "k_scale": jnp.abs(normal(KV_HEADS)) * 0.01,
        "v_scale": jnp.abs(normal(PAGES, KV_HEADS)),
    },
    "scales of tokens": {"k_scale": jnp.abs(normal(PAGES, PAGE_SIZE, KV_HEADS)) * 0.01},
}
SMALL = PagedAttentionCppConfig(block_q=24, block_k=16, split_k=8)
EVERY_RUN = {
    "cpu": partial(RAGGED_CPP.forward, cfg=PagedAttentionCppConfig()),
    "cpu, small tasks": partial(RAGGED_CPP.forward, cfg=SMALL),
    "xla": partial(xla.RAGGED_XLA.forward, cfg=RaggedPagedAttentionXlaConfig(4, 2)),
    "xla, tokens alone": partial(xla.RAGGED_XLA.forward, cfg=RaggedPagedAttentionXlaConfig(1, 1)),
    "pallas": partial(
        pallas_tpu.RAGGED_PALLAS_TPU.forward, cfg=RaggedPagedAttentionTpuConfig(4, 2)
    ),
    "triton": partial(
        pallas_gpu.RAGGED_PALLAS_GPU.forward,
        cfg=RaggedPagedAttentionGpuConfig(block_k=16, num_key_splits=2, block_q=4),
    ),
}


def softly(function):
    """Compile time is what these tests take."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def pages_for(options):
    if "k_scale" not in options:
        return K_PAGES, V_PAGES
    return INT8, V_PAGES.astype(jnp.float8_e4m3fn)


@pytest.mark.usefixtures("interpreted_pallas", "native_library")
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("name", EVERY_RUN)
def test_every_implementation_equals_the_definition(name, case):
    options = {"softmax_scale": 0.3, **OPTIONS[case]}
    args = (Q, *pages_for(options), TABLE, LENGTHS, STARTS)
    expected = ragged_paged_attention_reference(*args, **options)
    out = softly(partial(EVERY_RUN[name], **options))(*args)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    assert not np.asarray(out[20:]).any()


def test_the_definition_is_paged_attention_of_every_sequence():
    out = ragged_paged_attention(Q, K_PAGES, V_PAGES, TABLE, LENGTHS, STARTS, window=7)
    for s in range(5):
        rows = slice(int(STARTS[s]), int(STARTS[s + 1]))
        if rows.stop > rows.start:
            own = Q[rows][None], K_PAGES, V_PAGES, TABLE[s][None], LENGTHS[s][None]
            expected = paged_attention(*own, window=7)[0]
            np.testing.assert_allclose(out[rows], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("interpreted_pallas", "native_library")
@pytest.mark.parametrize("name", EVERY_RUN)
def test_what_no_query_sees_may_be_anything(name):
    run = softly(partial(EVERY_RUN[name], softmax_scale=0.3, window=4))
    args = Q, K_PAGES, V_PAGES, TABLE, LENGTHS, STARTS
    seen = np.zeros((PAGES, PAGE_SIZE), bool)
    for s, length in enumerate(np.asarray(LENGTHS)):
        new = int(STARTS[s + 1] - STARTS[s])
        begin = max(0, length - new - 4)
        if name not in (
            "triton",
            "cpu",
            "cpu, small tasks",
        ):  # the others read whole pages: what a sequence had is no NaN
            begin = begin // PAGE_SIZE * PAGE_SIZE
        for key in range(begin, length if new else 0):
            seen[TABLE[s, key // PAGE_SIZE], key % PAGE_SIZE] = True
    poisoned = [jnp.where(seen[..., None, None], x, jnp.nan) for x in (K_PAGES, V_PAGES)]
    wild = jnp.where(jnp.arange(6) * PAGE_SIZE < LENGTHS[:, None], TABLE, -7)
    out = run(Q, *poisoned, wild, LENGTHS, STARTS)
    np.testing.assert_array_equal(out, run(*args))


def test_gradients_are_those_of_the_definition():
    scales = {"k_scale": jnp.abs(normal(PAGES, KV_HEADS)), "v_scale": jnp.abs(normal(KV_HEADS))}

    def loss(arrays, named, **how):
        out = ragged_paged_attention(*arrays, TABLE, LENGTHS, STARTS, **named, window=6, **how)
        return jnp.sum(out * jnp.cos(jnp.arange(VALUE_DIM)))

    arrays, named = (Q, K_PAGES, V_PAGES), {"sinks": normal(HEADS), **scales}
    found = jax.grad(loss, (0, 1))(arrays, named)
    expected = jax.grad(partial(loss, implementation="reference"), (0, 1))(arrays, named)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
        assert np.asarray(theirs).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_types_are_summed_in_float32(dtype):
    short = [x.astype(dtype) for x in (Q, K_PAGES, V_PAGES)]
    out = ragged_paged_attention(*short, TABLE, LENGTHS, STARTS)
    wide = (x.astype(jnp.float32) for x in short)
    exact = ragged_paged_attention_reference(*wide, TABLE, LENGTHS, STARTS)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=1e-2, atol=1e-2)


def test_bad_values_inside_jit_read_nothing_foreign():
    run = jax.jit(ragged_paged_attention)
    wild = run(Q, K_PAGES, V_PAGES, TABLE.at[0, 0].set(10**6), LENGTHS, STARTS)
    clamped = TABLE.at[0, 0].set(PAGES - 1)
    tame = ragged_paged_attention(Q, K_PAGES, V_PAGES, clamped, LENGTHS, STARTS)
    np.testing.assert_allclose(wild, tame, rtol=1e-5, atol=1e-6)
    for starts in ([5, 2, -9, 40, 3, 60], [23, 22, 10, 9, 1, 0], [2**31 - 1] * 6):
        out = run(Q, K_PAGES, V_PAGES, TABLE, LENGTHS * 1000, jnp.array(starts))
        assert np.isfinite(out).all()


# --- C++ -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("heads", [2, 4, 6, 14], ids="{} heads".format)
@pytest.mark.parametrize("sizes", [(13, 19), (64, 40)], ids=str)
@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float16"), ("float8_e4m3fn", "float8_e5m2"), ("int8", "int8")], ids=str
)
def test_cpp_with_every_type_and_odd_sizes(dtypes, sizes, heads):
    """One to seven rows of a key head, tails of vectors; 19 new tokens go through tiles."""
    q = normal(43, heads, sizes[0])
    lengths, starts = jnp.array([37, 1, 30, 0, 9]), jnp.array([0, 19, 20, 39, 39, 41])
    pages = [
        (40 * normal(PAGES, PAGE_SIZE, KV_HEADS, size)).astype(dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    scales = {
        "k_scale": jnp.abs(normal(PAGES, PAGE_SIZE, KV_HEADS)) / 40,
        "v_scale": jnp.abs(normal(PAGES, KV_HEADS)) / 40,
    }
    table = jnp.asarray(RNG.permutation(PAGES).reshape(5, 8), jnp.int32)
    args = q, *pages, table, lengths, starts
    out = ragged_paged_attention(*args, **scales, implementation="cpu")
    expected = ragged_paged_attention(*args, **scales, implementation="reference")
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
@pytest.mark.parametrize("new", [1, 30])
def test_every_number_of_eight_bits_is_read_as_it_is(dtype, new):
    """XLA's threads take subnormal numbers for zero; they are some of these."""
    numbers = jnp.asarray(np.arange(256, dtype=np.uint8).view(dtype))
    wide = numbers.astype(jnp.float32)
    numbers, wide = (jnp.where(jnp.isfinite(wide), x, jnp.zeros_like(x)) for x in (numbers, wide))
    pages = jnp.zeros((1, 32, 1, 8)), jnp.zeros((1, 32, 1, 256), dtype).at[:].set(numbers)
    places = jnp.zeros((1, 1), int), jnp.array([new]), jnp.array([0, new])
    out = ragged_paged_attention(jnp.zeros((new, 1, 8)), *pages, *places, implementation="cpu")
    np.testing.assert_allclose(out[:, 0], jnp.broadcast_to(wide, (new, 256)), rtol=1e-6)


@pytest.mark.usefixtures("native_library")
def test_cpp_under_vmap_and_for_paged_attention():
    q = normal(3, *Q.shape)

    def run(q, **how):
        return ragged_paged_attention(q, K_PAGES, V_PAGES, TABLE, LENGTHS, STARTS, **how)

    mapped = jax.vmap(partial(run, implementation="cpu"))(q)
    for found, one in zip(mapped, q, strict=True):
        expected = run(one, implementation="reference")
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    for tokens in (1, 3, 13):
        args = normal(5, tokens, HEADS, HEAD_DIM), K_PAGES, V_PAGES, TABLE, LENGTHS
        options = {"window": 6, "sinks": normal(HEADS), "logits_soft_cap": 3.0}
        found = paged_attention(*args, **options, implementation="cpu")
        expected = paged_attention(*args, **options, implementation="reference")
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


# --- update_pages --------------------------------------------------------------------------------


def naively_updated(pages, new):
    pages = np.array(pages)
    for s in range(5):
        first, end = int(STARTS[s]), int(STARTS[s + 1])
        for i in range(end - first):
            position = int(LENGTHS[s]) - (end - first) + i
            pages[int(TABLE[s, position // PAGE_SIZE]), position % PAGE_SIZE] = new[first + i]
    return pages


K_NEW, V_NEW = normal(23, KV_HEADS, HEAD_DIM), normal(23, KV_HEADS, VALUE_DIM)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_new_tokens_are_where_attention_reads_them(dtype):
    pages = K_PAGES.astype(dtype), V_PAGES.astype(dtype)
    found = update_pages(*pages, K_NEW, V_NEW, TABLE, LENGTHS, STARTS)
    for mine, before, new in zip(found, pages, (K_NEW, V_NEW), strict=True):
        assert mine.dtype == dtype
        np.testing.assert_array_equal(mine, naively_updated(before, new.astype(dtype)))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_short_pages_are_quantised_per_token_and_head(dtype):
    pages = [jnp.zeros(x.shape, dtype) for x in (K_PAGES, V_PAGES)]
    scales = jnp.full((2, PAGES, PAGE_SIZE, KV_HEADS), 7.0)
    new = K_NEW.at[3].set(0.0), V_NEW * 1e4
    *found, k_scale, v_scale = update_pages(
        *pages, *new, TABLE, LENGTHS, STARTS, k_scale=scales[0], v_scale=scales[1]
    )
    error = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}[jnp.dtype(dtype).name]
    for mine, scale, x in zip(found, (k_scale, v_scale), new, strict=True):
        read = np.asarray(mine.astype(jnp.float32) * scale[..., None])
        expected = naively_updated(jnp.zeros(read.shape), x)
        largest = np.abs(expected).max(axis=-1, keepdims=True)
        assert (np.abs(read - expected) <= 1.001 * error * largest).all()
        written = naively_updated(jnp.zeros(read.shape), jnp.ones_like(x))[..., 0] > 0
        assert (np.asarray(scale)[~written] == 7.0).all()


def test_fixed_scales_are_used_and_clip():
    zeros = jnp.zeros(K_PAGES.shape, jnp.int8), jnp.zeros(V_PAGES.shape, jnp.int8)
    k_scale, v_scale = jnp.array([0.01, 0.1]), jnp.full((PAGES, KV_HEADS), 0.02)
    *found, k_after, v_after = update_pages(
        *zeros, K_NEW, V_NEW, TABLE, LENGTHS, STARTS, k_scale=k_scale, v_scale=v_scale
    )
    expected = jnp.clip(jnp.round(K_NEW / k_scale[:, None]), -127, 127)
    np.testing.assert_array_equal(found[0], naively_updated(zeros[0], expected))
    assert (k_after == k_scale).all()
    assert (v_after == v_scale).all()


def test_pages_that_are_donated_are_updated_in_place():
    def step(k_pages, v_pages, k_scale, v_scale, *rest):
        return update_pages(k_pages, v_pages, *rest, k_scale=k_scale, v_scale=v_scale)

    shapes = (4000, 16, 2, 64)
    pages, scale = jnp.zeros(shapes, jnp.int8), jnp.zeros(shapes[:3])
    new = normal(23, 2, 64)
    args = pages, pages, scale, scale, new, new, TABLE, LENGTHS, STARTS
    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    memory = jitted.lower(*args).compile().memory_analysis()
    held = 2 * pages.nbytes + 2 * scale.nbytes
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held // 50


def test_wrong_places_inside_jit_are_not_written():
    update = jax.jit(lambda *a: update_pages(K_PAGES, V_PAGES, K_NEW, V_NEW, *a)[0])
    for table, lengths in (
        (jnp.full_like(TABLE, -1), LENGTHS),
        (jnp.full_like(TABLE, PAGES), LENGTHS),
        (TABLE, LENGTHS + 1000),
        (TABLE, LENGTHS - 1000),
    ):
        np.testing.assert_array_equal(update(table, lengths, STARTS), K_PAGES)


# --- bad input -----------------------------------------------------------------------------------

GIVEN = {
    "k_pages": K_PAGES,
    "v_pages": V_PAGES,
    "page_table": TABLE,
    "lengths": LENGTHS,
    "query_starts": STARTS,
}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": jnp.ones((4, 24))}, ValueError, r"q has shape \(4, 24\)"),
        ({"q": jnp.ones((23, 5, 24))}, ValueError, "5 heads and k_pages.*2.*multiple"),
        ({"k_pages": K_PAGES.astype(jnp.int16)}, TypeError, "k_pages is int16"),
        ({"query_starts": STARTS[:-1]}, ValueError, r"query_starts has shape \(5,\).*\(6,\)"),
        ({"query_starts": STARTS[::-1]}, ValueError, "query_starts is.*must rise"),
        ({"query_starts": STARTS + 4}, ValueError, "query_starts is.*at most 23"),
        ({"query_starts": STARTS * 1.0}, TypeError, "query_starts is float32"),
        ({"lengths": LENGTHS.at[0].set(8)}, ValueError, r"sequence 0 9 new.*lengths\[0\] is 8"),
        ({"lengths": LENGTHS + 1}, ValueError, "lengths.*0 to 30"),
        ({"page_table": TABLE.at[2, 5].set(40)}, ValueError, r"page_table\[2, 5\] is 40"),
        ({"causal": 3}, TypeError, "causal"),
        ({"k_scale": jnp.ones((3,))}, ValueError, r"k_scale has shape \(3,\)"),
        ({"v_scale": jnp.ones((5, 2))}, ValueError, r"v_scale has shape \(5, 2\)"),
    ],
)
def test_bad_input_is_named(changes, error, words):
    with pytest.raises(error, match=f"ragged_paged_attention: .*{words}"):
        ragged_paged_attention(**{"q": Q, **GIVEN, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k": K_NEW[:, :1]}, ValueError, r"k has shape \(23, 1, 24\)"),
        ({"v": V_NEW[:20]}, ValueError, r"v has shape \(20, 2, 16\)"),
        ({"query_starts": STARTS[::-1]}, ValueError, "query_starts is.*must rise"),
        ({"page_table": jnp.full_like(TABLE, -1)}, ValueError, "page_table.*is -1"),
        ({"k_scale": jnp.ones((2,))}, ValueError, "k_scale is given.*float32"),
        ({"k_pages": INT8}, ValueError, "k_scale is not given.*int8"),
    ],
)
def test_bad_updates_are_named(changes, error, words):
    with pytest.raises(error, match=f"update_pages: .*{words}"):
        update_pages(**{"k": K_NEW, "v": V_NEW, **GIVEN, **changes})


def test_the_tuner_gets_valid_inputs():
    kernel = RaggedPagedAttention()
    inv = kernel.bind(Q, INT8, V_PAGES, TABLE, LENGTHS, STARTS, softmax_scale=0.4)
    made, kwargs = kernel.make_inputs(inv, jax.random.key(0))
    starts = np.asarray(made[5])
    assert starts[0] == 0
    assert starts[-1] == 23
    assert (np.diff(starts) <= np.asarray(made[4])).all()
    expected = ragged_paged_attention_reference(*made, **kwargs)
    candidates = kernel.candidates(inv)
    assert len(candidates) > 1
    np.testing.assert_allclose(kernel(*made, cfg=candidates[-1], **kwargs), expected, atol=2e-3)


# --- the pool ------------------------------------------------------------------------------------


def test_a_pool_never_gives_a_page_twice():
    pool = PagePool(pages=12, page_size=4, sequences=3, pages_per_sequence=6)
    rng, live = np.random.default_rng(1), []
    for _ in range(300):
        if live and rng.random() < 0.2:
            pool.remove(live.pop(int(rng.integers(len(live)))))
        elif pool.free_sequences and rng.random() < 0.3:
            live.append(pool.add())
        else:
            before = pool.page_table, pool.lengths, pool.free_pages
            tokens = {row: int(rng.integers(0, 6)) for row in live}
            try:
                starts = pool.extend(tokens)
            except OutOfPages:
                np.testing.assert_array_equal(pool.page_table, before[0])
                assert (pool.lengths == before[1]).all()
                assert pool.free_pages == before[2]
                continue
            assert np.diff(starts).tolist() == [tokens.get(row, 0) for row in range(3)]
        held = -(-pool.lengths // 4)
        in_use = [int(p) for row in range(3) for p in pool.page_table[row, : held[row]]]
        assert len(set(in_use)) == len(in_use) == 12 - pool.free_pages
    with pytest.raises(ValueError, match="no sequence 7"):
        pool.remove(7)
    with pytest.raises(ValueError, match="pages=0"):
        PagePool(pages=0, page_size=4, sequences=3, pages_per_sequence=6)


def test_the_steps_of_a_server_are_traced_once():
    """Prompts and ends come and go; what is decoded equals attention over the tokens themselves."""
    pool = PagePool(pages=24, page_size=PAGE_SIZE, sequences=3, pages_per_sequence=8)
    traced, rng, live = [], np.random.default_rng(2), {}

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(k_pages, v_pages, q, k, v, *where):
        traced.append(1)
        pages = update_pages(k_pages, v_pages, k, v, *where)
        return *pages, ragged_paged_attention(q, *pages, *where)

    pages = jnp.zeros((24, PAGE_SIZE, 1, 8)), jnp.zeros((24, PAGE_SIZE, 1, 8))
    for number in range(25):
        if number % 7 == 6:
            pool.remove(row := next(iter(live)))
            del live[row]
        new = dict.fromkeys(live, 1)
        if pool.free_sequences:
            row = pool.add()
            live[row], new[row] = np.zeros((0, 2, 8)), int(rng.integers(1, 9))
        starts = pool.extend(new)
        q, k, v = rng.standard_normal((3, 12, 1, 8)).astype(np.float32)
        *pages, out = step(*pages, q, k, v, pool.page_table, pool.lengths, starts)
        for row in live:
            own = slice(starts[row], starts[row + 1])
            both = np.concatenate([k[own], v[own]], axis=1)
            live[row] = np.concatenate([live[row], both])
            keys, values = live[row][:, 0], live[row][:, 1]
            scores = keys @ q[own.stop - 1, 0] * 8**-0.5
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ values
            np.testing.assert_allclose(out[own.stop - 1, 0], expected, rtol=1e-4, atol=1e-5)
    assert len(traced) == 1
