"""Section 6 of the contract: which config a call gets, what is written, what is said about it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import logging
import os
import sqlite3
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Tuner,
    default_executor,
    forward_autotune_only,
    overlay_cache,
    policy_override,
    set_default_executor,
)

TIERS = ["override", "overlay", "memory", "persistent", "autotune", "heuristics"]


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = "heuristics"


class Named(Kernel[Config, jax.Array]):
    """Computes the same with every config and remembers which ones ran."""

    def __init__(self, name="named"):
        super().__init__(name=name)
        self.ran = []

    def run(self, x, *, cfg):
        self.ran.append(cfg.name)
        return x + 1

    def heuristic_cfg(self, inv):
        return Config("heuristics")

    def candidate_cfgs(self, inv):
        return [Config("candidate"), Config("another")]


class FakeTuner(Tuner):
    """Chooses without measuring, and counts."""

    def __init__(self, answer="autotune", seconds=0.0):
        super().__init__()
        self.answer = answer
        self.seconds = seconds
        self.seen = []

    def autotune(self, make_fn, args, kwargs, candidates):
        self.seen.append([cfg.name for cfg in candidates])
        time.sleep(self.seconds)
        return Config(self.answer)


class FailingTuner(Tuner):
    """What the contract says about "all failed": a RuntimeError."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def autotune(self, make_fn, args, kwargs, candidates):
        self.calls += 1
        raise RuntimeError("all failed: this is a test")


class BrokenHeuristic(Named):
    def heuristic_cfg(self, inv):
        raise ValueError("my heuristic is broken")


class OnlyTuningFails(Named):
    """Measures with inputs that no candidate can take; real calls work."""

    def make_inputs(self, inv, key):
        return tuple(inv.args), {"no_such_keyword": 1}


class Differentiable(Named):
    """With its own gradient, which counts how often it is traced."""

    def __init__(self):
        super().__init__("differentiable")
        self.backward_traces = 0

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        self.backward_traces += 1
        return (cotangents[0],)


class Listener:
    def __init__(self):
        self.events = []

    def __call__(self, event, **data):
        self.events.append((event, data))

    @property
    def names(self):
        return [event for event, _ in self.events]

    def of(self, event):
        return [data for name, data in self.events if name == event]


@pytest.fixture
def kernel():
    return Named()


@pytest.fixture
def x():
    return jnp.ones(4)


def make_selector(**kwargs):
    kwargs.setdefault("tuner", FakeTuner())
    return ConfigSelectorChain(ConfigCache(), **kwargs)


def ask(selector, kernel, x, cfg=None):
    inv = kernel.bind(x) if cfg is None else kernel.bind(x, cfg=cfg)
    return selector.choose(inv, kernel).name


# --- the order of the tiers ----------------------------------------------------------------------


@pytest.mark.parametrize("first", range(6), ids=TIERS)
def test_each_tier_wins_over_all_that_follow(first, kernel, x, tmp_path):
    selector = make_selector(persistent=PersistentCache(tmp_path / "store"))
    key = kernel.bind(x).key
    with contextlib.ExitStack() as stack:
        if first <= 1:
            stack.enter_context(overlay_cache({"named": Config("overlay")}))
        if first <= 2:
            selector.cache.put(key, Config("memory"))
        if first <= 3:
            selector.persistent.put(key, Config("persistent"))
        if first > 4:
            stack.enter_context(policy_override(allow_autotune=False))
        override = Config("override") if first == 0 else None
        inv = kernel.bind(x) if override is None else kernel.bind(x, cfg=override)
        decision = selector.decide(inv, kernel)
        assert selector.choose(inv, kernel) == decision.cfg == Config(TIERS[first])
    assert decision.tier == TIERS[first]
    # Beside the documented tiers there are bundles and near shapes, which have nothing here.
    missed = [miss.tier for miss in decision.misses]
    assert [tier for tier in missed if tier in TIERS] == TIERS[:first]


