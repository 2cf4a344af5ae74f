"""What a query does not see may be anything: NaN, infinity, numbers too large to multiply."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICK
from attention_interpreted import interpret, interpreted

from ejkernel.kernels.flash_attention import (
    FlashAttentionCppConfig,
    FlashAttentionXlaConfig,
    attention_reference,
)
from ejkernel.kernels.paged_attention import paged_attention_reference
from ejkernel.modules import flash_attention, paged_attention

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 3, 40, 4, 2, 8
SMALL = {
    "xla": FlashAttentionXlaConfig(
        block_q=24,
        block_k=16,
        block_heads=2,
        backward_block_q=12,
        backward_block_k=16,
        backward_block_heads=1,
    ),
    "cpu": FlashAttentionCppConfig(
        block_q=24, block_k=16, backward_block_q=12, backward_block_k=16
    ),
}
POISON = (np.nan, np.inf, -np.inf, 1e30, 1e4)
LENGTHS = np.asarray([27, 40, 0], np.int32)
SEGMENTS = np.repeat(np.asarray([[0, 1, 2, 3], [5, 5, 6, 6], [9, 8, 7, 6]], np.int32), 10, axis=1)
MASK = np.random.default_rng(4).random((BATCH, 1, 1, LENGTH)) < 0.6


@pytest.fixture(params=["xla", "cpu", "definition", "pallas", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        request.getfixturevalue("native_library")
    interpret(monkeypatch)
    return str(request.param)


def arrays() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return {
        n: numbers.standard_normal((BATCH, LENGTH, heads, DIM)).astype(np.float32)
        for n, heads in shapes.items()
    }


def positions(real: np.ndarray) -> np.ndarray:
    return real[:, :, None, None]


FIRST_SEGMENT = SEGMENTS[:, :1] == SEGMENTS
OTHER_EXAMPLES = np.repeat(np.arange(BATCH)[:, None] != 1, LENGTH, axis=1)
POSITIONS = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))

# Options, and which queries and keys are those that must not notice what the others hold.
CASES: dict[str, tuple[dict[str, Any], np.ndarray, np.ndarray]] = {
    "kv_lengths": (
        {"kv_lengths": LENGTHS},
        np.ones((BATCH, LENGTH), bool),
        LENGTHS[:, None] > POSITIONS,
    ),
    "both lengths": (
        {"q_lengths": LENGTHS, "kv_lengths": LENGTHS, "causal": True},
        LENGTHS[:, None] > POSITIONS,
        LENGTHS[:, None] > POSITIONS,
    ),
    "q_lengths": (
        {"q_lengths": LENGTHS, "logits_soft_cap": 5.0},
        LENGTHS[:, None] > POSITIONS,
        np.ones((BATCH, LENGTH), bool),
    ),
    "segments": (
        {"segment_ids": SEGMENTS},
        FIRST_SEGMENT,
        FIRST_SEGMENT,
    ),
    "segments with a cap": (
        {"segment_ids": SEGMENTS, "logits_soft_cap": 5.0, "causal": True},
        FIRST_SEGMENT,
        FIRST_SEGMENT,
    ),
    "mask": ({"mask": MASK}, np.ones((BATCH, LENGTH), bool), MASK[:, 0, 0]),
    "causal": ({"causal": True}, POSITIONS < 23, POSITIONS < 23),
    "window": ({"window": (5, 5)}, POSITIONS < 18, POSITIONS < 23),
    "batch": (
        {},
        POSITIONS * 0 + np.arange(BATCH)[:, None] != 1,
        POSITIONS * 0 + np.arange(BATCH)[:, None] != 1,
    ),
}


def differentiated(implementation: str, options: dict[str, Any]) -> Callable[..., Any]:
    """A function of inputs and of the gradient of the output, compiled once."""
    if implementation == "definition":
        attention: Any = attention_reference
    elif implementation in ("pallas", "triton"):
        attention = interpreted(implementation)
    else:
        attention = partial(
            flash_attention, implementation=implementation, cfg=SMALL[implementation]
        )

    @partial(jax.jit, compiler_options=QUICK)
    def pull_back(inputs: dict[str, Any], dout: Any) -> Any:
        out, pull = jax.vjp(lambda inputs: attention(**inputs, **options), inputs)
        return {"out": out, **pull(dout)[0]}

    def run(inputs: dict[str, Any], dout: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.asarray(x) for name, x in pull_back(inputs, dout).items()}

    return run


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_not_seen_reaches_nobody(implementation: str, case: str) -> None:
    options, queries, keys = CASES[case]
    queries, keys = positions(queries), positions(keys)
    clean = arrays()
    numbers = np.random.default_rng(1).standard_normal((BATCH, LENGTH, HEADS, DIM))
    dout = np.where(queries, numbers, 0.0).astype(np.float32)
    run = differentiated(implementation, options)
    wanted = run(clean, dout)
    # Later queries do see later keys, and what they get from there they hand on to earlier keys.
    compared = ("out", "q") if case in ("causal", "window") else ("out", "q", "k", "v")
    for poison in POISON:
        value = np.float32(poison)
        inputs = {n: np.where(queries if n == "q" else keys, x, value) for n, x in clean.items()}
        # What comes back may be anything too, except for the definition, which JAX differentiates.
        back = dout if implementation == "definition" else np.where(queries, dout, value)
        found = run(inputs, back)
        for name in compared:
            real = queries if name in ("out", "q") else keys
            mine, truth = (np.where(real, x, 0.0) for x in (found[name], wanted[name]))
            np.testing.assert_allclose(
                mine, truth, rtol=1e-5, atol=1e-5, err_msg=f"{name} with {poison}"
            )
        if case not in ("kv_lengths", "q_lengths", "both lengths", "mask"):
            continue
        # Nothing depends on what does not exist.
        for name, real in (("q", queries), ("k", keys), ("v", keys)):
            rest = np.where(real, 0.0, found[name])
            assert (rest == 0).all(), f"the gradient of {name} where it is {poison}"


def test_keys_that_come_after_all_queries(implementation: str) -> None:
    """Nor do rows see them that only fill a block."""
    inputs = arrays()
    inputs["q"] = inputs["q"][:, :27]
    dout = np.random.default_rng(1).standard_normal(inputs["q"].shape).astype(np.float32)
    run = differentiated(implementation, {"causal": True})
    wanted = run(inputs, dout)
    for poison in POISON:
        for name in ("k", "v"):
            inputs[name][:, 27:] = poison
        found = run(inputs, dout)
        for name, truth in wanted.items():
            np.testing.assert_allclose(
                found[name], truth, rtol=1e-5, atol=1e-5, err_msg=f"{name} with {poison}"
            )


def test_whoever_sees_nan_gets_nan(implementation: str) -> None:
    """Hiding what nobody sees must not hide what somebody sees."""
    inputs = arrays()
    inputs["v"][0, 3, 1, 2] = np.nan
    options = {"segment_ids": SEGMENTS}
    dout = np.ones((BATCH, LENGTH, HEADS, DIM), np.float32)
    run = differentiated(implementation, options)
    found = run(inputs, dout)
    out = found["out"]
    assert np.isnan(out[0, :10, 2:, 2]).all()
    assert np.isfinite(out[0, 10:]).all()
    assert np.isfinite(out[1:]).all()
    assert np.isfinite(out[0, :10, :2]).all()
    assert np.isnan(found["q"][0, :10, 2:]).any()
    assert np.isfinite(found["q"][0, 10:]).all()
    dout[0, 3, 2, 1] = np.nan
    for size in (1.0, 1e3):  # of large scores, the backward pass finds the sums again
        inputs = arrays()
        inputs["q"] *= np.float32(size)
        found = run(inputs, dout)
        assert np.isnan(found["q"][0, 3, 2]).all(), size
        assert np.isnan(found["v"][0, 3, 1]).any(), size
        if implementation != "definition":
            for name in ("q", "k", "v"):
                assert np.isfinite(found[name][0, 10:]).all(), (name, size)
                assert np.isfinite(found[name][1:]).all(), (name, size)


# --- paged attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"logits_soft_cap": 4.0}], ids=str)
@pytest.mark.parametrize("which", ["xla", "definition"])
@pytest.mark.parametrize("poison", POISON)
def test_unused_rows_and_pages_of_a_cache(
    poison: float, which: str, options: dict[str, Any]
) -> None:
    numbers = np.random.default_rng(0)
    pages, size, tokens = 7, 4, 2
    table = np.asarray([[3, 1, 0], [5, 2, 6], [6, 6, 6]], np.int32)  # page 4 is nobody's
    lengths = np.asarray([6, 12, 0], np.int32)
    q = numbers.standard_normal((3, tokens, HEADS, DIM)).astype(np.float32)
    k, v = numbers.standard_normal((2, pages, size, KV_HEADS, DIM)).astype(np.float32)
    used = np.zeros((pages, size), bool)
    for row, length in zip(table, lengths, strict=True):
        first = max(0, length - tokens - options["window"]) if "window" in options else 0
        for key in range(first, length):
            used[row[key // size], key % size] = True
    dout = numbers.standard_normal(q.shape).astype(np.float32)

    def loss(arrays: Any) -> Any:
        attention = paged_attention if which == "xla" else paged_attention_reference
        out = attention(*arrays, jnp.asarray(table), jnp.asarray(lengths), **options)
        return jnp.sum(out * dout), out

    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
    (_, wanted), gradients = differentiate((q, k, v))
    dirty = [np.where(used[:, :, None, None], x, np.float32(poison)) for x in (k, v)]
    (_, found), dirty_gradients = differentiate((q, *dirty))
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-6)
    for mine, truth in zip(dirty_gradients, gradients, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(truth), rtol=1e-5, atol=1e-6)
