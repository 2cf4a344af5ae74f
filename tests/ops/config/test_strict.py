"""Strict mode and visibility: a miss is an error that says what to run; counts and log lines."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    NearShapes,
    PersistentCache,
    StrictMiss,
    autotune_lowered,
    overlay_cache,
    policy_override,
    reset_stats,
    stats,
)


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 4


class Doubled(Kernel[Config, jax.Array]):
    near_shapes = NearShapes()

    def run(self, x, *, cfg):
        return jax.lax.map(lambda c: 2 * c, x.reshape(-1, cfg.rows)).reshape(x.shape)

    def candidate_cfgs(self, inv):
        return [Config(2), Config(4)]


doubled = Doubled()
x = jnp.arange(8.0)


@pytest.fixture(autouse=True)
def _from_zero():
    reset_stats()
    yield
    reset_stats()


def chain(**arguments):
    return ConfigSelectorChain(ConfigCache(), **arguments)


def strict_executor(**arguments):
    return Executor(chain(policy=AutotunePolicy(strict=True), **arguments))


def test_a_miss_is_an_error_that_names_the_call_and_the_command(tmp_path):
    executor = strict_executor(persistent=tmp_path)
    with pytest.raises(StrictMiss) as caught:
        executor(doubled, x)
    text = str(caught.value)
    key = doubled.bind(x).key
    assert "doubled@v1(float32[8])" in text
    assert key.call_key in text
    assert key.device in text
    assert f"ejkernel tune MODULE:FUNCTION --store {tmp_path}" in text
    assert "EJKERNEL_STRICT=0" in text
    assert caught.value.key == key
    assert isinstance(caught.value, RuntimeError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.key, again.signature) == (text, key, "float32[8]")


def test_nothing_is_tuned_lent_or_guessed(tmp_path):
    ConfigSelectorChain(ConfigCache(), persistent=tmp_path).choose(doubled.bind(x[:4]), doubled)
    loose = chain(autotune=False, persistent=tmp_path)
    assert loose.decide(doubled.bind(x), doubled).tier == "near"
    asked = []
    executor = strict_executor(persistent=tmp_path, on_event=lambda event, **_: asked.append(event))
    with pytest.raises(StrictMiss, match=r"nearest: .*tuned for \[4\], you asked for \[8\]"):
        executor(doubled, x)
    assert asked == ["error"]


def test_what_is_stored_or_given_serves(tmp_path):
    inv = doubled.bind(x)
    PersistentCache(tmp_path).put(inv.key, Config(2))
    selector = strict_executor(persistent=tmp_path).selector
    assert selector.decide(inv, doubled).tier == "persistent"
    assert selector.decide(inv, doubled).tier == "memory"
    executor = strict_executor()
    assert (executor(doubled, x, cfg=Config(2)) == 2 * x).all()
    with overlay_cache({inv.key: Config(2)}):
        assert executor.decide(doubled, x).tier == "overlay"


def test_a_suspect_entry_serves_and_is_not_measured_again(tmp_path):
    inv = doubled.bind(x)
    about = {"versions": {"jax": "0.0.1"}}
    PersistentCache(tmp_path).put(inv.key, Config(2), about=about)
    decision = strict_executor(persistent=tmp_path).selector.decide(inv, doubled)
    assert decision.tier == "persistent"
    assert "suspect" in decision.reason
    assert stats().tunings == {}


def test_the_environment_says_so_and_the_program_may_differ(monkeypatch):
    monkeypatch.setenv("EJKERNEL_STRICT", "1")
    executor = Executor(chain())
    with pytest.raises(StrictMiss):
        executor(doubled, x)
    with policy_override(strict=False, autotune=False):
        assert executor.decide(doubled, x).tier == "heuristics"
    loose = Executor(chain(policy=AutotunePolicy(allow_autotune=False, strict=False)))
    assert loose.decide(doubled, x).tier == "heuristics"
    monkeypatch.setenv("EJKERNEL_STRICT", "perhaps")
    with pytest.raises(ValueError, match="EJKERNEL_STRICT='perhaps' is not a switch"):
        executor.decide(doubled, x)


def test_a_block_makes_a_jitted_function_strict_and_leaving_it_gives_it_back():
    executor = Executor(chain(autotune=False))

    @jax.jit
    def model(x):
        return executor(doubled, x) + 1

    model(x)
    with policy_override(strict=True), pytest.raises(StrictMiss):
        model(x)
    assert (model(x) == 2 * x + 1).all()


class Outer(Kernel[Config, jax.Array]):
    """Calls another kernel while it runs."""

    def run(self, x, *, cfg):
        return doubled(x) + cfg.rows - cfg.rows

    def candidate_cfgs(self, inv):
        return [Config(2), Config(4)]


def test_tuning_works_in_strict_mode_also_for_kernels_that_call_kernels(monkeypatch, tmp_path):
    outer = Outer()
    lowered = jax.jit(lambda x: outer(x)).lower(x)
    monkeypatch.setenv("EJKERNEL_STRICT", "1")
    selector = chain(persistent=tmp_path)
    result = autotune_lowered(selector, lowered)
    assert {entry.op_id for entry in result} == {"outer@v1", "doubled@v1"}
    assert not result.skipped
    assert strict_executor(persistent=tmp_path).decide(outer, x).tier == "persistent"


@pytest.mark.parametrize("value", [1, "yes"])
def test_a_wrong_value_is_refused(value):
    with pytest.raises(TypeError, match=r"strict=.* must be True, False or None"):
        AutotunePolicy(strict=value)


# --- counts --------------------------------------------------------------------------------------


def test_selections_are_counted_by_operation_and_tier(tmp_path):
    selector = chain(persistent=tmp_path)
    selector.choose(doubled.bind(x), doubled)
    selector.choose(doubled.bind(x), doubled)
    chain(autotune=False).choose(doubled.bind(x), doubled)
    chain().choose(dataclasses.replace(doubled.bind(x), override_cfg=Config(2)), doubled)
    with pytest.raises(StrictMiss):
        strict_executor().decide(doubled, x)
    counted = stats()
    assert counted.operations == {
        "doubled@v1": {"autotune": 1, "memory": 1, "heuristics": 1, "override": 1, "none": 1}
    }
    assert (counted.hits, counted.misses) == (1, 3)
    assert counted.tunings == {"doubled@v1": 1}
    assert counted.tuning_seconds > 0
    assert str(counted).startswith("1 hits, 3 misses, 1 tunings\n  doubled@v1: autotune 1, ")
    assert counted.to_plain()["tiers"]["memory"] == 1
    reset_stats()
    assert stats().operations == {}
    assert counted.hits == 1  # a value, not a view


def test_a_warm_call_selects_nothing():
    executor = Executor(chain(autotune=False))
    for _ in range(3):
        executor(doubled, x)
    assert stats().tiers == {"heuristics": 1}


def test_threads_lose_no_count():
    selector = chain(autotune=False)
    inv = doubled.bind(x)
    threads = [
        threading.Thread(target=lambda: [selector.decide(inv, doubled) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats().tiers == {"heuristics": 200}


def test_each_decision_is_one_line_in_the_log(caplog):
    selector = chain(autotune=False)
    with caplog.at_level(logging.DEBUG, logger="ejkernel.selection"):
        selector.choose(doubled.bind(x), doubled)
        selector.cache.put(doubled.bind(x).key, Config(2))
        selector.choose(doubled.bind(x), doubled)
    first, second = caplog.records
    assert first.levelno == logging.INFO
    assert "doubled@v1(float32[8])" in first.getMessage()
    assert "Config(rows=4) by heuristics" in first.getMessage()
    assert second.levelno == logging.DEBUG
    assert "Config(rows=2) by memory" in second.getMessage()