def test_nothing_anywhere_is_a_runtime_error_that_names_everything(kernel, x, tmp_path):
    listener = Listener()
    selector = make_selector(
        policy=AutotunePolicy(allow_autotune=False, allow_heuristics=False),
        persistent=tmp_path / "store",
        on_event=listener,
    )
    with pytest.raises(RuntimeError) as caught:
        ask(selector, kernel, x)
    message, key = str(caught.value), kernel.bind(x).key
    assert "named@v1" in message
    assert key.call_key in message
    for tier in TIERS:
        (line,) = [line for line in message.splitlines() if line.strip().startswith(f"{tier}:")]
        assert len(line.partition(":")[2].strip()) > 5
    assert "allow_autotune" in message
    assert "allow_heuristics" in message
    assert str(tmp_path / "store") in message
    assert listener.names == ["error"]


def test_the_runtime_error_says_that_no_store_is_set_and_which_tuning_failed(x):
    selector = ConfigSelectorChain(
        ConfigCache(), AutotunePolicy(allow_heuristics=False), Tuner(), forbid_reautotune=True
    )
    kernel = OnlyTuningFails()
    with pytest.raises(RuntimeError, match="no_such_keyword") as caught:
        ask(selector, kernel, x)
    assert "persistent: no persistent cache" in str(caught.value)


def test_the_runtime_error_reaches_the_caller_of_a_kernel(kernel, x):
    policy = AutotunePolicy(allow_autotune=False, allow_heuristics=False)
    executor = Executor(make_selector(policy=policy))
    with pytest.raises(RuntimeError, match="named@v1"):
        executor(kernel, x)
    with pytest.raises(RuntimeError, match="named@v1"):
        jax.jit(lambda x: executor(kernel, x))(x)
    executor.selector.cache.put(kernel.bind(x).key, Config("memory"))
    assert executor(kernel, x)[0] == 2


@pytest.mark.parametrize(
    ("autotune", "heuristics", "fallback", "wanted"),
    [
        (True, True, "autotune", "autotune"),
        (True, True, "heuristics", "heuristics"),
        (True, False, "autotune", "autotune"),
        (True, False, "heuristics", "autotune"),
        (False, True, "autotune", "heuristics"),
        (False, True, "heuristics", "heuristics"),
        (False, False, "autotune", None),
        (False, False, "heuristics", None),
    ],
)
def test_the_policy_decides_what_happens_on_a_miss(
    kernel, x, autotune, heuristics, fallback, wanted
):
    policy = AutotunePolicy(autotune, heuristics, fallback)
    selector = make_selector(policy=policy)
    if wanted is None:
        with pytest.raises(RuntimeError, match="named@v1"):
            ask(selector, kernel, x)
    else:
        assert ask(selector, kernel, x) == wanted
    assert bool(selector.tuner.seen) == (wanted == "autotune")


def test_the_default_policy_tunes_on_a_miss():
    assert AutotunePolicy() == AutotunePolicy(
        allow_autotune=True,
        allow_heuristics=True,
        cache_miss_fallback="autotune",
        validate_backward=False,
    )


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("cache_miss_fallback", "guess", ValueError),
        ("allow_autotune", "yes", TypeError),
        ("allow_heuristics", None, TypeError),
        ("validate_backward", 1, TypeError),
        ("colour", "red", TypeError),
    ],
)
def test_a_policy_with_a_wrong_field_is_refused(field, value, error):
    with pytest.raises(error, match=field):
        AutotunePolicy(**{field: value})


def test_the_chain_takes_its_arguments_by_position_in_the_documented_order(kernel, x, tmp_path):
    listener, tuner = Listener(), FakeTuner()
    store = PersistentCache(tmp_path / "store")
    cache = ConfigCache()
    selector = ConfigSelectorChain(cache, AutotunePolicy(), tuner, store, False, listener, False)
    assert ask(selector, kernel, x) == "autotune"
    assert len(tuner.seen) == 1
    assert kernel.bind(x).key in cache
    assert len(store) == 0  # persist_autotune=False
    assert listener.names == ["autotune_start", "autotune_finish"]
    cache.clear()
    ask(selector, kernel, x)
    assert len(tuner.seen) == 2  # forbid_reautotune=False


