"""SPEC 8: a lowered computation is tuned by its labels, and its result really runs.

Most tests use a tuner that picks the candidate with the largest factor instead of measuring, and a
kernel whose output shows the factor: so a value says which config ran, under any transform.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import uuid
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Kernel,
    PersistentCache,
    Tuner,
    autotune_lowered,
    clear_invocations,
    device_fingerprint,
    find_labels_in_lowered,
    get_invocations,
    label,
    labels_to_configs,
    overlay_cache,
    policy_override,
    set_default_executor,
    vmap_with_config,
)

ROOT = Path(__file__).resolve().parents[2]
X = jnp.arange(1.0, 5.0)
HEURISTIC, TUNED = 1.0, 3.0


@dataclasses.dataclass(frozen=True)
class Factor:
    factor: float = HEURISTIC


class Scale(Kernel[Factor, jax.Array]):
    """The factor is in the output and in the gradient."""

    def run(self, x, *, cfg):
        return x * cfg.factor

    def candidate_cfgs(self, inv):
        return [Factor(1.0), Factor(2.0), Factor(TUNED)]


class ScaleWithRule(Scale):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (cotangents[0] * cfg.factor,)


class ScaleWithResiduals(Scale):
    def fwd_with_residuals(self, x, *, cfg):
        return x * cfg.factor, ()

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (dout * cfg.factor,)


class LargestWins(Tuner):
    """Measures nothing: what is tested here is what becomes of the answer."""

    def autotune(self, make_fn, args, kwargs, candidates):
        return max(candidates, key=lambda cfg: cfg.factor)


class Events(list):
    def __call__(self, event, **data):
        self.append((event, data))

    def count_of(self, event):
        return sum(name == event for name, _ in self)


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def selector(events):
    return ConfigSelectorChain(ConfigCache(), tuner=LargestWins(), on_event=events)


@pytest.fixture
def scale():
    return Scale("scale")


def factors(result):
    return {entry.op_id: entry.cfg.factor for entry in result.entries}


# --- the documented workflow ----------------------------------------------------------------------


def test_the_documented_workflow_runs_the_tuned_configs(selector, scale):
    def my_function(x):
        return scale(x) + 0.0

    lowered = jax.jit(my_function).lower(X)
    result = autotune_lowered(selector, lowered)
    with result:
        out = jax.jit(my_function)(X)
    np.testing.assert_array_equal(out, X * TUNED)


def test_no_environment_variable_is_needed(selector, scale):
    assert not [name for name in os.environ if name.startswith("EJKERNEL_OPS")]
    result = autotune_lowered(selector, jax.jit(scale).lower(X))
    assert factors(result) == {"scale@v1": TUNED}


def test_the_documented_workflow_works_with_the_real_tuner():
    class OneIsRight(Scale):
        """The reference refuses all candidates but one, so that no clock decides."""

        def reference(self, x):
            return x * TUNED

    kernel = OneIsRight("one_is_right")
    jitted = jax.jit(lambda x: kernel(x) + 0.0)
    np.testing.assert_array_equal(jitted(X), X * HEURISTIC)
    result = autotune_lowered(ConfigSelectorChain(ConfigCache()), jitted.lower(X))
    (entry,) = result.entries
    assert entry.cfg == Factor(TUNED)
    assert len(entry.outcome.trials) == 3
    with result:
        np.testing.assert_array_equal(jitted(X), X * TUNED)
    np.testing.assert_array_equal(jitted(X), X * HEURISTIC)


def test_a_result_says_for_which_device_and_calls_it_is(selector, scale):
    result = autotune_lowered(selector, jax.jit(scale).lower(X))
    assert isinstance(result, AutotuningResult)
    assert result.device == device_fingerprint()
    assert list(result.entries) == [Entry("scale@v1", scale.bind(X).call_key, Factor(TUNED))]
    assert result.skipped == ()


def test_the_very_same_jitted_object_that_ran_before_runs_tuned_inside(selector, scale):
    jitted = jax.jit(lambda x: scale(x) + 0.0)
    np.testing.assert_array_equal(jitted(X), X * HEURISTIC)
    result = autotune_lowered(selector, jitted.lower(X))
    np.testing.assert_array_equal(jitted(X), X * HEURISTIC)
    for _ in range(2):
        with result:
            np.testing.assert_array_equal(jitted(X), X * TUNED)
        np.testing.assert_array_equal(jitted(X), X * HEURISTIC)


def test_the_function_and_the_kernel_that_ran_before_run_tuned_inside(selector, scale):
    def function(x):
        return scale(x)

    for call in (scale, function, jax.jit(function)):
        np.testing.assert_array_equal(call(X), X * HEURISTIC)
    result = autotune_lowered(selector, jax.jit(function).lower(X))
    with result:
        for call in (scale, function, jax.jit(function), jax.jit(jax.jit(function))):
            np.testing.assert_array_equal(call(X), X * TUNED)
    for call in (scale, function, jax.jit(function)):
        np.testing.assert_array_equal(call(X), X * HEURISTIC)


def test_leaving_the_block_does_not_trace_again(selector, scale):
    traced = []

    @jax.jit
    def function(x):
        traced.append(1)
        return scale(x)

    function(X)
    result = autotune_lowered(selector, function.lower(X))
    traced.clear()
    for _ in range(3):
        with result:
            function(X)
        function(X)
    assert len(traced) == 1  # inside, the first time


def test_a_result_serves_any_executor_inside_the_block(selector, scale):
    other = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    np.testing.assert_array_equal(other(scale, X), X * HEURISTIC)
    with autotune_lowered(selector, jax.jit(scale).lower(X)):
        np.testing.assert_array_equal(other(scale, X), X * TUNED)
        assert other.choose_config(scale, X) == Factor(TUNED)
    np.testing.assert_array_equal(other(scale, X), X * HEURISTIC)


def test_an_explicit_config_still_wins_inside_the_block(selector, scale):
    with autotune_lowered(selector, jax.jit(scale).lower(X)):
        np.testing.assert_array_equal(scale(X, cfg=Factor(2.0)), X * 2.0)


def test_other_shapes_keep_their_config_inside_the_block(selector, scale):
    longer = jnp.ones(7)
    with autotune_lowered(selector, jax.jit(scale).lower(X)):
        np.testing.assert_array_equal(scale(longer), longer * HEURISTIC)


def test_an_exception_inside_the_block_restores_the_earlier_configs(selector, scale):
    jitted = jax.jit(scale)
    result = autotune_lowered(selector, jitted.lower(X))
    with contextlib.suppress(KeyError), result:
        raise KeyError
    np.testing.assert_array_equal(jitted(X), X * HEURISTIC)


def test_results_nest_and_the_innermost_wins(selector, scale):
    jitted = jax.jit(scale)
    result = autotune_lowered(selector, jitted.lower(X))
    with result, overlay_cache({"scale": Factor(2.0)}):
        np.testing.assert_array_equal(jitted(X), X * 2.0)
        with result, result:
            np.testing.assert_array_equal(jitted(X), X * TUNED)
        np.testing.assert_array_equal(jitted(X), X * 2.0)
    np.testing.assert_array_equal(jitted(X), X * HEURISTIC)


def test_lowering_inside_a_result_still_tunes_afresh(selector, scale):
    # The active overlay decides what runs, not what another selector finds out.
    with overlay_cache({"scale": Factor(2.0)}):
        result = autotune_lowered(selector, jax.jit(scale).lower(X))
    assert factors(result) == {"scale@v1": TUNED}


def test_tuning_is_an_order_that_the_policy_does_not_forbid(scale, events):
    quiet = ConfigSelectorChain(ConfigCache(), tuner=LargestWins(), autotune=False, on_event=events)
    with policy_override(autotune=False):
        result = autotune_lowered(quiet, jax.jit(scale).lower(X))
    assert factors(result) == {"scale@v1": TUNED}
    assert events.count_of("autotune_start") == 1


# --- functions of every kind ----------------------------------------------------------------------


def scanned(kernel):
    return lambda x: jax.lax.scan(lambda c, _: (kernel(c), None), x, None, length=2)[0]


def batch(function):
    return lambda x: function(jnp.stack([x, x]))[0]


# Each: the function, and what it gives as a multiple of what the factor gives.
PROGRAMS = {
    "grad": lambda k: jax.grad(lambda x: jnp.sum(k(x))),
    "value_and_grad": lambda k: lambda x: jax.value_and_grad(lambda x: jnp.sum(k(x)))(x)[1],
    "vmap": lambda k: batch(jax.vmap(k)),
    "scan": lambda k: lambda x: jnp.sqrt(scanned(k)(x) / x),
    "remat": lambda k: jax.checkpoint(k),
    "grad of remat": lambda k: jax.grad(lambda x: jnp.sum(jax.checkpoint(k)(x))),
    "vmap of grad": lambda k: batch(jax.vmap(jax.grad(lambda x: jnp.sum(k(x))))),
    "grad of scan": lambda k: lambda x: jnp.sqrt(jax.grad(lambda x: jnp.sum(scanned(k)(x)))(x)),
    "cond": lambda k: lambda x: jax.lax.cond(x[0] > 0, k, jnp.zeros_like, x),
    "while_loop": lambda k: (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, k(c[1])), (0, x))[1]
    ),
    "inner jit": lambda k: lambda x: jax.jit(k)(x),
}


def factor_of(out, x):
    """The factor that an output shows: gradients show it as it is, values times x."""
    ratio = np.asarray(out) / (1 if np.allclose(out, np.asarray(out)[0]) else np.asarray(x))
    assert np.allclose(ratio, ratio[0])
    return round(float(ratio[0]), 4)


@pytest.mark.parametrize("kind", [Scale, ScaleWithRule, ScaleWithResiduals])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_tuned_config_runs_through_transforms(program, kind, selector, events):
    kernel = kind("transformed")
    jitted = jax.jit(PROGRAMS[program](kernel))
    assert factor_of(jitted(X), X) == HEURISTIC
    result = autotune_lowered(selector, jitted.lower(X))
    assert [(entry.op_id, entry.cfg) for entry in result] == [("transformed@v1", Factor(TUNED))]
    assert events.count_of("autotune_start") == 1
    with result:
        assert factor_of(jitted(X), X) == TUNED
        assert factor_of(jax.jit(PROGRAMS[program](kernel))(X), X) == TUNED
    assert factor_of(jitted(X), X) == HEURISTIC


def test_several_kernels_and_shapes_are_each_tuned_once(selector, events):
    first, second = Scale("first"), ScaleWithRule("second")
    y = jnp.ones((2, 3))

    def function(x, y):
        return first(x) + first(x * 2), second(first(y)), second(x)

    result = autotune_lowered(selector, jax.jit(function).lower(X, y))
    calls = [(first, X), (first, y), (second, X), (second, y)]
    expected = {Entry(k.full_op_id, k.bind(a).call_key, Factor(TUNED)) for k, a in calls}
    assert set(result.entries) == expected
    assert len(result) == 4
    assert events.count_of("autotune_start") == 4
    with result:
        a, b, c = jax.jit(function)(X, y)
    np.testing.assert_array_equal(a, X * 3 * TUNED)
    np.testing.assert_array_equal(b, y * TUNED * TUNED)
    np.testing.assert_array_equal(c, X * TUNED)


def test_a_kernel_inside_a_kernel_is_tuned_too(selector):
    inner = Scale("inner")

    class Outer(Scale):
        def run(self, x, *, cfg):
            return inner(x) * cfg.factor

    outer = Outer("outer")
    result = autotune_lowered(selector, jax.jit(outer).lower(X))
    assert factors(result) == {"outer@v1": TUNED, "inner@v1": TUNED}
    with result:
        np.testing.assert_array_equal(outer(X), X * TUNED * TUNED)


def test_static_keywords_are_tuned_apart(selector):
    class WithMode(Scale):
        def run(self, x, *, cfg, mode="a"):
            return x * cfg.factor

    kernel = WithMode("with_mode")
    lowered = jax.jit(lambda x: kernel(x, mode="a") + kernel(x, mode="b")).lower(X)
    assert len(autotune_lowered(selector, lowered)) == 2


def test_a_program_that_was_lowered_from_abstract_shapes_is_tuned(selector, scale):
    lowered = jax.jit(scale).lower(jax.ShapeDtypeStruct((4,), jnp.float32))
    with autotune_lowered(selector, lowered):
        np.testing.assert_array_equal(scale(X), X * TUNED)


def test_a_program_without_kernels_gives_an_empty_result(selector):
    result = autotune_lowered(selector, jax.jit(jnp.sin).lower(X))
    assert len(result) == 0
    assert result.skipped == ()
    with result:
        np.testing.assert_allclose(jax.jit(jnp.sin)(X), np.sin(X), rtol=1e-6)


def test_tuning_inside_another_trace_works(selector, scale):
    lowered = jax.jit(scale).lower(X)
    results = []

    @jax.jit
    def function(x):
        results.append(autotune_lowered(selector, lowered))
        return x

    function(X)
    assert factors(results[0]) == {"scale@v1": TUNED}


# --- caches ---------------------------------------------------------------------------------------


def test_both_caches_are_filled(tmp_path, scale):
    store = PersistentCache(tmp_path / "store")
    selector = ConfigSelectorChain(ConfigCache(), tuner=LargestWins(), persistent=store)
    result = autotune_lowered(selector, jax.jit(scale).lower(X))
    key = (device_fingerprint(), "scale@v1", scale.bind(X).call_key)
    assert selector.cache.get(*key) == Factor(TUNED)
    assert PersistentCache(tmp_path / "store").get(*key) == Factor(TUNED)
    assert labels_to_configs(jax.jit(scale).lower(X), selector)[0][1] == Factor(TUNED)
    assert len(result) == 1


def test_nothing_is_written_without_persist_autotune(tmp_path, scale):
    store = PersistentCache(tmp_path / "store")
    selector = ConfigSelectorChain(
        ConfigCache(), tuner=LargestWins(), persistent=store, persist_autotune=False
    )
    autotune_lowered(selector, jax.jit(scale).lower(X))
    assert len(selector.cache) == 1
    assert len(store) == 0


def test_the_tuners_own_selector_serves_the_config_without_the_block(selector, scale):
    executor = Executor(selector)
    autotune_lowered(selector, jax.jit(scale).lower(X))
    np.testing.assert_array_equal(executor(scale, X), X * TUNED)


def test_a_second_tuning_measures_nothing(selector, scale, events):
    first = autotune_lowered(selector, jax.jit(scale).lower(X))
    second = autotune_lowered(selector, jax.jit(scale).lower(X))
    assert events.count_of("autotune_start") == 1
    assert second == first
    assert second.entries[0].cfg == Factor(TUNED)


def test_what_a_store_holds_is_not_measured_again(tmp_path, scale, events):
    folder = tmp_path / "store"
    lowered = jax.jit(scale).lower(X)
    first = autotune_lowered(
        ConfigSelectorChain(ConfigCache(), tuner=LargestWins(), persistent=folder), lowered
    )
    later = ConfigSelectorChain(
        ConfigCache(), tuner=LargestWins(), persistent=folder, on_event=events
    )
    assert autotune_lowered(later, lowered) == first
    assert events.count_of("autotune_start") == 0
    assert events.count_of("cache_hit") == 1
    assert len(later.cache) == 1


# --- what cannot be tuned -------------------------------------------------------------------------


def test_a_labelled_function_is_reported_and_not_fatal(selector, scale):
    @label("my_attention")
    def attention(x):
        return jnp.sin(x)

    lowered = jax.jit(lambda x: attention(scale(x))).lower(X)
    result = autotune_lowered(selector, lowered)
    assert factors(result) == {"scale@v1": TUNED}
    (skipped,) = result.skipped
    assert skipped.label in find_labels_in_lowered(lowered)
    assert "my_attention@v1" in skipped.label
    assert skipped.reason
    assert "my_attention@v1" in str(result)


def forgotten(kernel_class, **kwargs) -> str:
    """The text of a program whose kernel has vanished and was not recorded."""
    text = jax.jit(partial(kernel_class("forgotten"), **kwargs)).lower(X).as_text()
    clear_invocations()
    jax.clear_caches()
    gc.collect()
    return text


def test_a_kernel_that_vanished_is_reported(selector):
    class Local(Scale):
        pass

    result = autotune_lowered(selector, forgotten(Local))
    assert len(result) == 0
    (skipped,) = result.skipped
    assert skipped.label.startswith("ejkernel_ops#forgotten@v1:")
    assert "Local" in skipped.reason


def test_a_call_that_could_not_be_described_is_reported(selector):
    class Activated(Scale):
        def run(self, x, *, cfg, activation):
            return activation(x) * cfg.factor

    result = autotune_lowered(selector, forgotten(Activated, activation=jnp.tanh))
    assert len(result) == 0
    assert "specification" in result.skipped[0].reason


def program_with(spec: str, key: str = "0" * 16) -> str:
    stamp = f"ejkernel_ops#scale@v1:{key} {spec}"
    return f'call @f() {{mhlo.frontend_attributes = {{ejkernel = "{stamp}"}}}}'


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        "'text'",
        "{}",
        "{'op':'scale@v1'}",
        "{'op':7,'kernel':8,'args':[]}",
        "{'op':null,'kernel':null,'args':[]}",
        "{'op':'gone@v1','kernel':[],'args':[]}",
        "{'op':'gone@v1','kernel':'','args':[]}",
        "{'op':'gone@v1','kernel':':','args':[]}",
        "{'op':'gone@v1','kernel':'no.such.module:Kernel','args':[]}",
        "{'op':'gone@v1','kernel':'math:sin','args':[]}",
        "{'op':'gone@v1','kernel':'math:nothing','args':[]}",
        "{'op':'gone@v1','kernel':'ejkernel.ops:Kernel','args':[]}",
        "{'op':'gone@v1','kernel':'.relative:Kernel','args':[]}",
        "{'op':'scale@v1','kernel':'x:y','args':7}",
        "{'op':'scale@v1','kernel':'x:y','args':[{'$array':'float32'}]}",
        "{'op':'scale@v1','kernel':'x:y','args':[{'$array':7}]}",
        "{'op':'scale@v1','kernel':'x:y','args':[{'$array':'nonsense[4]'}]}",
        "{'op':'scale@v1','kernel':'x:y','args':[{'$array':'float32[,]'}]}",
        "{'op':'scale@v1','kernel':'x:y','args':[{'$tuple':7}]}",
        "{'op':'scale@v1','kernel':'x:y','args':[{'$dict':7}]}",
        "{'op':'scale@v1','kernel':'x:y','args':[],'kwargs':7}",
        "{'op':'scale@v1','kernel':'x:y','args':[],'batch':7}",
        "{'op':'scale@v1','kernel':'x:y','args':[],'batch':{'transform':'vmap'}}",
        "{'op':'scale@v1','kernel':'x:y','args':[{'$array':'float32[5]'}]}",
        "{'op':'scale@v1','kernel':'x:y','args':[{'$dtype':'nonsense'}]}",
    ],
)
def test_a_damaged_specification_is_reported(spec, selector, scale):
    result = autotune_lowered(selector, program_with(spec))
    assert len(result) == 0
    (skipped,) = result.skipped
    assert skipped.label == f"ejkernel_ops#scale@v1:{'0' * 16}"
    assert skipped.reason


def test_a_specification_of_another_operation_is_reported(selector, scale):
    other = Scale("other")
    key = scale.bind(X).call_key
    assert other.bind(X).call_key == key  # the operation is the other half of the label
    spec = "{'op':'other@v1','kernel':'x:y','args':[{'$array':'float32[4]'}]}"
    result = autotune_lowered(selector, program_with(spec, key))
    assert len(result) == 0
    assert [skipped.label for skipped in result.skipped] == [f"ejkernel_ops#scale@v1:{key}"]


def test_a_damaged_specification_does_not_stand_in_the_way_of_others(selector, scale):
    text = program_with("{") + "\n" + jax.jit(scale).lower(X).as_text()
    result = autotune_lowered(selector, text)
    assert factors(result) == {"scale@v1": TUNED}
    assert len(result.skipped) == 1


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('this module is broken')",
        "def broken(:",
        "import no_such_module_at_all",
        "class Made:\n    pass",
        "class Made(Kernel):\n    def run(self, x, *, cfg): return x\n"
        "    def __init__(self): raise RuntimeError('not here')",
        "class Made(Kernel):\n    def run(self, x, *, cfg): return x\n"
        "    def __init__(self, needed): super().__init__('gone')",
        "class Made(Kernel):\n    def run(self, x, *, cfg): return x\n"
        "    def __init__(self): super().__init__('another')",
    ],
    ids=["raises", "syntax", "import", "no kernel", "constructor", "argument", "another name"],
)
def test_a_kernel_module_that_cannot_be_used_is_reported(body, selector, tmp_path, monkeypatch):
    name = f"broken_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(f"from ejkernel.ops import Kernel\n{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = f"{{'op':'gone@v1','kernel':'{name}:Made','args':[]}}"
    result = autotune_lowered(selector, program_with(spec).replace("scale@v1", "gone@v1"))
    assert len(result) == 0
    (skipped,) = result.skipped
    assert name in skipped.reason


class Failing(Scale):
    """The heuristic config runs; measuring fails for all of them."""

    def make_inputs(self, inv, key):
        return (jnp.ones((1, 2, 3)),), {}

    def run(self, x, *, cfg):
        if x.ndim != 1:
            raise ValueError("the machine is out of tiles")
        return x * cfg.factor


def test_a_kernel_all_of_whose_candidates_fail_is_reported(scale):
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(warmup=0, iters=1))
    failing = Failing("failing")
    result = autotune_lowered(selector, jax.jit(lambda x: scale(failing(x))).lower(X))
    assert [entry.op_id for entry in result.entries] == ["scale@v1"]
    (skipped,) = result.skipped
    assert "failing@v1" in skipped.label
    assert "out of tiles" in skipped.reason
    with result:
        assert jax.jit(failing)(X).shape == (4,)


class BadCandidates(Scale):
    def candidate_cfgs(self, inv):
        raise ZeroDivisionError("no block fits")


class BadCandidateType(Scale):
    def candidate_cfgs(self, inv):
        return ["large"]


class BadInputs(Scale):
    def make_inputs(self, inv, key):
        raise ZeroDivisionError("no inputs")


class BadReference(Scale):
    def reference(self, x):
        raise ZeroDivisionError("no reference")


@pytest.mark.parametrize("kind", [BadCandidates, BadCandidateType, BadInputs, BadReference])
def test_a_kernel_whose_tuning_methods_raise_is_reported(kind, scale):
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(warmup=0, iters=1))
    bad = kind("bad")
    result = autotune_lowered(selector, jax.jit(lambda x: scale(bad(x))).lower(X))
    assert [entry.op_id for entry in result.entries] == ["scale@v1"]
    (skipped,) = result.skipped
    assert "bad@v1" in skipped.label
    assert skipped.reason


def test_a_tuner_that_raises_is_reported(scale):
    class Broken(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            raise RuntimeError("the clock is broken")

    result = autotune_lowered(
        ConfigSelectorChain(ConfigCache(), tuner=Broken()), jax.jit(scale).lower(X)
    )
    assert len(result) == 0
    assert "clock is broken" in result.skipped[0].reason


def test_a_config_of_another_class_in_the_cache_is_reported_or_replaced(selector, scale):
    selector.cache.put(device_fingerprint(), "scale@v1", scale.bind(X).call_key, "not a config")
    result = autotune_lowered(selector, jax.jit(scale).lower(X))
    assert factors(result) == {"scale@v1": TUNED} or len(result.skipped) == 1


@pytest.mark.parametrize("wrong", [None, 3, b"text", jnp.sin])
def test_something_else_than_a_program_is_a_type_error(wrong, selector):
    with pytest.raises(TypeError, match="lower"):
        autotune_lowered(selector, wrong)


def test_arguments_in_the_wrong_order_are_a_type_error(selector, scale):
    with pytest.raises(TypeError, match="selector, lowered"):
        autotune_lowered(jax.jit(scale).lower(X), selector)


# --- from the text, in this process and in another one --------------------------------------------


def test_the_text_tunes_as_the_lowered_computation_does(selector, scale):
    lowered = jax.jit(scale).lower(X)
    from_text = autotune_lowered(ConfigSelectorChain(tuner=LargestWins()), lowered.as_text())
    assert from_text == autotune_lowered(selector, lowered)


@pytest.mark.parametrize("form", ["as_text", "debug_info", "hlo"])
def test_every_text_form_is_tuned_without_the_record(form, selector, scale):
    lowered = jax.jit(jax.grad(lambda x: jnp.sum(scale(x)))).lower(X)
    text = {
        "as_text": lowered.as_text,
        "debug_info": lambda: lowered.as_text(debug_info=True),
        "hlo": lambda: lowered.as_text(dialect="hlo"),
    }[form]()
    clear_invocations()
    assert get_invocations() == []
    result = autotune_lowered(selector, text)
    assert result.skipped == ()
    training = scale.bind(X).differentiate()
    assert list(result.entries) == [Entry("scale@v1", training.call_key, Factor(TUNED))]


KERNEL_MODULE = """
    import dataclasses
    import jax.numpy as jnp
    from ejkernel.ops import Kernel, Tuner

    @dataclasses.dataclass(frozen=True)
    class Blocks:
        factor: float = 1.0

    class Remote(Kernel[Blocks, object]):
        def __init__(self):
            super().__init__("remote", version="2")

        def run(self, x, y=None, *, cfg, mode="a", dtype=None, extra=None):
            return x * cfg.factor

        def candidate_cfgs(self, inv):
            # What is found depends on the call, so a wrong rebuilding shows.
            return [Blocks(1.0), Blocks(2.0 + inv.args[0].size)]

    class Ruled(Remote):
        def __init__(self):
            super(Remote, self).__init__("ruled")

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (cotangents[0] * cfg.factor,) + (None,) * (len(primals) - 1)

    class LargestWins(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            make_fn(candidates[0])(*args, **kwargs)  # the inputs must fit the kernel
            return max(candidates, key=lambda cfg: cfg.factor)
"""

TUNE_ELSEWHERE = """
    import json, pathlib, sys
    from ejkernel.ops import ConfigSelectorChain, autotune_lowered, get_invocations
    from remote_kernels import LargestWins

    assert get_invocations() == []
    answers = []
    for file in sys.argv[1:]:
        selector = ConfigSelectorChain(tuner=LargestWins())
        result = autotune_lowered(selector, pathlib.Path(file).read_text())
        answers.append({
            "entries": sorted([e.op_id, e.call_key, e.cfg.factor] for e in result),
            "skipped": [s.reason for s in result.skipped],
            "dumps": result.dumps(),
            "device": result.device,
            "stored": len(selector.cache),
        })
    print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Programs of this process, tuned by another one from their texts alone."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "remote_kernels.py").write_text(textwrap.dedent(KERNEL_MODULE))
    sys.path.insert(0, str(folder))
    try:
        import remote_kernels
    finally:
        sys.path.remove(str(folder))
    remote, ruled = remote_kernels.Remote(), remote_kernels.Ruled()
    two = jnp.ones((2, 4))
    text = """it's "quoted" \\ 'x'"""
    programs = {
        "plain": (lambda x: remote(x), X),
        "several": (lambda x: remote(x) + remote(ruled(x) + 1), X),
        "keywords": (lambda x: remote(x, mode=text, dtype=jnp.bfloat16, extra=(1, None)), X),
        "pytree": (lambda x: remote(x, {"a": [x, (x, 2.0)]}), X),
        "array keyword": (lambda x: remote(x, extra=x > 0), X),
        "gradient": (jax.grad(lambda x: jnp.sum(ruled(x))), X),
        "vmap": (jax.vmap(remote), two),
        "scan": (lambda x: jax.lax.scan(lambda c, _: (remote(c), None), x, None, length=2)[0], X),
        "vmap_with_config": (vmap_with_config(remote, in_axes=0), two),
        "vmap_with_config axes": (vmap_with_config(remote, in_axes=(1, None)), two, X),
        "unknown": (label("unknown")(jnp.sin), X),
    }
    results, files = {}, []
    for name, (function, *args) in programs.items():
        lowered = jax.jit(function).lower(*args)
        results[name] = autotune_lowered(
            ConfigSelectorChain(tuner=remote_kernels.LargestWins()), lowered
        )
        files.append(folder / f"{name}.mlir")
        files[-1].write_text(lowered.as_text())
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TUNE_ELSEWHERE), *map(str, files)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = dict(zip(programs, json.loads(done.stdout), strict=True))
    return programs, results, answers


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "several", "keywords", "pytree", "array keyword", "gradient", "vmap", "scan"),
        *("vmap_with_config", "vmap_with_config axes"),
    ],
)
def test_another_process_tunes_a_program_from_its_text(name, elsewhere):
    _, results, answers = elsewhere
    here = sorted([entry.op_id, entry.call_key, entry.cfg.factor] for entry in results[name])
    assert here
    assert answers[name]["entries"] == here
    assert answers[name]["skipped"] == []
    assert answers[name]["stored"] == len(here)
    assert answers[name]["device"] == device_fingerprint()


