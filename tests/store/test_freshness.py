"""Entries of a kernel that changed, and of another compiler."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Kernel,
    PersistentCache,
    Tuner,
    policy_override,
)
from ejkernel.ops.config.freshness import EntryState, judge
from ejkernel.ops.config.selection import Sources
from ejkernel.ops.utils.provenance import versions

X = jnp.ones(4)


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 1


class First(Kernel[Config, jax.Array]):
    def __init__(self):
        super().__init__("same_name")

    def run(self, x, *, cfg):
        return x + cfg.size

    def reference(self, x):
        return x + 1

    def candidate_cfgs(self, inv):
        return [Config(1), Config(2)]


class MoreCandidates(First):
    def candidate_cfgs(self, inv):
        return [Config(1), Config(2), Config(3)]


class Second(First):
    def run(self, x, *, cfg):
        return x * cfg.size + 1


class Broken(First):
    """The source as it was when the entry was made, but nothing can be measured today."""

    def candidate_cfgs(self, inv):
        raise ValueError("nothing to try")


class Events(list):
    def __call__(self, event, **data):
        self.append((event, data.get("level")))


def selector(store, **options):
    options.setdefault("tuner", Tuner(progress=False, effort="quick"))
    options.setdefault("on_event", Events())
    return ConfigSelectorChain(ConfigCache(), persistent=store, **options)


@pytest.fixture
def store(tmp_path):
    opened = PersistentCache(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def tuned(store):
    """A store with the result of tuning `First`."""
    kernel = First()
    assert selector(store).decide(kernel.bind(X), kernel).tier == "autotune"
    return store


def rewrite(store, key, **about):
    """Change what an entry says about itself."""
    entry = store.entry(key)
    trials = store.trials(key)
    changed = {**entry["about"], **about, "trials": trials}
    store.put(key, Config(**entry["config"]), about=changed)


def of_another_compiler(store, name="jaxlib"):
    key = First().bind(X).key
    rewrite(store, key, versions={**versions(), name: "0.0.1"})
    return store


# --- fresh ---------------------------------------------------------------------------------------


def test_an_entry_says_what_made_it(tuned):
    kernel = First()
    about = tuned.entry(kernel.bind(X).key)["about"]
    assert about["signature"] == "float32[4]"
    assert about["call"]["args"] == [["float32[4]"]]
    assert about["versions"] == versions()
    assert len(about["source"]) == 32
    assert about["when"]
    assert about["where"]
    assert {t["verdict"] for t in tuned.trials(kernel.bind(X).key)} == {"measured", "wrong"}


def test_a_fresh_entry_is_served_and_remembered(tuned):
    kernel, chain = First(), selector(tuned)
    decision = chain.decide(kernel.bind(X), kernel)
    assert (decision.tier, decision.cfg) == ("persistent", Config(1))
    assert "suspect" not in decision.reason
    assert chain.decide(kernel.bind(X), kernel).tier == "memory"


def test_an_entry_put_by_hand_is_taken_as_it_is(store):
    kernel = First()
    store.put(kernel.bind(X).key, Config(2))
    decision = selector(store).decide(kernel.bind(X), kernel)
    assert (decision.tier, decision.cfg) == ("persistent", Config(2))


@pytest.mark.parametrize("odd", [{}, {"versions": 7}, {"versions": {}}, {"versions": ["jaxlib"]}])
def test_an_entry_that_does_not_know_its_versions_is_not_suspect(odd):
    kernel = First()
    assert judge(odd, kernel, kernel.bind(X).key).state is EntryState.FRESH


# --- stale ---------------------------------------------------------------------------------------


def test_an_entry_of_another_source_is_kept_and_not_served(tuned):
    kernel = Second()
    chain = selector(tuned, autotune=False)
    decision = chain.decide(kernel.bind(X), kernel)
    assert decision.tier == "heuristics"
    (reason,) = [p.reason for p in decision.misses if p.tier == "persistent"]
    when = tuned.entry(kernel.bind(X).key)["about"]["when"]
    assert reason == f"stale: the kernel's source changed since it was tuned on {when}"
    assert reason in decision.explain()
    assert tuned.get(kernel.bind(X).key) == Config(1)
    assert chain.on_event == [("heuristics", None)]


def test_an_entry_of_another_source_is_tuned_from_the_start(tuned):
    kernel, tuner = Second(), Tuner(progress=False, effort="quick")
    source = tuned.entry(kernel.bind(X).key)["about"]["source"]
    decision = selector(tuned, tuner=tuner).decide(kernel.bind(X), kernel)
    assert decision.tier == "autotune"
    assert tuner.compilations == 2
    assert tuned.entry(kernel.bind(X).key)["about"]["source"] != source
    assert selector(tuned).decide(kernel.bind(X), kernel).tier == "persistent"


def test_an_order_to_tune_ignores_an_entry_of_another_source(tuned):
    kernel, tuner = Second(), Tuner(progress=False, effort="quick")
    selector(tuned, tuner=tuner).answer(kernel.bind(X), kernel, Sources.MEASURED)
    assert tuner.compilations == 2


def test_a_label_does_not_show_an_entry_of_another_source(tuned):
    key = First().bind(X).key
    kernel = Second()
    chain = selector(tuned)
    assert chain.known_config(key.op_id, key.call_key) is None
    del kernel


def test_a_candidate_that_is_added_to_the_source_is_measured_alone(tuned):
    kernel, tuner = MoreCandidates(), Tuner(progress=False, effort="quick")
    found = selector(tuned, tuner=tuner).answer(kernel.bind(X), kernel, Sources.MEASURED)
    assert tuner.compilations == 1
    assert len(found.about.trials) == 3
    assert len(tuned.trials(kernel.bind(X).key)) == 3


# --- suspect -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jax", "jaxlib", "backend"])
def test_an_entry_of_another_compiler_is_served_and_marked(tuned, name):
    kernel = First()
    chain = selector(of_another_compiler(tuned, name), autotune=False)
    decision = chain.decide(kernel.bind(X), kernel)
    assert (decision.tier, decision.cfg) == ("persistent", Config(1))
    suspicion = f"suspect: measured with {name} 0.0.1, this is {versions()[name]}"
    assert suspicion in decision.reason
    assert decision.about["suspect"] == suspicion
    assert chain.on_event == [("cache_hit", "persistent")]


@pytest.mark.parametrize("name", ["python", "ejkernel"])
def test_other_versions_do_not_make_an_entry_suspect(tuned, name):
    kernel = First()
    decision = selector(of_another_compiler(tuned, name)).decide(kernel.bind(X), kernel)
    assert decision.tier == "persistent"
    assert "suspect" not in decision.about


def test_an_entry_of_another_compiler_is_measured_again_where_that_is_allowed(tuned):
    kernel, tuner = First(), Tuner(progress=False, effort="quick")
    chain = selector(of_another_compiler(tuned), tuner=tuner)
    decision = chain.decide(kernel.bind(X), kernel)
    assert decision.tier == "autotune"
    assert tuner.compilations == 2  # earlier times are those of the other compiler
    (reason,) = [p.reason for p in decision.misses if p.tier == "persistent"]
    assert reason.startswith("suspect: measured with jaxlib 0.0.1")
    assert [event for event, _ in chain.on_event] == ["autotune_start", "autotune_finish"]
    assert tuned.entry(kernel.bind(X).key)["about"]["versions"] == versions()
    assert selector(tuned).decide(kernel.bind(X), kernel).tier == "persistent"


def test_a_suspect_entry_is_not_remembered_so_that_it_is_replaced_when_allowed(tuned):
    kernel = First()
    chain = selector(of_another_compiler(tuned), autotune=False)
    assert chain.decide(kernel.bind(X), kernel).tier == "persistent"
    assert chain.decide(kernel.bind(X), kernel).tier == "persistent"
    with policy_override(autotune=True):
        assert chain.decide(kernel.bind(X), kernel).tier == "autotune"
    assert chain.decide(kernel.bind(X), kernel).tier == "memory"


def test_a_suspect_entry_serves_when_it_cannot_be_measured_again(tuned):
    kernel = Broken()
    chain = selector(of_another_compiler(tuned))
    for _ in range(2):
        chain.on_event.clear()
        decision = chain.decide(kernel.bind(X), kernel)
        assert (decision.tier, decision.cfg) == ("persistent", Config(1))
        assert [p.tier for p in decision.misses][-3:] == ["persistent", "bundle", "autotune"]
        assert "nothing to try" in decision.misses[-1].reason
        assert chain.on_event[-1] == ("cache_hit", "persistent")
        assert ("heuristics", None) not in chain.on_event


def test_a_suspect_entry_is_better_than_a_heuristic(tuned):
    kernel = First()
    policy = AutotunePolicy(cache_miss_fallback="heuristics")
    chain = selector(of_another_compiler(tuned), policy=policy)
    assert chain.decide(kernel.bind(X), kernel).tier == "persistent"
    policy = AutotunePolicy(cache_miss_fallback="heuristics", allow_heuristics=False)
    chain = selector(tuned, policy=policy)
    assert chain.decide(kernel.bind(X), kernel).tier == "autotune"


def test_an_order_to_tune_measures_a_suspect_entry_again(tuned):
    kernel, tuner = First(), Tuner(progress=False, effort="quick")
    policy = AutotunePolicy(allow_autotune=False, cache_miss_fallback="heuristics")
    chain = selector(of_another_compiler(tuned), tuner=tuner, policy=policy)
    chain.answer(kernel.bind(X), kernel, Sources.MEASURED)
    assert tuner.compilations == 2


def test_a_label_shows_a_suspect_entry(tuned):
    key = First().bind(X).key
    chain = selector(of_another_compiler(tuned))
    assert chain.known_config(key.op_id, key.call_key) == Config(1)


def test_for_a_device_that_is_not_here_only_the_source_counts(tuned):
    kernel = First()
    inv = dataclasses.replace(kernel.bind(X), metadata={"device": "tpu|v9"})
    entry = of_another_compiler(tuned).entry(kernel.bind(X).key)
    tuned.put(inv.key, Config(2), about=entry["about"])
    decision = selector(tuned).decide(inv, kernel)
    assert (decision.tier, decision.cfg) == ("persistent", Config(2))