def test_autotune_is_a_shorthand_for_the_policy(kernel, x):
    assert ask(make_selector(autotune=True), kernel, x) == "autotune"
    selector = make_selector(autotune=False)
    assert ask(selector, kernel, x) == "heuristics"
    assert selector.tuner.seen == []


def test_the_shorthand_and_a_policy_together_are_refused():
    with pytest.raises(TypeError, match="autotune"):
        make_selector(policy=AutotunePolicy(), autotune=True)


def test_a_policy_of_another_type_is_refused():
    with pytest.raises(TypeError, match="AutotunePolicy"):
        make_selector(policy="autotune")


def test_a_tuner_sees_every_candidate_with_the_heuristic_among_them(kernel, x):
    selector = make_selector()
    ask(selector, kernel, x)
    (names,) = selector.tuner.seen
    assert sorted(names) == ["another", "candidate", "heuristics"]


def test_an_override_of_another_class_is_a_type_error(kernel, x):
    with pytest.raises(TypeError, match="Config"):
        Executor(make_selector())(kernel, x, cfg={"name": "a"})


def test_an_invocation_without_a_kernel_is_served_too(kernel, x):
    from ejkernel.ops import Invocation

    selector = make_selector()
    selector.cache.put(kernel.bind(x).key, Config("memory"))
    inv = Invocation(op_id="named", args=(x,))
    assert selector.choose(inv, kernel) == Config("memory")


# --- policy_override -----------------------------------------------------------------------------


def test_policy_override_of_one_selector_leaves_others_alone(kernel, x):
    first, second = make_selector(), make_selector()
    with policy_override(first, allow_autotune=False):
        assert ask(first, kernel, x) == "heuristics"
        assert ask(second, kernel, x) == "autotune"
    assert ask(first, kernel, x) == "autotune"


def test_policy_override_without_a_selector_holds_for_every_selector(kernel, x):
    first, second = make_selector(), make_selector()
    with policy_override(autotune=False):
        assert ask(first, kernel, x) == "heuristics"
        assert ask(second, kernel, x) == "heuristics"
    assert ask(first, kernel, x) == "autotune"
    assert ask(second, kernel, x) == "autotune"


def test_policy_override_can_allow_what_the_selector_forbids(kernel, x):
    selector = make_selector(autotune=False)
    with policy_override(autotune=True):
        assert ask(selector, kernel, x) == "autotune"


def test_policy_override_takes_every_field_of_the_policy(kernel, x):
    selector = make_selector()
    with policy_override(selector, cache_miss_fallback="heuristics"):
        assert ask(selector, kernel, x) == "heuristics"
    with (
        policy_override(selector, allow_autotune=False, allow_heuristics=False),
        pytest.raises(RuntimeError, match="named@v1"),
    ):
        ask(selector, kernel, x)


@pytest.mark.parametrize("fields", [{"bogus": 1}, {"allow_autotuning": True}, {"policy": None}])
def test_policy_override_with_an_unknown_field_is_a_type_error(fields):
    with pytest.raises(TypeError, match=next(iter(fields))), policy_override(**fields):
        pass
    with (
        pytest.raises(TypeError, match=next(iter(fields))),
        policy_override(make_selector(), **fields),
    ):
        pass


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"cache_miss_fallback": "guess"}, ValueError),
        ({"allow_autotune": "no"}, TypeError),
        ({"autotune": "no"}, TypeError),
    ],
)
def test_policy_override_with_a_wrong_value_is_refused(fields, error):
    with pytest.raises(error), policy_override(**fields):
        pass


def test_policy_override_is_undone_after_an_exception(kernel, x):
    selector = make_selector()

    def broken():
        with policy_override(selector, allow_autotune=False):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert ask(selector, kernel, x) == "autotune"


