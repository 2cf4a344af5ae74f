"""Scores of any size: additive masks, heads that a bias switches off, scores of 1e4 and more."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICK
from attention_float64 import attention64

from ejkernel.kernels.flash_attention import FlashAttentionConfig
from ejkernel.modules import flash_attention
from ejkernel.ops import BwdParams, FwdParams

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 2, 41, 37, 4, 2, 16
SMALL = FlashAttentionConfig(
    FwdParams(q_blocksize=24, kv_blocksize=16, blocksize_heads=2),
    BwdParams(q_blocksize=12, kv_blocksize=16, blocksize_heads=1),
)
HUGE = {"1e4": -1e4, "1e9": -1e9, "lowest": float(np.finfo(np.float32).min), "inf": -np.inf}


@pytest.fixture(params=["xla", "cpu"])
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        request.getfixturevalue("native_library")
    return request.param


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


def gradients(
    inputs: dict[str, Any],
    fixed: dict[str, Any],
    dout: Any,
    dlse: Any = None,
    attention: Any = flash_attention,
) -> dict[str, np.ndarray]:
    """Results and gradients of all `inputs`, as NumPy arrays."""

    def loss(inputs: dict[str, Any]) -> Any:
        found = attention(**inputs, **fixed)
        out, lse = found if isinstance(found, tuple) else (found, None)
        total = jnp.sum(jnp.asarray(dout) * out)
        if dlse is not None:
            total += jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, jnp.asarray(dlse) * lse))
        return total, out

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
    (_, out), found = run(inputs)
    return {"out": np.asarray(out), **{name: np.asarray(x) for name, x in found.items()}}


def close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    for name, mine in found.items():
        truth = np.asarray(wanted[name])
        assert np.isfinite(mine).all(), f"{name} is not finite"
        scale = max(np.abs(truth).max(), 0.1)
        worst = np.abs(mine.astype(np.float64) - truth).max() / scale
        assert worst < tolerance, f"{name} is off by {worst:.1e} of its largest number"


def padding(value: float, kv_lengths: Any = (KV_LEN - 9, KV_LEN)) -> np.ndarray:
    real = np.arange(KV_LEN) < np.asarray(kv_lengths)[:, None]
    return np.where(real, 0.0, value).astype(np.float32)[:, None, None, :]


def real_rows(lengths: Any = (Q_LEN - 12, Q_LEN), seed: int = 5) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((BATCH, Q_LEN, HEADS, DIM))
    real = np.arange(Q_LEN) < np.asarray(lengths)[:, None]
    return np.where(real[:, :, None, None], drawn, 0.0).astype(np.float32)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "constant"])
@pytest.mark.parametrize("size", [1.0, 40.0])
@pytest.mark.parametrize("value", list(HUGE))
def test_padded_batches_with_an_additive_mask(
    implementation: str, value: str, size: float, learned: bool
) -> None:
    """The mask of rows beyond the length hides every key, and the loss is of the real ones."""
    inputs, dout = arrays(size), real_rows()
    rows = (
        np.arange(Q_LEN)[None, None, :, None]
        >= np.asarray([Q_LEN - 12, Q_LEN])[:, None, None, None]
    )
    bias = np.where(rows, np.float32(HUGE[value]), padding(HUGE[value])).astype(np.float32)
    fixed: dict[str, Any] = {"implementation": implementation, "cfg": SMALL}
    if learned:
        inputs["bias"] = bias
    else:
        fixed["bias"] = bias
    found = gradients(inputs, fixed, dout)
    wanted = attention64(*(inputs[n] for n in "qkv"), bias=bias, dout=dout)
    if value == "inf":
        found.pop("bias", None)  # nobody learns an infinite number
    seen = found.pop("out")
    close(found, wanted, 1e-4 * size)
    close({"out": seen * (dout != 0)}, {"out": wanted["out"] * (dout != 0)}, 1e-4 * size)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value", [-1e9, float(np.finfo(np.float32).min), -3e38, -1e5])
def test_rows_that_a_bias_hides_from_all_keys(
    implementation: str, value: float, causal: bool
) -> None:
    """As `jax.nn`: the scores are what rounding leaves of them, most often all equal."""
    inputs = {**arrays(), "bias": np.full((1, HEADS, 1, 1), value, np.float32)}
    inputs["bias"][:, 1:3] = 0.0  # heads that a bias switches off, beside others
    dout = real_rows((Q_LEN, Q_LEN))
    fixed: dict[str, Any] = {"implementation": implementation, "cfg": SMALL, "causal": causal}
    found = gradients(inputs, fixed, dout)
    visible = np.tri(Q_LEN, KV_LEN, dtype=bool) if causal else None
    wanted = attention64(
        *(inputs[n] for n in "qkv"), bias=inputs["bias"], visible=visible, dout=dout
    )
    tolerance = 5e-2 if value == -1e5 else 2e-4  # there 0.008 is the last digit of a score
    close(found, wanted, tolerance)
    if not causal:

        def as_jax(q: Any, k: Any, v: Any, bias: Any) -> Any:
            wide = jnp.broadcast_to(bias, (BATCH, HEADS, Q_LEN, KV_LEN))
            return jax.nn.dot_product_attention(q, k, v, bias=wide)

        close(found, gradients(inputs, {}, dout, attention=as_jax), tolerance)


@pytest.mark.parametrize("option", ["plain", "causal", "sinks", "bias", "lse", "cap"])
@pytest.mark.parametrize("size", [3e2, 1e4, 1e6])
def test_large_scores(implementation: str, size: float, option: str) -> None:
    """One key has nearly all the weight of a row, and whose it is does not depend on rounding."""
    inputs = arrays(size)
    dout = real_rows((Q_LEN, Q_LEN))
    fixed: dict[str, Any] = {"implementation": implementation, "cfg": SMALL}
    more: dict[str, Any] = {}
    dlse = None
    if option == "causal":
        fixed["causal"] = True
        more["visible"] = np.tri(Q_LEN, KV_LEN, dtype=bool)
    if option == "sinks":
        inputs["sinks"] = np.asarray([0.0, size / 2, -size, size], np.float32)
    if option == "bias":
        inputs["bias"] = size * np.random.default_rng(2).standard_normal(
            (1, HEADS, 1, KV_LEN)
        ).astype(np.float32)
    if option in ("lse", "cap"):  # behind a cap, zeros come out as rounding: beside more than that
        fixed["return_lse"] = True
        dlse = np.random.default_rng(3).standard_normal((BATCH, HEADS, Q_LEN)).astype(np.float32)
    if option == "cap":
        fixed["logits_soft_cap"] = more["cap"] = size
    more |= {name: inputs[name] for name in ("sinks", "bias") if name in inputs}
    inputs["q"] = with_a_winner(inputs, size, **more)
    found = gradients(inputs, fixed, dout, dlse)
    wanted = attention64(*(inputs[n] for n in "qkv"), dout=dout, dlse=dlse, **more)
    close(found, wanted, 5e-4 if size < 1e4 else 1e-5)


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
    fixed: dict[str, Any] = {"implementation": implementation, "cfg": SMALL, "bias": bias}
    found = gradients(inputs, fixed, dout)
    wanted = attention64(*(inputs[n] for n in "qkv"), bias=bias, dout=dout)
    close(found, wanted, 2e-4)
