"""Attention in every setting of JAX: modes, dtypes, integers of any width, windows of any size."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICK
from attention_float64 import attention64

from ejkernel.kernels.flash_attention import FlashAttentionCppConfig, FlashAttentionXlaConfig
from ejkernel.kernels.flash_attention.dropout import keep_mask
from ejkernel.kernels.integers import ids_to_int32, to_int32
from ejkernel.kernels.paged_attention import PagedAttentionXlaConfig
from ejkernel.modules import flash_attention, paged_attention

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
SMALL = {
    "xla": FlashAttentionXlaConfig(
        block_q=16,
        block_k=16,
        block_heads=2,
        backward_block_q=16,
        backward_block_k=16,
        backward_block_heads=2,
    ),
    "cpu": FlashAttentionCppConfig(
        block_q=16, block_k=16, backward_block_q=16, backward_block_k=16
    ),
}
MODES: dict[str, Any] = {
    "default": contextlib.nullcontext,
    "x64": partial(jax.enable_x64, True),
    "strict dtypes": partial(jax.numpy_dtype_promotion, "strict"),
    "strict ranks": partial(jax.numpy_rank_promotion, "raise"),
    "debug_nans": partial(jax.debug_nans, True),
}
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")


@pytest.fixture(params=["xla", "cpu", "reference"])
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        request.getfixturevalue("native_library")
    return request.param


def call(implementation: str) -> Any:
    return partial(flash_attention, implementation=implementation, cfg=SMALL.get(implementation))


def drawn(numbers: Any, q_len: int, kv_len: int, dtype: Any) -> dict[str, Any]:
    shapes = {
        "q": (BATCH, q_len, HEADS, DIM),
        "k": (BATCH, kv_len, KV_HEADS, DIM),
        "v": (BATCH, kv_len, KV_HEADS, DIM),
    }
    return {n: jnp.asarray(numbers.standard_normal(s), dtype) for n, s in shapes.items()}


def random_options(numbers: Any, q_len: int, kv_len: int, integer: Any) -> dict[str, Any]:
    """Some of all options, each by chance."""
    options: dict[str, Any] = {"causal": bool(numbers.random() < 0.4)}

    def sometimes() -> bool:
        return bool(numbers.random() < 0.35)

    if sometimes():
        left = int(numbers.choice([0, 3, 9, 2**31 - 1, sys.maxsize]))
        options["window"] = (left, 0 if options["causal"] else 5)
    if sometimes():
        options["kv_lengths"] = jnp.asarray(numbers.integers(1, kv_len + 1, BATCH), integer)
    if sometimes():
        options["q_lengths"] = jnp.asarray(numbers.integers(1, q_len + 1, BATCH), integer)
    if sometimes():
        ids = np.sort(numbers.integers(0, 3, (BATCH, q_len)), axis=1)
        options["segment_ids"] = jnp.asarray(ids, integer)
        kv_ids = np.sort(numbers.integers(0, 3, (BATCH, kv_len)), axis=1)
        options["kv_segment_ids"] = jnp.asarray(kv_ids, integer)
    if sometimes():
        options["mask"] = jnp.asarray(numbers.random((BATCH, 1, q_len, kv_len)) < 0.7)
    if sometimes():
        shape = [(1, HEADS, q_len, kv_len), (BATCH, 1, 1, kv_len), (HEADS, 1, 1)]
        choice = shape[int(numbers.integers(3))]
        options["bias"] = jnp.asarray(numbers.standard_normal(choice), jnp.float32)
    if sometimes():
        options["sinks"] = jnp.asarray(numbers.standard_normal(HEADS), jnp.float32)
    if sometimes():
        options["logits_soft_cap"] = 3.0
    if sometimes():
        options["return_lse"] = True
    return options


def visible(options: dict[str, Any], q_len: int, kv_len: int) -> np.ndarray:
    row, key = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    seen = np.ones((BATCH, 1, q_len, kv_len), bool)
    if options["causal"]:
        seen &= key <= row
    if "window" in options:
        left, right = options["window"]
        seen &= (key >= row - min(left, 10**6)) & (key <= row + right)
    if "kv_lengths" in options:
        seen &= (key < np.asarray(options["kv_lengths"])[:, None, None])[:, None]
    if "q_lengths" in options:
        seen &= (row < np.asarray(options["q_lengths"])[:, None, None])[:, None]
    if "segment_ids" in options:
        ids, of_keys = (np.asarray(options[n]) for n in ("segment_ids", "kv_segment_ids"))
        seen &= (ids[:, :, None] == of_keys[:, None])[:, None]
    return seen & np.asarray(options["mask"]) if "mask" in options else seen


@pytest.mark.parametrize("mode", list(MODES))
def test_random_cases(implementation: str, mode: str) -> None:
    cases = 2 if implementation == "reference" else 4
    for case in range(cases):
        numbers = np.random.default_rng(100 * list(MODES).index(mode) + case)
        dtypes = ["float32", "bfloat16", "float16"]
        if mode == "x64" and implementation != "cpu":
            dtypes.append("float64")
        integers = [x for x in INTEGERS if x != "int64" or mode == "x64"]
        with MODES[mode]():
            q_len, kv_len = (int(x) for x in numbers.choice([1, 7, 17, 33, 45], 2))
            dtype = str(numbers.choice(dtypes))
            arrays = drawn(numbers, q_len, kv_len, dtype)
            options = random_options(numbers, q_len, kv_len, str(numbers.choice(integers)))
            learned = {n: options.pop(n) for n in ("bias", "sinks") if n in options}
            dout = numbers.standard_normal((BATCH, q_len, HEADS, DIM)).astype(np.float32)
            dlse = np.ones((BATCH, HEADS, q_len), np.float32)

            def loss(inputs: Any, options: Any = options, dout: Any = dout) -> Any:
                found = call(implementation)(**inputs, **options)
                out, lse = found if isinstance(found, tuple) else (found, None)
                total = jnp.sum(out.astype(jnp.float32) * dout)
                if lse is not None:
                    seen = jnp.logical_not(jnp.isneginf(lse))
                    total += jnp.sum(jnp.where(seen, lse, jnp.zeros_like(lse)).astype(jnp.float32))
                return total, out

            run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
            (_, out), found = run({**arrays, **learned})
        wanted = attention64(
            *(arrays[n] for n in "qkv"),
            visible=visible(options, q_len, kv_len),
            cap=options.get("logits_soft_cap"),
            dout=dout,
            dlse=dlse if options.get("return_lse") else None,
            **learned,
        )
        tolerance = {"bfloat16": 8e-2, "float16": 1e-2}.get(dtype, 3e-5)
        for name, mine in {"out": out, **found}.items():
            truth = wanted[name]
            mine = np.asarray(mine).astype(np.float64)
            off = np.abs(mine - truth).max() / max(1.0, np.abs(truth).max())
            assert off < tolerance, (name, off, dtype, options)


# --- integers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("integer", INTEGERS)
def test_lengths_and_segments_of_every_integer(implementation: str, integer: str) -> None:
    """More positions than 8 bits can count, and ids that need all bits of theirs."""
    with jax.enable_x64(integer == "int64"):
        numbers = np.random.default_rng(0)
        arrays = drawn(numbers, 40, 300, "float32")
        limits = np.iinfo(integer)
        options: dict[str, Any] = {
            "kv_lengths": np.asarray([min(limits.max, 280), 3], integer),
            "q_lengths": np.asarray([min(limits.max, 2**40), 30], integer),
            "segment_ids": np.asarray([[limits.max] * 40, [limits.min] * 40], integer),
            "kv_segment_ids": np.asarray([[limits.max, 1] * 150, [limits.min] * 300], integer),
        }
        run = partial(flash_attention, implementation=implementation)
        found = jax.jit(run)(**arrays, **{n: jnp.asarray(x) for n, x in options.items()})
        eager = run(**arrays, **options)
    wide = {n: x.astype(object) for n, x in options.items()}
    seen = visible({"causal": False, **wide}, 40, 300)
    wanted = attention64(*(arrays[n] for n in "qkv"), visible=seen)
    np.testing.assert_allclose(np.asarray(found), wanted["out"], atol=2e-5)
    np.testing.assert_allclose(np.asarray(eager), wanted["out"], atol=2e-5)


def test_wide_segment_ids_are_not_taken_for_each_other(implementation: str) -> None:
    with jax.enable_x64(True):
        arrays = drawn(np.random.default_rng(0), 32, 32, "float32")
        ids = np.where(np.arange(32) < 11, 0, 2**32)[None].repeat(BATCH, axis=0)
        for given in (ids, jnp.asarray(ids), ids + 2**40 * np.arange(BATCH)[:, None]):
            found = call(implementation)(**arrays, segment_ids=given)
            seen = np.asarray(ids)[:, None, :, None] == np.asarray(ids)[:, None, None]
            wanted = attention64(*(arrays[n] for n in "qkv"), visible=seen)
            np.testing.assert_allclose(np.asarray(found), wanted["out"], atol=2e-5)


@pytest.mark.parametrize("mixed", [("uint32", "int32"), ("uint8", "uint32"), ("int8", "int16")])
def test_ids_of_two_dtypes(mixed: tuple[str, str]) -> None:
    first = np.asarray([[0, 5, np.iinfo(mixed[0]).max, 7]]).astype(mixed[0])
    second = np.asarray([[5, np.iinfo(mixed[1]).min, -1, np.iinfo(mixed[1]).max]]).astype(mixed[1])
    wanted = first.astype(object)[:, :, None] == second.astype(object)[:, None]
    for arrays in ((first, second), (jnp.asarray(first), jnp.asarray(second))):
        mine, other = ids_to_int32(*arrays)
        assert mine.dtype == other.dtype == np.int32
        np.testing.assert_array_equal(
            np.asarray(mine)[:, :, None] == np.asarray(other)[:, None], wanted
        )


def test_numbers_of_every_integer_stay_what_they_are() -> None:
    for integer in INTEGERS[:-1]:
        limits = np.iinfo(integer)
        x = np.asarray([0, 1, 100, limits.max, limits.min], integer)
        wanted = np.clip(x.astype(object), 0, 300).astype(np.int64)
        for given in (x, jnp.asarray(x)):
            found = np.asarray(to_int32(given, 0, 300))
            if integer == "int32":
                found = np.clip(found, 0, 300)
            np.testing.assert_array_equal(found, wanted)


# --- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [30, 2**31 - 1, sys.maxsize, 10**30])
def test_windows_that_mean_no_limit(implementation: str, limit: int) -> None:
    arrays = drawn(np.random.default_rng(0), 29, 31, "float32")
    run = call(implementation)
    plain, causal = run(**arrays), run(**arrays, causal=True)
    near = run(**arrays, window=(3, None))
    for window, wanted in (
        (limit, plain),
        ((limit, limit), plain),
        ((None, limit), plain),
        ((limit, None), plain),
        ((3, limit), near),
    ):
        np.testing.assert_allclose(run(**arrays, window=window), wanted, atol=1e-6)
    for window in (limit, (limit, 0), (limit, None), None):
        np.testing.assert_allclose(run(**arrays, causal=True, window=window), causal, atol=1e-6)


# --- vmap ----------------------------------------------------------------------------------------

EXAMPLES = 3


def mapped_arguments(numbers: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """All array arguments with an axis of examples in front; floating ones and others."""
    length = 26
    floating = {
        **{n: (BATCH, length, h, DIM) for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))},
        "bias": (1, HEADS, 1, length),
        "sinks": (HEADS,),
    }
    others = {
        "mask": numbers.random((EXAMPLES, BATCH, 1, 1, length)) < 0.7,
        "segment_ids": np.sort(numbers.integers(0, 3, (EXAMPLES, BATCH, length)), -1),
        "kv_segment_ids": np.sort(numbers.integers(0, 3, (EXAMPLES, BATCH, length)), -1),
        "q_lengths": numbers.integers(20, length, (EXAMPLES, BATCH)),
        "kv_lengths": numbers.integers(20, length, (EXAMPLES, BATCH)),
    }
    return (
        {
            n: jnp.asarray(numbers.standard_normal((EXAMPLES, *s)), jnp.float32)
            for n, s in floating.items()
        },
        {n: jnp.asarray(x, bool if n == "mask" else jnp.int32) for n, x in others.items()},
    )


NAMES = ("q", "k", "v", "bias", "sinks", "mask", "segment_ids", "kv_segment_ids")
NAMES += ("q_lengths", "kv_lengths", "dropout_key", "all")


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_every_argument(implementation: str, name: str) -> None:
    """Alone or together, of the results and of gradients, against a loop in Python."""
    if name == "dropout_key" and implementation == "cpu":
        pytest.skip("C++ leaves dropout to XLA")
    floating, others = mapped_arguments(np.random.default_rng(0))
    fixed: dict[str, Any] = {}
    if name == "dropout_key":
        others["dropout_key"] = jax.random.key_data(jax.random.split(jax.random.key(1), EXAMPLES))
        fixed["dropout_rate"] = 0.4
    every = {**floating, **others}
    axes = {n: 0 if name in (n, "all") else None for n in every}
    one = {n: x if axes[n] == 0 else x[0] for n, x in every.items()}

    def value_and_gradients(arrays: dict[str, Any]) -> Any:
        def loss(learned: Any) -> Any:
            out = call(implementation)(**{**arrays, **learned}, **fixed)
            factors = jnp.cos(jnp.arange(out.size, dtype=jnp.float32))
            return jnp.sum(out * factors.reshape(out.shape)), out

        gradients, out = jax.grad(loss, has_aux=True)({n: arrays[n] for n in floating})
        return out, gradients

    single = jax.jit(value_and_gradients, compiler_options=QUICK)
    wanted = [
        single({n: x[i] if axes[n] == 0 else x for n, x in one.items()}) for i in range(EXAMPLES)
    ]
    mapped = jax.vmap(value_and_gradients, in_axes=(axes,))
    found = [(jax.jit(mapped, compiler_options=QUICK)(one), wanted)]
    if name in ("sinks", "kv_lengths", "all"):
        nested = jax.jit(jax.vmap(mapped, in_axes=(axes,)), compiler_options=QUICK)
        twice = nested({n: jnp.stack([x, x[::-1]]) if axes[n] == 0 else x for n, x in one.items()})
        found.append((jax.tree.map(lambda x: x[0], twice), wanted))
        found.append((jax.tree.map(lambda x: x[1], twice), wanted[::-1]))
    for mine, truth in found:
        for i in range(EXAMPLES):
            for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(truth[i]), strict=True):
                np.testing.assert_allclose(np.asarray(a[i]), np.asarray(b), atol=3e-5)


# --- dropout -------------------------------------------------------------------------------------


def test_rows_do_not_share_masks() -> None:
    """With a state of 32 bits, 2**17 rows had the same first 64 decisions as another one twice."""
    rows = 2**17
    keep = keep_mask(
        0.5,
        jnp.asarray([3, 4], jnp.uint32),
        jnp.zeros((1, 1), jnp.int32),
        jnp.zeros((1, 1), jnp.int32),
        jnp.arange(rows, dtype=jnp.int32)[:, None],
        jnp.arange(64, dtype=jnp.int32)[None],
    )
    bits = np.packbits(np.asarray(keep), axis=1).view(np.uint64)[:, 0]
    assert len(np.unique(bits)) == rows
    share = np.asarray(keep).mean(axis=0)
    assert np.abs(share - 0.5).max() < 6 * 0.5 / rows**0.5
    # Neighbours of every kind agree by chance only.
    flat = np.asarray(keep)
    for step in (1, 2, 64, 4096):
        agreement = (flat[step:] == flat[:-step]).mean()
        assert abs(agreement - 0.5) < 6 * 0.5 / (64 * (rows - step)) ** 0.5


# --- paged attention -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "integer"),
    [
        *(("default", x) for x in INTEGERS[:-1]),
        ("x64", "int64"),
        ("x64", "int32"),
        *((x, "uint8") for x in MODES if x not in ("default", "x64")),
    ],
)
def test_paged_attention(mode: str, integer: str) -> None:
    numbers = np.random.default_rng(3)
    pages, size, tokens = 140, 4, 2
    table = numbers.permutation(128)[: 3 * 40].reshape(3, 40)
    lengths = np.asarray([100, 7, 0])
    with MODES[mode]():
        dtype = "float64" if mode == "x64" else "bfloat16" if mode == "strict dtypes" else "float32"
        q = jnp.asarray(numbers.standard_normal((3, tokens, HEADS, DIM)), dtype)
        k, v = (
            jnp.asarray(numbers.standard_normal((pages, size, KV_HEADS, DIM)), dtype)
            for _ in range(2)
        )
        sinks = jnp.asarray(numbers.standard_normal(HEADS), jnp.float32)
        small = [jnp.asarray(x, integer) for x in (table, lengths)]

        def loss(arrays: Any, **options: Any) -> Any:
            out = paged_attention(*arrays, *small, sinks=sinks, **options)
            return jnp.sum(out.astype(jnp.float32)), out

        differentiate = jax.value_and_grad(loss, has_aux=True)
        results = {}
        for window in (9, 10**6, sys.maxsize, None):
            run = jax.jit(partial(differentiate, window=window), compiler_options=QUICK)
            (_, out), gradients = run((q, k, v))
            results[window] = (out, *gradients)
    for same in (10**6, sys.maxsize):
        for a, b in zip(results[same], results[None], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for window in (9, None):
        positions = lengths[:, None] - tokens + np.arange(tokens)
        key = np.arange(40 * size)
        seen = key <= positions[:, :, None]
        seen &= key >= positions[:, :, None] - (window or 10**6)
        whole = [
            np.asarray(x).astype(np.float64)[table].reshape(3, -1, KV_HEADS, DIM) for x in (k, v)
        ]
        wanted = attention64(np.asarray(q), *whole, visible=seen[:, None], sinks=sinks)
        tolerance = 2e-2 if dtype == "bfloat16" else 2e-5
        out = np.asarray(results[window][0]).astype(np.float64)
        np.testing.assert_allclose(out, wanted["out"], atol=tolerance)


@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"cfg": PagedAttentionXlaConfig(1)}], ids=str
)
def test_paged_attention_inside_shard_map(options: dict[str, Any]) -> None:
    """With `check_vma`, as by default: each device has some of the sequences, and all pages."""
    numbers = np.random.default_rng(0)
    q = jnp.asarray(numbers.standard_normal((4, 1, HEADS, DIM)), jnp.float32)
    pages = jnp.asarray(numbers.standard_normal((2, 8, 4, KV_HEADS, DIM)), jnp.float32)
    table = jnp.asarray(numbers.integers(0, 8, (4, 3)), jnp.int32)
    lengths = jnp.asarray([3, 12, 7, 0], jnp.int32)

    def loss(q: Any, pages: Any, table: Any, lengths: Any) -> Any:
        return jnp.sum(paged_attention(q, pages[0], pages[1], table, lengths, **options) ** 2)

    axis, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("x",))
    shared_out = jax.shard_map(
        lambda *arrays: jax.lax.psum(loss(*arrays), "x"),
        mesh=mesh,
        in_specs=(axis, everywhere, axis, axis),
        out_specs=everywhere,
    )
    found = jax.jit(jax.grad(shared_out, (0, 1)))(q, pages, table, lengths)
    wanted = jax.jit(jax.grad(loss, (0, 1)))(q, pages, table, lengths)
    for mine, truth in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(truth), atol=1e-5)