def test_nested_policy_overrides_combine_and_the_inner_one_wins(kernel, x):
    selector = make_selector()
    with policy_override(allow_autotune=False):
        with policy_override(selector, allow_heuristics=False):
            with pytest.raises(RuntimeError, match="allow_autotune"):
                ask(selector, kernel, x)
            with policy_override(allow_heuristics=True):
                assert ask(selector, kernel, x) == "heuristics"
        assert ask(selector, kernel, x) == "heuristics"
        with policy_override(allow_autotune=True):
            assert ask(selector, kernel, x) == "autotune"


def test_policy_override_never_changes_the_selector_itself():
    selector = make_selector()
    before = selector.policy
    with policy_override(selector, allow_autotune=False):
        assert selector.policy is before
    assert before == AutotunePolicy()


def test_policy_override_holds_in_its_own_thread_only(kernel):
    selector = make_selector()
    barrier = threading.Barrier(4)

    def work(number):
        own = policy_override(autotune=False) if number % 2 else contextlib.nullcontext()
        with own:
            barrier.wait(60)
            answer = ask(selector, kernel, jnp.ones(number + 1))
            barrier.wait(60)
        return answer

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(work, range(4)))
    assert answers == ["autotune", "heuristics", "autotune", "heuristics"]


def test_a_function_jitted_before_tunes_inside_policy_override_and_keeps_the_result(x):
    class Telling(Named):
        def run(self, x, *, cfg):
            return x * len(cfg.name)

    kernel = Telling()
    executor = Executor(make_selector(autotune=False))
    function = jax.jit(lambda x: executor(kernel, x))
    assert function(x)[0] == len("heuristics")
    with policy_override(autotune=True):
        assert function(x)[0] == len("autotune")
    # Memory comes before heuristics: the tuned config is known now.
    assert executor.choose_config(kernel, x) == Config("autotune")
    assert executor(kernel, x)[0] == len("autotune")
    assert function(x)[0] == len("autotune")


def test_forward_autotune_only_measures_no_backward_pass(x):
    kernel = Differentiable()
    policy = AutotunePolicy(validate_backward=True)
    selector = ConfigSelectorChain(ConfigCache(), policy, Tuner(warmup=0, iters=1))
    with forward_autotune_only():
        selector.choose(kernel.bind(x), kernel)
    assert kernel.backward_traces == 0
    other = jnp.ones(5)
    selector.choose(kernel.bind(other), kernel)
    assert kernel.backward_traces > 0


def test_forward_autotune_only_is_undone_after_an_exception_and_wins_over_overrides(x):
    kernel = Differentiable()
    selector = ConfigSelectorChain(ConfigCache(), None, Tuner(warmup=0, iters=1))

    def broken():
        with forward_autotune_only(), policy_override(validate_backward=True):
            selector.choose(kernel.bind(x), kernel)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert kernel.backward_traces == 0
    with policy_override(validate_backward=True):
        selector.choose(kernel.bind(jnp.ones(5)), kernel)
    assert kernel.backward_traces > 0


# --- the default executor ------------------------------------------------------------------------


def test_the_default_executor_uses_heuristics_and_writes_nothing(kernel, x):
    kernel(x)
    assert kernel.ran == ["heuristics"]
    assert not os.path.exists(os.environ["EJKERNEL_CACHE_DIR"])


def test_the_default_executor_reads_the_store(kernel, x):
    PersistentCache().put(kernel.bind(x).key, Config("stored"))
    kernel(x)
    assert kernel.ran == ["stored"]


@pytest.mark.parametrize("how", ["environment", "policy_override", "set_default_executor"])
def test_the_default_executor_tunes_when_asked(kernel, x, how, monkeypatch):
    block = contextlib.nullcontext()
    if how == "environment":
        monkeypatch.setenv("EJKERNEL_AUTOTUNE", "1")
    elif how == "policy_override":
        block = policy_override(autotune=True)
    else:
        set_default_executor(Executor(make_selector(persistent=PersistentCache())))
    with block:
        kernel(x)
    if how != "set_default_executor":
        assert {"candidate", "another", "heuristics"} <= set(kernel.ran)
    key = kernel.bind(x).key
    assert key in default_executor().selector.cache
    assert PersistentCache().get(key) is not None


