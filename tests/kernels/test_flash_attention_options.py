"""Every option of `flash_attention`: values and gradients of the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BATCH,
    BLOCKS,
    HEADS,
    KEY,
    KV_LEN,
    Q_LEN,
    agree,
    arrays,
    integers,
    normal,
)

from ejkernel.kernels.flash_attention.options import Options
from ejkernel.kernels.flash_attention.tiles import Tiles
from ejkernel.kernels.flash_attention.xla.forward import forward
from ejkernel.kernels.flash_attention.xla.needed import Needed
from ejkernel.kernels.flash_attention.xla.scores import Scores
from ejkernel.modules import flash_attention

MASK = np.random.default_rng(5).random((BATCH, HEADS, Q_LEN, KV_LEN)) < 0.6
MASK[0, 1, 3] = False  # a query that sees nothing

ORDERED = {
    "segment_ids": integers(0, 4, BATCH, Q_LEN, ordered=True),
    "kv_segment_ids": integers(0, 4, BATCH, KV_LEN, ordered=True),
}
# Most of a test is compiling, so options that do not touch each other are tested together.
CASES: dict[str, dict[str, Any]] = {
    "bias per key": {"bias": normal(KV_LEN), "window": (5, None)},
    "bias per head": {"bias": normal(1, HEADS, 1, 1), "window": (None, 2)},
    "bias per example and query": {"bias": normal(BATCH, 1, Q_LEN, 1), "window": (2, 6)},
    "bias that hides": {"bias": jnp.where(jnp.asarray(MASK), 0.5, -jnp.inf), "causal": True},
    "mask": {"mask": jnp.asarray(MASK), "return_lse": True},
    "mask of keys": {"mask": jnp.asarray(MASK[:, :1, :1]), "window": 3},
    "mask and sinks": {"mask": jnp.asarray(MASK[:1, :1]), "sinks": 2 * normal(HEADS)},
    "segments": ORDERED,
    "segments in no order": {
        "segment_ids": integers(-3, 3, BATCH, Q_LEN),
        "kv_segment_ids": integers(-3, 3, BATCH, KV_LEN),
        "causal": True,
    },
    "window and causal": {"window": 6, "causal": True},
    "soft cap": {"logits_soft_cap": 0.7, "causal": True},
    "sinks": {"sinks": 2 * normal(HEADS), "return_lse": True, "causal": True},
    "query lengths": {"q_lengths": jnp.array([0, 13]), "sinks": normal(HEADS)},
    "both lengths": {"q_lengths": jnp.array([19, 7]), "kv_lengths": jnp.array([0, 17])},
    "dropout": {"dropout_rate": 0.3, "dropout_key": KEY, "causal": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_an_option(options: dict[str, Any]) -> None:
    agree(arrays(), options)


def test_queries_that_see_nothing_have_no_gradient() -> None:
    lengths = jnp.array([5, 0])
    options = {"q_lengths": lengths, "bias": normal(BATCH, HEADS, Q_LEN, KV_LEN)}
    gradients = agree(arrays(), {**options, "sinks": normal(HEADS), "return_lse": True})
    assert not np.any(gradients["q"][0, 5:])
    assert not np.any(gradients["k"][1])
    assert not np.any(gradients["bias"][1])
    assert np.any(gradients["sinks"])


def test_dropout_does_not_depend_on_blocks() -> None:
    inputs = arrays()
    options = {"dropout_rate": 0.5, "dropout_key": KEY}
    one = flash_attention(**inputs, **options, cfg=BLOCKS)
    other = flash_attention(**inputs, **options)
    np.testing.assert_allclose(one, other, atol=1e-5)
    another_key = {**options, "dropout_key": jax.random.key(8)}
    assert not np.allclose(one, flash_attention(**inputs, **another_key), atol=1e-2)


def tiles_needed(**options: Any) -> tuple[int, int]:
    """How many tiles the loops of the forward and of the backward pass go through."""
    tiles = Tiles(q_len=64, kv_len=64, block_q=8, block_k=8)
    needed = Needed.of(tiles, Options(**{"causal": False, "softmax_scale": 1.0, **options}))
    ahead = [needed.keys_seen_by(i) for i in range(8)]
    back = [needed.queries_seeing(j) for j in range(8)]
    return tuple(sum(max(0, int(end) - int(begin)) for begin, _, end in x) for x in (ahead, back))


def test_what_is_not_seen_is_not_computed() -> None:
    in_four = jnp.asarray(np.arange(64)[None] // 16)
    first_keys = jnp.asarray(np.arange(64) < 8).reshape(1, 1, 1, 64)
    expected: list[tuple[dict[str, Any], int]] = [
        ({}, 64),
        ({"causal": True}, 36),
        ({"causal": True, "window": (8, 0)}, 8 + 7),
        ({"window": (1, 1)}, 8 + 7 + 7),
        ({"segment_ids": in_four}, 4 * 4),
        ({"segment_ids": in_four, "causal": True}, 4 * 3),
        ({"kv_lengths": jnp.array([10])}, 8 * 2),
        ({"q_lengths": jnp.array([10]), "kv_lengths": jnp.array([20])}, 2 * 3),
        ({"mask": first_keys}, 8),
    ]
    for options, count in expected:
        assert tiles_needed(**options) == (count, count), options


def test_only_the_needed_tiles_are_computed() -> None:
    seen = []
    original = Scores.apply

    def counting(self: Scores, products: jax.Array, i: Any, j: Any, **keywords: Any) -> Any:
        jax.debug.callback(lambda *at: seen.append(at), i, j)
        return original(self, products, i, j, **keywords)

    inputs = arrays(64, 64, batch=1, heads=1, kv_heads=1)
    segments = jnp.arange(64)[None] // 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scores, "apply", counting)
        options = Options(causal=True, softmax_scale=1.0, segment_ids=segments)
        forward(**inputs, options=options, block_q=8, block_k=8)
        jax.effects_barrier()
    assert len(seen) == 4 * 3
