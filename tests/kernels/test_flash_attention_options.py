"""Every option of `flash_attention`, alone and combined, against the reference: values and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BATCH, HEADS, KEY, KV_LEN, Q_LEN, agree, arrays, integers, normal

MASK = np.random.default_rng(5).random((BATCH, HEADS, Q_LEN, KV_LEN)) < 0.6
MASK[0, 1, 3] = False  # a query that sees nothing

SINGLE: dict[str, dict[str, Any]] = {
    "bias": {"bias": normal(BATCH, HEADS, Q_LEN, KV_LEN)},
    "bias per key": {"bias": normal(KV_LEN)},
    "bias per head": {"bias": normal(1, HEADS, 1, 1)},
    "bias per example and query": {"bias": normal(BATCH, 1, Q_LEN, 1)},
    "bias for all heads": {"bias": normal(1, 1, Q_LEN, KV_LEN), "causal": True},
    "bias that hides": {"bias": jnp.where(jnp.asarray(MASK), 0.5, -jnp.inf)},
    "mask": {"mask": jnp.asarray(MASK)},
    "mask of keys": {"mask": jnp.asarray(MASK[:, :1, :1])},
    "mask of queries": {"mask": jnp.asarray(MASK[:1, :1, :, :1]), "causal": True},
    "segments": {
        "segment_ids": integers(0, 4, BATCH, Q_LEN, ordered=True),
        "kv_segment_ids": integers(0, 4, BATCH, KV_LEN, ordered=True),
    },
    "segments in no order": {
        "segment_ids": integers(-3, 3, BATCH, Q_LEN),
        "kv_segment_ids": integers(-3, 3, BATCH, KV_LEN),
        "causal": True,
    },
    "window": {"window": 3},
    "window of one": {"window": 0, "causal": True},
    "window back": {"window": (5, None)},
    "window ahead": {"window": (None, 2)},
    "window uneven": {"window": (2, 6)},
    "window and causal": {"window": 6, "causal": True},
    "soft cap": {"logits_soft_cap": 0.7},
    "sinks": {"sinks": 2 * normal(HEADS)},
    "sinks and nothing seen": {"sinks": normal(HEADS), "mask": jnp.asarray(MASK)},
    "query lengths": {"q_lengths": jnp.array([0, 13])},
    "key lengths": {"kv_lengths": jnp.array([17, 0])},
    "both lengths": {
        "q_lengths": jnp.array([19, 7]),
        "kv_lengths": jnp.array([5, 23]),
        "causal": True,
    },
    "dropout": {"dropout_rate": 0.3, "dropout_key": KEY},
    "dropout and causal": {"dropout_rate": 0.9, "dropout_key": KEY, "causal": True},
}


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE.keys())
def test_an_option(options: dict[str, Any], return_lse: bool) -> None:
    # Half of them with, half without: each is compiled for seconds.
    if return_lse == (list(map(id, SINGLE.values())).index(id(options)) % 2 == 0):
        pytest.skip("the other half")
    agree(arrays(), {**options, **({"return_lse": True} if return_lse else {})})