# --- events --------------------------------------------------------------------------------------


def check_common_fields(data, inv):
    assert data["device"] == inv.device_fingerprint
    assert data["op_id"] == "named@v1"
    assert data["call_key"] == inv.call_key


def test_an_override_is_an_event(kernel, x):
    listener = Listener()
    selector = make_selector(on_event=listener)
    ask(selector, kernel, x, Config("mine"))
    assert listener.names == ["override"]
    check_common_fields(listener.events[0][1], kernel.bind(x))
    assert listener.events[0][1]["cfg"] == Config("mine")


def test_an_overlay_hit_is_an_event(kernel, x):
    listener = Listener()
    with overlay_cache({"named": Config("mine")}):
        ask(make_selector(on_event=listener), kernel, x)
    assert listener.names == ["overlay_hit"]
    check_common_fields(listener.events[0][1], kernel.bind(x))
    assert listener.events[0][1]["cfg"] == Config("mine")


def test_cache_hits_are_events_with_their_level(kernel, x, tmp_path):
    listener = Listener()
    selector = make_selector(on_event=listener, persistent=tmp_path / "store")
    selector.persistent.put(kernel.bind(x).key, Config("stored"))
    ask(selector, kernel, x)
    ask(selector, kernel, x)
    assert listener.names == ["cache_hit", "cache_hit"]
    assert [data["level"] for _, data in listener.events] == ["persistent", "memory"]
    for _, data in listener.events:
        check_common_fields(data, kernel.bind(x))
        assert data["cfg"] == Config("stored")


def test_tuning_is_two_events_and_the_second_holds_the_config(kernel, x):
    listener = Listener()
    ask(make_selector(on_event=listener), kernel, x)
    assert listener.names == ["autotune_start", "autotune_finish"]
    for _, data in listener.events:
        check_common_fields(data, kernel.bind(x))
    assert listener.events[1][1]["cfg"] == Config("autotune")


def test_a_heuristic_choice_is_an_event(kernel, x):
    listener = Listener()
    ask(make_selector(on_event=listener, autotune=False), kernel, x)
    assert listener.names == ["heuristics"]
    check_common_fields(listener.events[0][1], kernel.bind(x))
    assert listener.events[0][1]["cfg"] == Config("heuristics")


def test_failed_tuning_is_an_error_event_before_the_heuristics(x):
    listener, kernel = Listener(), OnlyTuningFails()
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(), on_event=listener)
    ask(selector, kernel, x)
    assert listener.names == ["autotune_start", "error", "heuristics"]
    check_common_fields(listener.of("error")[0], kernel.bind(x))
    assert "no_such_keyword" in str(listener.of("error")[0])


def test_a_warm_call_of_an_executor_is_no_event(kernel, x):
    listener = Listener()
    executor = Executor(make_selector(on_event=listener))
    executor(kernel, x)
    before = len(listener.events)
    executor(kernel, x)
    assert len(listener.events) == before


@pytest.mark.parametrize("error", [ValueError("from the listener"), KeyError("listener")])
def test_a_listener_that_raises_is_logged_and_the_call_goes_on(kernel, x, caplog, error):
    def listener(event, **data):
        raise error

    executor = Executor(make_selector(on_event=listener))
    with caplog.at_level(logging.ERROR):
        assert executor(kernel, x)[0] == 2
    assert kernel.ran[-1] == "autotune"
    records = [record for record in caplog.records if record.exc_info]
    assert records
    assert all(record.exc_info[1] is error for record in records)
    assert all(record.name.startswith("ejkernel") for record in records)


