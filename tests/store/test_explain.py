"""Why a look-up found nothing, in words."""

from __future__ import annotations

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    BatchAxes,
    ConfigCache,
    ConfigSelectorChain,
    Invocation,
    Kernel,
    PersistentCache,
)
from ejkernel.ops.config.freshness import made_by


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 1


class Attend(Kernel[Config, jax.Array]):
    unkeyed = ("seed",)

    def run(self, *args, cfg, **kwargs):
        return args[0]


Q, K = np.zeros((8, 4), np.float32), np.zeros((16, 4), np.float32)
HALF = [x.astype(jnp.bfloat16) for x in (Q, K)]


@pytest.fixture
def kernel():
    return Attend()


@pytest.fixture
def store(tmp_path):
    opened = PersistentCache(tmp_path / "store")
    yield opened
    opened.close()


def keep(store, kernel, inv):
    store.put(inv.key, Config(), about=made_by(inv, kernel))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (lambda k: k.bind(*HALF, causal=True), "tuned for float32, you asked for bfloat16"),
        (
            lambda k: k.bind(Q, HALF[1], causal=True),
            "argument 1 tuned for float32, you asked for bfloat16",
        ),
        (
            lambda k: k.bind(Q[:2], K, causal=True),
            "argument 0 tuned for [8,4], you asked for [2,4]",
        ),
        (lambda k: k.bind(Q, K), "tuned with causal=True, you asked without causal"),
        (
            lambda k: k.bind(Q, K, causal=False),
            "tuned with causal=True, you asked with causal=False",
        ),
        (
            lambda k: k.bind(Q, K, causal=True, scale=2),
            "tuned without scale, you asked with scale=2",
        ),
        (
            lambda k: k.bind(Q, K, K, causal=True),
            "tuned for other arguments (float32[8,4], float32[16,4])",
        ),
        (
            lambda k: k.bind({"a": Q}, [K], causal=True),
            "tuned for arguments of another structure",
        ),
        (
            lambda k: dataclasses.replace(
                k.bind(Q, K, causal=True), batch_axes=BatchAxes("vmap", (0, 0), 3)
            ),
            "tuned for no batch, you asked for BatchAxes(transform='vmap'",
        ),
    ],
)
def test_the_field_that_differs_is_named(store, kernel, asked, expected):
    keep(store, kernel, kernel.bind(Q, K, causal=True, seed=1))
    text = store.explain_miss(asked(kernel))
    assert text.startswith("nearest: same operation and device, ")
    assert expected in text


def test_a_number_in_place_of_an_array_is_named(store, kernel):
    keep(store, kernel, kernel.bind(np.float32(1)))
    assert "tuned for an array, you asked for a Python number" in store.explain_miss(
        kernel.bind(1.0)
    )


def test_a_keyword_that_is_not_part_of_the_key_is_no_difference(store, kernel):
    keep(store, kernel, kernel.bind(Q, K, seed=1))
    assert store.explain_miss(kernel.bind(Q, K, seed=2)) == ""  # it is there
    assert "seed" not in store.explain_miss(kernel.bind(Q[:2], K, seed=2))


def test_another_device_and_another_version_are_named(store, kernel):
    inv = kernel.bind(Q, K)
    key = inv.key
    store.put("gpu|h100", key.op_id, key.call_key, Config(), about=made_by(inv, kernel))
    assert store.explain_miss(inv) == (
        f"nearest: same operation and call, tuned on gpu|h100, this is {key.device}"
    )
    store.clear()
    store.put(key.device, "attend@v7", key.call_key, Config(), about=made_by(inv, kernel))
    assert store.explain_miss(inv) == (
        "nearest: same operation and device, tuned for its version 7, this is 1"
    )


def test_the_nearest_comes_first_and_the_rest_is_counted(store, kernel):
    for rows in range(1, 6):
        keep(store, kernel, kernel.bind(Q[:rows].astype(jnp.bfloat16), K))
    keep(store, kernel, kernel.bind(Q, K))
    text = store.explain_miss(kernel.bind(*HALF))
    assert text.startswith(
        "nearest: same operation and device, tuned for float32, you asked for bfloat16; same "
    )
    assert text.endswith("(and 4 more)")


def test_nothing_near_is_said_too(store, kernel):
    assert store.explain_miss(kernel.bind(Q, K)) == (
        "it holds nothing for attend, whatever the arguments"
    )
    store.put("cpu|x", "attending@v1", "0" * 16, Config())
    assert "it holds nothing for attend," in store.explain_miss(kernel.bind(Q, K))


@pytest.mark.parametrize(
    "call", [None, 7, [], {"args": 3}, {"args": [3], "kwargs": {}}, {"args": [[1]], "kwargs": {}}]
)
def test_an_entry_that_does_not_describe_its_call_is_no_trouble(store, kernel, call):
    inv = kernel.bind(Q, K)
    store.put(inv.key.device, inv.key.op_id, "0" * 16, Config(), about={"call": call})
    assert "same operation and device, tuned for" in store.explain_miss(inv)


def test_a_decision_explains_a_miss_only_when_asked(store, kernel, monkeypatch):
    searches = []
    original = PersistentCache.related

    def counted(self, *args, **kwargs):
        searches.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PersistentCache, "related", counted)
    keep(store, kernel, kernel.bind(Q, K))
    chain = ConfigSelectorChain(ConfigCache(), persistent=store, autotune=False)
    decision = chain.decide(kernel.bind(*HALF), kernel)
    assert chain.choose(kernel.bind(*HALF), kernel) == Config()
    assert searches == []
    text = "same operation and device, tuned for float32, you asked for bfloat16"
    assert text in decision.explain()
    assert searches
    assert text not in repr(decision)
    assert decision == chain.decide(kernel.bind(*HALF), kernel)


def test_the_error_without_any_config_explains_the_miss(store, kernel):
    keep(store, kernel, kernel.bind(Q, K))
    policy = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
    chain = ConfigSelectorChain(ConfigCache(), persistent=store, policy=policy)
    with pytest.raises(RuntimeError, match="tuned for float32, you asked for bfloat16"):
        chain.decide(kernel.bind(*HALF), kernel)


def test_a_decision_that_is_sent_elsewhere_takes_its_explanation_along(store, kernel):
    keep(store, kernel, kernel.bind(Q, K))
    chain = ConfigSelectorChain(ConfigCache(), persistent=store, autotune=False)
    decision = chain.decide(kernel.bind(*HALF), kernel)
    sent = pickle.loads(pickle.dumps(decision))
    store.clear()
    assert "tuned for float32, you asked for bfloat16" in sent.explain()


def test_an_explanation_keeps_no_tracer_alive(store, kernel):
    keep(store, kernel, kernel.bind(Q, K))
    chain = ConfigSelectorChain(ConfigCache(), persistent=store, autotune=False)
    decisions = []

    @jax.jit
    def traced(x):
        decisions.append(chain.decide(Invocation(kernel=kernel, args=(x, x)), kernel))
        return x

    with jax.checking_leaks():
        traced(Q)
    assert "you asked for [8,4]" in decisions[0].explain()