def test_another_process_reports_what_it_does_not_know(elsewhere):
    answer = elsewhere[2]["unknown"]
    assert answer["entries"] == []
    assert len(answer["skipped"]) == 1


@pytest.mark.parametrize("name", ["plain", "several", "vmap_with_config"])
def test_a_result_of_another_process_runs_here(name, elsewhere):
    programs, results, answers = elsewhere
    brought = AutotuningResult.loads(answers[name]["dumps"])
    assert brought == results[name]
    function, *args = programs[name]
    jitted = jax.jit(function)
    before = jitted(*args)
    with results[name]:
        expected = jitted(*args)
    with brought:
        np.testing.assert_array_equal(jitted(*args), expected)
    assert not np.allclose(before, expected)
    np.testing.assert_array_equal(jitted(*args), before)


# --- garbage, threads and tasks -------------------------------------------------------------------


def test_a_collected_result_is_never_mistaken_for_a_new_one(scale):
    # Keyed by address, a program of an old result would be served to a new one at its place.
    jitted = jax.jit(scale)
    key = scale.bind(X).call_key
    for factor in range(2, 12):
        result = AutotuningResult(None, [Entry("scale@v1", key, Factor(float(factor)))])
        with result:
            np.testing.assert_array_equal(jitted(X), X * factor)
        del result
        gc.collect()
    np.testing.assert_array_equal(jitted(X), X * HEURISTIC)