def test_a_listener_that_does_not_take_the_fields_does_not_break_the_call(kernel, x, caplog):
    executor = Executor(make_selector(on_event=lambda event: None))
    with caplog.at_level(logging.ERROR):
        assert executor(kernel, x)[0] == 2
    assert caplog.records


# --- what is written -----------------------------------------------------------------------------


def test_a_tuned_config_goes_to_memory_and_to_disk(kernel, x, tmp_path):
    selector = make_selector(persistent=tmp_path / "store")
    ask(selector, kernel, x)
    key = kernel.bind(x).key
    assert selector.cache.get(key) == Config("autotune")
    assert PersistentCache(tmp_path / "store").get(key) == Config("autotune")


def test_a_stored_config_is_used_by_the_next_process_without_tuning(kernel, x, tmp_path):
    ask(make_selector(persistent=tmp_path / "store"), kernel, x)
    second = make_selector(persistent=tmp_path / "store", tuner=FailingTuner())
    assert ask(second, kernel, x) == "autotune"
    assert second.tuner.calls == 0
    assert second.cache.get(kernel.bind(x).key) == Config("autotune")


def test_without_persist_autotune_a_tuned_config_stays_in_memory(kernel, x, tmp_path):
    selector = make_selector(persistent=tmp_path / "store", persist_autotune=False)
    ask(selector, kernel, x)
    assert selector.cache.get(kernel.bind(x).key) == Config("autotune")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("policy", [None, AutotunePolicy(allow_autotune=False)])
def test_an_override_is_written_nowhere_and_does_not_prevent_tuning(kernel, x, tmp_path, policy):
    selector = make_selector(persistent=tmp_path / "store", policy=policy)
    executor = Executor(selector)
    executor(kernel, x, cfg=Config("mine"))
    assert kernel.ran == ["mine"]
    assert not (tmp_path / "store").exists()
    with policy_override(autotune=True):
        assert ask(selector, kernel, x) == "autotune"


def test_an_override_does_not_replace_what_is_cached(kernel, x, tmp_path):
    selector = make_selector(persistent=tmp_path / "store")
    key = kernel.bind(x).key
    ask(selector, kernel, x)
    ask(selector, kernel, x, Config("mine"))
    assert selector.cache.get(key) == Config("autotune")
    assert selector.persistent.get(key) == Config("autotune")


def test_a_heuristic_choice_is_written_nowhere_and_does_not_prevent_tuning(kernel, x, tmp_path):
    selector = make_selector(persistent=tmp_path / "store", autotune=False)
    Executor(selector)(kernel, x)
    assert not (tmp_path / "store").exists()
    with policy_override(selector, autotune=True):
        assert ask(selector, kernel, x) == "autotune"
    assert PersistentCache(tmp_path / "store").get(kernel.bind(x).key) == Config("autotune")


def test_the_heuristic_after_failed_tuning_is_written_nowhere(x, tmp_path):
    kernel = OnlyTuningFails()
    selector = ConfigSelectorChain(ConfigCache(), persistent=tmp_path / "store", tuner=Tuner())
    assert ask(selector, kernel, x) == "heuristics"
    assert len(selector.cache) == 0
    assert not (tmp_path / "store").exists()


# --- once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("forbid", [True, False])
def test_forbid_reautotune_decides_whether_a_key_is_tuned_again(kernel, x, forbid):
    selector = make_selector(forbid_reautotune=forbid)
    assert ask(selector, kernel, x) == "autotune"
    selector.cache.clear()
    assert ask(selector, kernel, x) == "autotune"
    assert len(selector.tuner.seen) == (1 if forbid else 2)


def test_a_known_config_is_not_tuned_again_even_when_allowed(kernel, x):
    selector = make_selector(forbid_reautotune=False)
    ask(selector, kernel, x)
    ask(selector, kernel, x)
    assert len(selector.tuner.seen) == 1


