"""Scores of any size: additive masks, heads that a bias switches off, scores of 1e4 and more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICK
from attention_float64 import attention64
from attention_interpreted import interpret, interpreted

from ejkernel.kernels.flash_attention import FlashAttentionCppConfig, FlashAttentionXlaConfig
from ejkernel.modules import flash_attention

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 2, 41, 37, 4, 2, 16
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
LOWEST = float(np.finfo(np.float32).min)
HUGE = {"1e4": -1e4, "1e9": -1e9, "lowest": LOWEST, "inf": -np.inf}


@pytest.fixture(params=["xla", "cpu", "pallas", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        request.getfixturevalue("native_library")
    interpret(monkeypatch)
    return str(request.param)


def attention_of(implementation: str, constant: Collection[str] = ()) -> Any:
    if implementation in ("pallas", "triton"):
        return interpreted(implementation, constant)
    return partial(flash_attention, implementation=implementation, cfg=SMALL[implementation])


def arrays(size: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(seed)
    shapes = {
        "q": (BATCH, Q_LEN, HEADS, DIM),
        "k": (BATCH, KV_LEN, KV_HEADS, DIM),
        "v": (BATCH, KV_LEN, KV_HEADS, DIM),
    }
    drawn = {n: numbers.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    drawn["q"] *= np.float32(size)
    return drawn


def differentiated(attention: Any, **fixed: Any) -> Callable[..., dict[str, np.ndarray]]:
    """A function of inputs to differentiate and of other keywords, compiled once for all sizes."""

    def loss(inputs: dict[str, Any], given: dict[str, Any], dout: Any, dlse: Any) -> Any:
        found = attention(**inputs, **given, **fixed)
        out, lse = found if isinstance(found, tuple) else (found, None)
        total = jnp.sum(dout * out)
        if dlse is not None:
            total += jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, dlse * lse))
        return total, out

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)

    def gradients(
        inputs: dict[str, Any], dout: Any, dlse: Any = None, **given: Any
    ) -> dict[str, np.ndarray]:
        (_, out), found = run(inputs, given, dout, dlse)
        return {"out": np.asarray(out), **{name: np.asarray(x) for name, x in found.items()}}

    return gradients


def close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float, case: Any) -> None:
    for name, mine in found.items():
        truth = np.asarray(wanted[name])
        assert np.isfinite(mine).all(), f"{name} is not finite with {case}"
        scale = max(np.abs(truth).max(), 0.1)
        worst = np.abs(mine.astype(np.float64) - truth).max() / scale
        assert worst < tolerance, f"{name} is off by {worst:.1e} of its largest with {case}"


def padding(value: float, kv_lengths: Any = (KV_LEN - 9, KV_LEN)) -> np.ndarray:
    real = np.arange(KV_LEN) < np.asarray(kv_lengths)[:, None]
    return np.where(real, 0.0, value).astype(np.float32)[:, None, None, :]


def real_rows(lengths: Any = (Q_LEN - 12, Q_LEN), seed: int = 5) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((BATCH, Q_LEN, HEADS, DIM))
    real = np.arange(Q_LEN) < np.asarray(lengths)[:, None]
    return np.where(real[:, :, None, None], drawn, 0.0).astype(np.float32)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "constant"])
def test_padded_batches_with_an_additive_mask(implementation: str, learned: bool) -> None:
    """The mask of rows beyond the length hides every key, and the loss is of the real ones."""
    run = differentiated(attention_of(implementation, () if learned else ("bias",)))
    dout = real_rows()
    rows = (
        np.arange(Q_LEN)[None, None, :, None]
        >= np.asarray([Q_LEN - 12, Q_LEN])[:, None, None, None]
    )
    for (value, number), size in itertools.product(HUGE.items(), [1.0, 40.0]):
        inputs = arrays(size)
        bias = np.where(rows, np.float32(number), padding(number)).astype(np.float32)
        wanted = attention64(*(inputs[n] for n in "qkv"), bias=bias, dout=dout)
        if learned:
            found = run({**inputs, "bias": bias}, dout)
            if value == "inf":
                found.pop("bias")  # nobody learns an infinite number
        else:
            found = run(inputs, dout, bias=bias)
        seen = found.pop("out")
        case = f"{value} and queries of size {size}"
        close(found, wanted, 1e-4 * size, case)
        real = dout != 0
        close({"out": seen * real}, {"out": wanted["out"] * real}, 1e-4 * size, case)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_a_bias_hides_from_all_keys(implementation: str, causal: bool) -> None:
    """As `jax.nn`: the scores are what rounding leaves of them, most often all equal."""

    def as_jax(q: Any, k: Any, v: Any, bias: Any) -> Any:
        wide = jnp.broadcast_to(bias, (BATCH, HEADS, Q_LEN, KV_LEN))
        return jax.nn.dot_product_attention(q, k, v, bias=wide)

    run = differentiated(attention_of(implementation), causal=causal)
    run_jax = differentiated(as_jax)
    run_constant = differentiated(attention_of(implementation, ("bias",)), causal=causal)
    inputs = arrays()
    dout = real_rows((Q_LEN, Q_LEN))
    visible = np.tri(Q_LEN, KV_LEN, dtype=bool) if causal else None
    for value in (-1e9, LOWEST, -3e38, -1e5):
        bias = np.full((1, HEADS, 1, 1), value, np.float32)
        bias[:, 1:3] = 0.0  # heads that a bias switches off, beside others
        learned = {**inputs, "bias": bias}
        found = run(learned, dout)
        wanted = attention64(*(inputs[n] for n in "qkv"), bias=bias, visible=visible, dout=dout)
        tolerance = 5e-2 if value == -1e5 else 2e-4  # there 0.008 is the last digit of a score
        close(found, wanted, tolerance, value)
        close(run_constant(inputs, dout, bias=bias), wanted, tolerance, value)
        if not causal:
            close(found, run_jax(learned, dout), tolerance, value)


@pytest.mark.parametrize("option", ["plain", "causal", "sinks", "bias", "lse", "cap"])
def test_large_scores(implementation: str, option: str) -> None:
    """One key has nearly all the weight of a row, and whose it is does not depend on rounding."""
    fixed: dict[str, Any] = {}
    more: dict[str, Any] = {}
    dlse = None
    if option == "causal":
        fixed["causal"] = True
        more["visible"] = np.tri(Q_LEN, KV_LEN, dtype=bool)
    if option in ("lse", "cap"):  # behind a cap, zeros come out as rounding: beside more than that
        fixed["return_lse"] = True
        dlse = np.random.default_rng(3).standard_normal((BATCH, HEADS, Q_LEN)).astype(np.float32)
    dout = real_rows((Q_LEN, Q_LEN))
    run = differentiated(attention_of(implementation), **fixed)
    sizes = (3e2, 1e4, 1e6)
    if option == "cap":
        # An interpreted kernel's tanh is not the same to the last digit in two programs: of a cap
        # of 1e4 that is a digit behind the point.
        sizes = (3e2,) if implementation == "pallas" else (3e2, 1e4, 1e5)
    for size in sizes:
        inputs = arrays(size)
        given = dict(more)
        if option == "sinks":
            given["sinks"] = np.asarray([0.0, size / 2, -size, size], np.float32)
        if option == "bias":
            drawn = np.random.default_rng(2).standard_normal((1, HEADS, 1, KV_LEN))
            given["bias"] = (size * drawn).astype(np.float32)
        inputs |= {name: given[name] for name in ("sinks", "bias") if name in given}
        if option == "cap":
            given["cap"] = size
            run = differentiated(attention_of(implementation), logits_soft_cap=size, **fixed)
        inputs["q"] = with_a_winner(inputs, size, **given)
        found = run(inputs, dout, dlse)
        wanted = attention64(*(inputs[n] for n in "qkv"), dout=dout, dlse=dlse, **given)
        close(found, wanted, 5e-4 if size < 1e4 else 1e-5, size)


def with_a_winner(
    inputs: dict[str, np.ndarray],
    size: float,
    visible: Any = True,
    bias: Any = 0.0,
    sinks: Any = None,
    cap: float | None = None,
) -> np.ndarray:
    """The queries, drawn again as long as two scores of a row, or a score and a sink, are close.

    Of 1e4 float32 has three digits behind the point, so of what two close keys share nobody finds
    more: `jax.nn.dot_product_attention` in float32 was off by more than 2e-3 in 5 of 20 draws.
    """
    numbers, q = np.random.default_rng(7), inputs["q"]
    k = np.repeat(inputs["k"], HEADS // KV_HEADS, axis=2).astype(np.float64)
    while True:
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        scores = np.where(visible, scores + bias, -np.inf)
        if sinks is not None:
            logits = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
            scores = np.concatenate([scores, logits], axis=-1)
        second, first = np.moveaxis(np.sort(scores, axis=-1)[..., -2:], -1, 0)
        undecided = np.swapaxes(first - second < size / 300, 1, 2)[..., None]
        if not undecided.any():
            return q
        drawn = size * numbers.standard_normal(q.shape)
        q = np.where(undecided, drawn, q).astype(np.float32)


def test_scores_that_a_key_of_one_size_and_a_bias_of_another_give(implementation: str) -> None:
    """A first block of keys at -1e9, as left padding has it, and then others."""
    inputs = arrays(10.0)
    bias = np.where(np.arange(KV_LEN) < 20, -1e9, 0.0).astype(np.float32)[None, None, None]
    dout = real_rows((Q_LEN, Q_LEN))
    run = differentiated(attention_of(implementation, ("bias",)))
    found = run(inputs, dout, bias=bias)
    wanted = attention64(*(inputs[n] for n in "qkv"), bias=bias, dout=dout)
    close(found, wanted, 2e-4, "left padding")