def test_equal_results_share_one_program(scale):
    traced = []

    @jax.jit
    def function(x):
        traced.append(1)
        return scale(x)

    for _ in range(3):
        entry = Entry("scale@v1", scale.bind(X).call_key, Factor(TUNED))
        with AutotuningResult(None, [entry]):
            function(X)
    assert len(traced) == 1


def in_threads(count, function):
    """Run `function(i)` in threads that start together; their results, or the first error."""
    answers, barrier = [None] * count, threading.Barrier(count)

    def work(i):
        barrier.wait()
        try:
            answers[i] = function(i)
        except Exception as error:  # noqa: BLE001  raised below, in the test's own thread
            answers[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def test_eight_threads_use_one_result_while_others_do_not(selector, scale):
    jitted = jax.jit(scale)
    result = autotune_lowered(selector, jitted.lower(X))
    jitted(X)

    def work(i):
        seen = []
        for _ in range(5):
            if i % 2:
                with result:
                    seen.append(float(jitted(X)[0]))
            else:
                seen.append(float(jitted(X)[0]))
        return seen

    for i, seen in enumerate(in_threads(8, work)):
        assert seen == [TUNED if i % 2 else HEURISTIC] * 5


def test_a_new_thread_is_outside_the_block_of_its_parent(selector, scale):
    jitted = jax.jit(scale)
    result = autotune_lowered(selector, jitted.lower(X))
    with result:
        (inside,) = in_threads(1, lambda _: float(jitted(X)[0]))
        assert float(jitted(X)[0]) == TUNED
    assert inside == HEURISTIC


def test_eight_threads_that_tune_one_program_measure_once(selector, scale, events):
    lowered = jax.jit(scale).lower(X)
    results = in_threads(8, lambda _: autotune_lowered(selector, lowered))
    assert events.count_of("autotune_start") == 1
    assert all(factors(result) == {"scale@v1": TUNED} for result in results)


def test_eight_threads_lower_and_tune_each_its_own_program(selector):
    kernels = [Scale(f"own_{i}") for i in range(8)]

    def work(i):
        jitted = jax.jit(kernels[i])
        with autotune_lowered(selector, jitted.lower(X)) as result:
            return factors(result), float(jitted(X)[0])

    for i, (found, value) in enumerate(in_threads(8, work)):
        assert found == {f"own_{i}@v1": TUNED}
        assert value == TUNED
    assert len(selector.cache) == 8


def test_asyncio_tasks_use_a_result_each_on_its_own(selector, scale):
    jitted = jax.jit(scale)
    result = autotune_lowered(selector, jitted.lower(X))

    async def task():
        seen = []
        for _ in range(4):
            with result:
                seen.append(float(jitted(X)[0]))
            await asyncio.sleep(0)
            seen.append(float(jitted(X)[0]))
        return seen

    async def main():
        return await asyncio.gather(task(), task(), task())

    assert asyncio.run(main()) == [[TUNED, HEURISTIC] * 4] * 3


def test_a_default_executor_set_later_is_served_by_the_result_too(selector, scale):
    result = autotune_lowered(selector, jax.jit(scale).lower(X))
    jitted = jax.jit(scale)
    set_default_executor(Executor(ConfigSelectorChain(ConfigCache(), autotune=False)))
    with result:
        np.testing.assert_array_equal(jitted(X), X * TUNED)
    np.testing.assert_array_equal(jitted(X), X * HEURISTIC)