def test_another_shape_is_another_key_and_is_tuned(kernel):
    selector = make_selector()
    for size in (2, 3, 2, 3):
        ask(selector, kernel, jnp.ones(size))
    assert len(selector.tuner.seen) == 2


def test_failed_tuning_is_not_repeated_for_the_same_key(x):
    kernel, listener = OnlyTuningFails(), Listener()
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(), on_event=listener)
    for _ in range(3):
        assert ask(selector, kernel, x) == "heuristics"
    assert listener.names.count("autotune_start") == 1


@pytest.mark.parametrize("forbid", [True, False])
@pytest.mark.parametrize("through", ["choose", "executor"])
def test_eight_threads_that_ask_for_one_untuned_key_tune_once(kernel, x, through, forbid):
    selector = make_selector(tuner=FakeTuner(seconds=0.3), forbid_reautotune=forbid)
    executor = Executor(selector)
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait(60)
        if through == "choose":
            return ask(selector, kernel, x)
        return executor(kernel, x).tolist() and executor.choose_config(kernel, x).name

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(8)))
    assert answers == ["autotune"] * 8
    assert len(selector.tuner.seen) == 1


def test_threads_with_different_keys_do_not_wait_for_each_other(kernel):
    meeting = threading.Barrier(2)

    class Meeting(FakeTuner):
        def autotune(self, *args):
            meeting.wait(30)  # broken, and an error, unless both tune at the same time
            return super().autotune(*args)

    selector = make_selector(tuner=Meeting())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda n: ask(selector, kernel, jnp.ones(n)), (2, 3)))
    assert answers == ["autotune", "autotune"]


def test_a_waiting_thread_gets_the_answer_also_when_tuning_fails(x):
    kernel = OnlyTuningFails()
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner())
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait(60)
        return ask(selector, kernel, x)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == ["heuristics"] * 4


# --- nothing of this is fatal --------------------------------------------------------------------


def warnings_in(caplog):
    return [record for record in caplog.records if record.levelno == logging.WARNING]


def test_when_all_candidates_fail_the_heuristic_runs_with_one_warning(x, caplog):
    kernel = OnlyTuningFails()
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner()))
    with caplog.at_level(logging.WARNING):
        assert executor(kernel, x)[0] == 2
        assert jax.jit(lambda x: executor(kernel, x))(x)[0] == 2
    (warning,) = warnings_in(caplog)
    assert "named@v1" in warning.getMessage()
    assert "no_such_keyword" in warning.getMessage()


def test_a_tuner_of_the_users_own_whose_candidates_all_fail_is_not_fatal(kernel, x, caplog):
    selector = make_selector(tuner=FailingTuner())
    with caplog.at_level(logging.WARNING):
        assert ask(selector, kernel, x) == "heuristics"
        assert ask(selector, kernel, x) == "heuristics"
    (warning,) = warnings_in(caplog)
    assert "this is a test" in warning.getMessage()
    assert selector.tuner.calls == 1


class BrokenSpace(Named):
    def candidate_cfgs(self, inv):
        raise ValueError("the author's part is broken")


class BrokenInputs(Named):
    def make_inputs(self, inv, key):
        raise ValueError("the author's part is broken")


class BrokenReference(Named):
    def reference(self, x):
        raise ValueError("the author's part is broken")


