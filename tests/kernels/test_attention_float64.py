"""Arrays of float64: computed and summed in float64, forward and backward, with every option."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICK
from attention_float64 import attention64
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.flash_attention import FlashAttention, FlashAttentionXlaConfig
from ejkernel.kernels.flash_attention.dropout import keep_mask
from ejkernel.modules import flash_attention

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 2, 41, 37, 4, 2, 16
SMALL = FlashAttentionXlaConfig(
    block_q=24,
    block_k=16,
    block_heads=2,
    backward_block_q=12,
    backward_block_k=16,
    backward_block_heads=1,
)
TOLERANCE = 1e-10
NUMBERS = np.random.default_rng(0)
ROW, KEY = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None]
LENGTHS = {"q_lengths": np.asarray([29, 41]), "kv_lengths": np.asarray([37, 20])}
SEGMENTS = {
    name: np.sort(NUMBERS.integers(0, 4, (BATCH, length)), axis=1)
    for name, length in (("segment_ids", Q_LEN), ("kv_segment_ids", KV_LEN))
}
MASK = NUMBERS.random((BATCH, 1, Q_LEN, KV_LEN)) < 0.6
RATE = 0.3

CAUSAL = KEY <= ROW
WINDOW = (KEY >= ROW - 7) & (KEY <= ROW + 3)
OF_LENGTHS = (LENGTHS["q_lengths"][:, None, None, None] > ROW) & (
    LENGTHS["kv_lengths"][:, None, None, None] > KEY
)
OF_SEGMENTS = (SEGMENTS["segment_ids"][:, :, None] == SEGMENTS["kv_segment_ids"][:, None])[:, None]

# Options of the call, and what they mean to the definition.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"visible": CAUSAL}),
    "window": ({"window": (7, 3)}, {"visible": WINDOW}),
    "mask": ({"mask": MASK}, {"visible": MASK}),
    "segments": (SEGMENTS, {"visible": OF_SEGMENTS}),
    "lengths": (LENGTHS, {"visible": OF_LENGTHS}),
    "soft cap": ({"logits_soft_cap": 2.0}, {"cap": 2.0}),
    "scale": ({"softmax_scale": 0.1}, {"scale": 0.1}),
    "dropout": ({"dropout_rate": RATE}, {}),
    "bias": ({"bias": NUMBERS.standard_normal((1, HEADS, Q_LEN, KV_LEN))}, {}),
    "bias of keys": ({"bias": NUMBERS.standard_normal(KV_LEN)}, {}),
    "additive mask": ({"bias": np.where(KEY < 20, -1e9, 0.0)}, {}),
    "sinks": ({"sinks": NUMBERS.standard_normal(HEADS)}, {}),
    "many": (
        {
            "causal": True,
            "window": 20,
            "mask": MASK,
            "logits_soft_cap": 3.0,
            "dropout_rate": RATE,
            "bias": NUMBERS.standard_normal((BATCH, 1, Q_LEN, KV_LEN)),
            "sinks": NUMBERS.standard_normal(HEADS),
            **LENGTHS,
        },
        {"visible": CAUSAL & (KEY >= ROW - 20) & MASK & OF_LENGTHS, "cap": 3.0},
    ),
}


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def drawn(size: float = 1.0) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1)
    return {
        "q": size * numbers.standard_normal((BATCH, Q_LEN, HEADS, DIM)),
        "k": numbers.standard_normal((BATCH, KV_LEN, KV_HEADS, DIM)),
        "v": numbers.standard_normal((BATCH, KV_LEN, KV_HEADS, DIM)),
    }


def run(
    attention: Any, inputs: dict[str, Any], dout: np.ndarray, dlse: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Results and gradients of all `inputs`; with `dlse` the attention gives two results."""

    def loss(inputs: dict[str, Any]) -> Any:
        found = attention(**inputs)
        if dlse is None:
            return jnp.sum(dout * found), {"out": found}
        out, lse = found
        total = jnp.sum(dout * out) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, dlse * lse))
        return total, {"out": out, "lse": lse}

    differentiate = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
    (_, results), gradients = differentiate({n: jnp.asarray(x) for n, x in inputs.items()})
    return {name: np.asarray(x) for name, x in (results | gradients).items()}


def close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, mine in found.items():
        truth = wanted[name]
        assert mine.dtype == np.float64, name
        assert mine.shape == truth.shape, name
        seen = ~np.isneginf(truth)
        assert (np.isneginf(mine) == ~seen).all(), name
        off = np.abs(mine[seen] - truth[seen]).max() / max(1.0, np.abs(truth[seen]).max())
        assert off < TOLERANCE, f"{name} is off by {off:.1e}"


def definition(case: str, inputs: dict[str, Any], dout: Any, dlse: Any) -> dict[str, np.ndarray]:
    options, meaning = CASES[case]
    learned = {name: options[name] for name in ("bias", "sinks") if name in options}
    if "dropout_rate" in options:
        shape = (BATCH, HEADS, Q_LEN, KV_LEN)
        places = np.meshgrid(*map(np.arange, shape), indexing="ij", sparse=True)
        keep = keep_mask(RATE, jax.random.key_data(jax.random.key(7)), *map(jnp.asarray, places))
        meaning = {**meaning, "kept": np.asarray(keep) / (1 - RATE)}
    return attention64(**inputs, **learned, **meaning, dout=dout, dlse=dlse, score_dtype=np.float64)


@pytest.mark.parametrize("cfg", [SMALL, None], ids=["small blocks", "default blocks"])
@pytest.mark.parametrize("case", list(CASES))
def test_values_and_gradients(case: str, cfg: FlashAttentionXlaConfig | None) -> None:
    options = dict(CASES[case][0])
    inputs = drawn() | {name: options.pop(name) for name in ("bias", "sinks") if name in options}
    if "dropout_rate" in options:
        options["dropout_key"] = jax.random.key(7)
    numbers = np.random.default_rng(2)
    dout = numbers.standard_normal((BATCH, Q_LEN, HEADS, DIM))
    # Every other case asks for the log-sum-exp, and then its gradient counts.
    with_lse = cfg is SMALL
    dlse = numbers.standard_normal((BATCH, HEADS, Q_LEN)) if with_lse else None

    def attention(**inputs: Any) -> Any:
        return flash_attention(**inputs, **options, return_lse=with_lse, cfg=cfg)

    close(run(attention, inputs, dout, dlse), definition(case, drawn(), dout, dlse))


@pytest.mark.parametrize("size", [40.0, 1e4])
def test_large_scores(size: float) -> None:
    """Beyond 64 the statistics of the rows are found again, in float64 as well."""
    inputs = drawn(size)
    dout = np.random.default_rng(2).standard_normal((BATCH, Q_LEN, HEADS, DIM))

    def attention(**inputs: Any) -> Any:
        return flash_attention(**inputs, causal=True, cfg=SMALL)

    wanted = attention64(**inputs, visible=CAUSAL, dout=dout, score_dtype=np.float64)
    close(run(attention, inputs, dout, None), wanted)


def test_ring_attention() -> None:
    inputs = drawn()
    inputs = {name: x[:, :36] for name, x in inputs.items()}
    inputs["sinks"] = NUMBERS.standard_normal(HEADS)
    inputs["bias"] = np.random.default_rng(3).standard_normal((1, HEADS, 36, 36))
    numbers = np.random.default_rng(2)
    dout = numbers.standard_normal((BATCH, 36, HEADS, DIM))
    dlse = numbers.standard_normal((BATCH, HEADS, 36))
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, tables = P(None, "ring"), P(None, None, "ring")
    specs = {"q": rows, "k": rows, "v": rows, "sinks": P(), "bias": tables}

    def attention(**inputs: Any) -> Any:
        def local(inputs: dict[str, jax.Array]) -> Any:
            ring = {"sequence_axis": "ring", "return_lse": True, "cfg": SMALL}
            return flash_attention(**inputs, causal=True, **ring)

        return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(rows, tables))(inputs)

    wanted = attention64(
        **inputs, visible=np.tri(36, dtype=bool), dout=dout, dlse=dlse, score_dtype=np.float64
    )
    close(run(attention, inputs, dout, dlse), wanted)


def test_others_leave_such_calls_to_xla() -> None:
    kernel = FlashAttention()
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in drawn().values()]
    inv = kernel.bind(*arrays, causal=True, softmax_scale=1.0)
    for name in ("pallas", "triton", "cpu"):
        reasons = " ".join(kernel.implementation(name).supports.reasons_against(inv))
        assert "arrays of float64 are not supported" in reasons, name


def test_the_queries_decide() -> None:
    """Float32 queries are computed in float32, whatever they meet, as in the definition."""
    inputs = {name: jnp.asarray(x) for name, x in drawn().items()}
    inputs["q"] = inputs["q"].astype(jnp.float32)
    out, lse = flash_attention(**inputs, return_lse=True)
    assert out.dtype == lse.dtype == jnp.float32
    wanted = flash_attention(**inputs, return_lse=True, implementation="reference")
    np.testing.assert_allclose(out, wanted[0], atol=2e-6)
    np.testing.assert_allclose(lse, wanted[1], atol=2e-6)