@pytest.mark.parametrize("kernel_class", [BrokenSpace, BrokenInputs, BrokenReference])
def test_a_broken_helper_for_tuning_costs_the_tuning_and_not_the_call(kernel_class, x, caplog):
    kernel = kernel_class()
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(warmup=0, iters=1)))
    with caplog.at_level(logging.WARNING):
        assert executor(kernel, x)[0] == 2
    assert any("author's part is broken" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("tier", ["override", "overlay", "memory", "persistent"])
def test_a_heuristic_that_fails_does_not_break_a_hit(x, tmp_path, tier):
    kernel = BrokenHeuristic()
    selector = make_selector(persistent=tmp_path / "store")
    key, config, block = kernel.bind(x).key, Config(tier), contextlib.nullcontext()
    given = {}
    if tier == "override":
        given = {"cfg": config}
    elif tier == "overlay":
        block = overlay_cache({key: config})
    elif tier == "memory":
        selector.cache.put(key, config)
    else:
        selector.persistent.put(key, config)
    with block:
        assert Executor(selector)(kernel, x, **given)[0] == 2
    assert kernel.ran == [tier]


def test_a_heuristic_that_fails_when_it_is_needed_says_what_happened(x):
    with pytest.raises(Exception, match="my heuristic is broken"):
        Executor(make_selector(autotune=False))(BrokenHeuristic(), x)


def test_a_kernel_without_a_heuristic_is_tuned_among_its_candidates(x):
    class NoHeuristic(Named):
        def heuristic_cfg(self, inv):
            raise NotImplementedError("this kernel has no heuristic")

    selector = make_selector()
    assert ask(selector, NoHeuristic(), x) == "autotune"
    assert sorted(selector.tuner.seen[0]) == ["another", "candidate"]


def below_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "store"


def read_only(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    return tmp_path / "store"


def without_permission(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = tmp_path / "store"
    folder.mkdir(mode=0o500)
    return folder


@pytest.mark.parametrize("place", [below_a_file, read_only, without_permission])
def test_a_store_that_cannot_be_written_costs_a_warning(
    kernel, x, tmp_path, monkeypatch, caplog, place
):
    store = PersistentCache(place(tmp_path, monkeypatch))
    executor = Executor(make_selector(persistent=store))
    with caplog.at_level(logging.WARNING):
        assert executor(kernel, x)[0] == 2
    assert kernel.ran[-1] == "autotune"
    assert executor.selector.cache.get(kernel.bind(x).key) == Config("autotune")
    (warning,) = warnings_in(caplog)
    assert str(store.path) in warning.getMessage()


def test_a_config_that_cannot_be_stored_costs_a_warning(x, tmp_path, caplog):
    @dataclasses.dataclass(frozen=True)
    class WithFunction:
        function: object = abs

    class Odd(Kernel[WithFunction, jax.Array]):
        def run(self, x, *, cfg):
            return x + 1

        def heuristic_cfg(self, inv):
            return WithFunction()

    selector = ConfigSelectorChain(
        ConfigCache(), tuner=Tuner(warmup=0, iters=1), persistent=tmp_path / "store"
    )
    with caplog.at_level(logging.WARNING):
        assert Executor(selector)(Odd(), x)[0] == 2
    assert len(selector.cache) == 1
    assert len(warnings_in(caplog)) == 1


def test_a_damaged_entry_in_the_store_is_tuned_again_and_replaced(kernel, x, tmp_path, caplog):
    key = kernel.bind(x).key
    store = PersistentCache(tmp_path / "store")
    store.put(key, Config("old"))
    with contextlib.closing(sqlite3.connect(store.path / "configs.sqlite3")) as connection:
        connection.execute("UPDATE ejkernel_entries SET config = '{'")
        connection.commit()
    with caplog.at_level(logging.WARNING):
        assert ask(make_selector(persistent=store), kernel, x) == "autotune"
    assert len(warnings_in(caplog)) == 1
    assert PersistentCache(store.path).get(key) == Config("autotune")


def test_a_stored_config_that_no_longer_fits_its_class_is_tuned_again(kernel, x, tmp_path, caplog):
    store = PersistentCache(tmp_path / "store")
    store.put(kernel.bind(x).key, Config("old"))
    config = json.dumps({"name": "old", "removed_field": 3})
    with contextlib.closing(sqlite3.connect(store.path / "configs.sqlite3")) as connection:
        connection.execute("UPDATE ejkernel_entries SET config = ?", (config,))
        connection.commit()
    with caplog.at_level(logging.WARNING):
        assert ask(make_selector(persistent=store), kernel, x) == "autotune"
    (warning,) = warnings_in(caplog)
    assert "removed_field" in warning.getMessage()
