"""Section 7 of the contract: measuring, judging, racing, recording and what comes out of it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Tuner,
    autotune,
    autotune_recorded,
    benchmark,
    clear_invocations,
    default_executor,
    device_fingerprint,
    get_invocations,
    policy_override,
    record_invocation,
    registry,
)
from ejkernel.ops.tuner.session import tune_invocation

# --- a clock that only moves when a compiled program says so --------------------------------------


def spending(clock, seconds, value):
    """`value`, after the clock has moved while the program runs (not while it is traced)."""

    def tick(_):
        clock.spend(seconds)
        return np.float32(0)

    zero = jax.pure_callback(
        tick, jax.ShapeDtypeStruct((), np.float32), value.ravel()[0], vmap_method="sequential"
    )
    return value + zero.astype(value.dtype)


@pytest.fixture
def x():
    return jnp.arange(1.0, 5.0)


def quick_tuner(**kwargs):
    return Tuner(warmup=0, iters=1, **kwargs)


def quick_selector(**kwargs):
    return ConfigSelectorChain(ConfigCache(), tuner=quick_tuner(), **kwargs)


# --- Tuner.measure -------------------------------------------------------------------------------


def test_measure_gives_the_seconds_of_one_call(clock, x):
    tuner = Tuner(timer=clock)
    assert tuner.measure(lambda x: spending(clock, 0.25, x), x) == pytest.approx(0.25)


def test_measure_runs_the_warmup_and_each_iteration(clock, x):
    Tuner(warmup=4, iters=7, timer=clock).measure(lambda x: spending(clock, 0.25, x), x)
    assert clock.runs == 4 + 7


def test_measure_gives_a_positive_float_with_the_real_clock(x):
    seconds = Tuner().measure(jnp.sin, x)
    assert isinstance(seconds, float)
    assert seconds > 0


def test_in_measure_only_arrays_are_dynamic(x):
    seen = []

    def function(tree, count, *, flag, name, factor, nothing, scale):
        seen.append((tree, count, flag, name, factor, nothing, scale))
        assert flag is True
        return sum(tree["a"] for _ in range(count)) * factor * scale

    Tuner().measure(
        function,
        {"a": x, "b": [np.ones(3), "text"]},
        3,
        flag=True,
        name="a",
        factor=2.5,
        nothing=None,
        scale=np.float32(2),
    )
    tree, *constants, scale = seen[0]
    assert isinstance(tree["a"], jax.core.Tracer)
    assert isinstance(tree["b"][0], jax.core.Tracer)
    assert isinstance(scale, jax.core.Tracer)
    assert tree["b"][1] == "text"
    assert constants == [3, True, "a", 2.5, None]
    assert [type(value) for value in constants] == [int, bool, str, float, type(None)]


def test_measure_passes_on_what_the_function_raises(x):
    def function(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Tuner().measure(function, x)


def mesh_of_eight():
    return jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def under_shard_map(function, x):
    spec = PartitionSpec("i")
    sharded = jax.shard_map(function, mesh=mesh_of_eight(), in_specs=spec, out_specs=spec)
    return sharded(jnp.tile(x, 8))[: x.size]


TRANSFORMS = {
    "eager": lambda function, x: function(x),
    "jit": lambda function, x: jax.jit(function)(x),
    "grad": lambda function, x: jax.grad(lambda x: function(x).sum())(x) * x,
    "jit grad": lambda function, x: jax.jit(jax.grad(lambda x: function(x).sum()))(x) * x,
    "vmap": lambda function, x: jax.vmap(function)(jnp.stack([x, x]))[1],
    "jit vmap": lambda function, x: jax.jit(jax.vmap(function))(jnp.stack([x, x]))[1],
    "scan": lambda function, x: jax.lax.scan(lambda c, y: (c, function(y)), 0, x[None])[1][0],
    "remat": lambda function, x: jax.jit(jax.checkpoint(function))(x),
    "cond": lambda function, x: jax.lax.cond(True, function, lambda x: x * 0, x),
    "shard_map": under_shard_map,
    "jit shard_map": lambda function, x: jax.jit(lambda x: under_shard_map(function, x))(x),
}


@pytest.fixture(params=list(TRANSFORMS))
def transform(request):
    return TRANSFORMS[request.param]


def test_measure_under_a_transform_times_execution_not_tracing(transform, clock, x):
    measured = []

    def function(x):
        before = clock.runs
        seconds = Tuner(timer=clock).measure(lambda x: spending(clock, 0.5, x), x)
        measured.append((seconds, clock.runs - before))
        return x * 2

    transform(function, x)
    assert measured
    for seconds, runs in measured:
        assert isinstance(seconds, float)
        assert seconds == pytest.approx(0.5)
        assert runs >= 4


def test_measure_replaces_tracers_by_arrays_of_the_same_shape_and_dtype():
    seen = []

    def inner(*arrays):
        seen.append([(array.shape, array.dtype) for array in arrays])
        return arrays[0]

    arrays = [
        jnp.ones((2, 3), jnp.bfloat16),
        jnp.ones((4,), jnp.int8),
        jnp.ones((), jnp.bool_),
        jnp.ones((2,), jnp.complex64),
        jax.random.split(jax.random.key(0), 3),
        jnp.ones((0, 2)),
    ]
    jax.jit(lambda *arrays: (Tuner().measure(inner, *arrays), arrays[0])[1])(*arrays)
    assert seen[0] == [(array.shape, array.dtype) for array in arrays]


def test_measure_replaces_tracers_by_arrays_of_the_same_sharding():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    seen = []

    def inner(x):
        seen.append(jax.typeof(x).sharding.spec)
        return x

    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("i"))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(16), sharding)
        jax.jit(lambda x: (Tuner().measure(inner, x), x)[1])(x)
    assert seen[0] == PartitionSpec("i")


def test_measure_takes_abstract_shapes():
    assert Tuner().measure(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32)) > 0


def test_measure_leaves_the_callers_arrays_alive_and_unchanged(x):
    before = x.tolist()
    Tuner().measure(lambda x: x * 0, x)
    assert x.tolist() == before


@pytest.mark.parametrize(
    "arguments",
    [{"warmup": -1}, {"iters": 0}, {"iters": -3}, {"iters": 1.5}, {"warmup": "2"}],
)
def test_a_tuner_with_a_wrong_argument_is_refused_by_name(arguments):
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        Tuner(**arguments)


# --- Tuner.autotune ------------------------------------------------------------------------------


def test_autotune_without_candidates_is_a_runtime_error(x):
    with pytest.raises(RuntimeError, match="no candidates"):
        Tuner().autotune(lambda cfg: jnp.sin, (x,), {}, [])


def test_autotune_when_all_fail_is_a_runtime_error_that_lists_each(x):
    def make(cfg):
        def function(x):
            raise ValueError(f"reason of {cfg}")

        return function

    with pytest.raises(RuntimeError) as caught:
        Tuner().autotune(make, (x,), {}, ["first", "second", "third"])
    for cfg in ("first", "second", "third"):
        assert f"ValueError: reason of {cfg}" in str(caught.value)


def test_autotune_counts_a_failure_to_make_the_function_as_a_failure(x):
    def make(cfg):
        if cfg == "bad":
            raise KeyError("cannot make it")
        return jnp.sin

    assert Tuner().autotune(make, (x,), {}, ["bad", "good"]) == "good"


@pytest.mark.parametrize("fastest", range(5))
def test_autotune_picks_the_fastest(clock, x, fastest):
    costs = [0.10, 0.12, 0.11, 0.13, 0.14]
    costs[fastest] = 0.05

    def make(cfg):
        return lambda x: spending(clock, costs[cfg], x)

    assert Tuner(timer=clock).autotune(make, (x,), {}, range(5)) == fastest


def test_autotune_passes_keywords_and_constants(clock, x):
    def make(cfg):
        def function(x, count, *, flag):
            assert flag == "yes"
            return spending(clock, cfg * count, x)

        return function

    tuner = Tuner(timer=clock)
    assert tuner.autotune(make, (x, 2), {"flag": "yes"}, iter([0.3, 0.1, 0.2])) == 0.1


def test_autotune_skips_a_candidate_that_fails_while_running(clock, x):
    def make(cfg):
        def explode(_):
            raise ValueError("while running")

        def function(x):
            if cfg == "bad":
                kind = jax.ShapeDtypeStruct((), np.float32)
                return x + jax.pure_callback(explode, kind, x[0])
            return spending(clock, 0.5, x)

        return function

    assert Tuner(timer=clock).autotune(make, (x,), {}, ["bad", "good"]) == "good"


# --- right before fast ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str = "right"


def double(x, kind):
    if kind == "zeros":
        return x * 0
    if kind == "nan":
        return x * jnp.nan
    if kind == "one nan":
        return (x * 2).at[0].set(jnp.nan)
    if kind == "infinite":
        return (x * 2).at[-1].set(jnp.inf)
    if kind == "shape":
        return (x * 2)[..., :-1]
    if kind == "dtype":
        return (x * 2).astype(jnp.bfloat16)
    if kind == "structure":
        return (x * 2, x)
    if kind == "slightly off":
        return x * 2.05
    if kind == "one value off":
        return (x * 2).at[0].add(1.0)
    if kind == "raises":
        raise ValueError("this candidate raises")
    return x * 2


REASONS = {
    "zeros": "error",
    "nan": "NaN",
    "one nan": "NaN",
    "infinite": "infinite",
    "shape": "shape",
    "dtype": "dtype",
    "structure": "structure",
    "slightly off": "error",
    "one value off": "error",
    "raises": "this candidate raises",
}


class Double(Kernel[Kind, jax.Array]):
    """Doubles its argument, in ways most of which are wrong."""

    kinds = ("right", *REASONS)

    def __init__(self, kinds=None, heuristic="right"):
        super().__init__(name="double")
        self.kinds = kinds or self.kinds
        self.heuristic_kind = heuristic

    def run(self, x, *, cfg):
        return double(x, cfg.name)

    def heuristic_cfg(self, inv):
        return Kind(self.heuristic_kind)

    def candidate_cfgs(self, inv):
        return [Kind(name) for name in self.kinds]


class DoubleWithReference(Double):
    def reference(self, x):
        return x * 2


def tune(kernel, *args, tuner=None, backward=False, **kwargs):
    inv = kernel.bind(*args)
    inv = inv.differentiate() if backward else inv
    return tune_invocation(tuner or quick_tuner(), inv, kernel, **kwargs)


def trial_of(outcome, name):
    (trial,) = [trial for trial in outcome.trials if trial.cfg == Kind(name)]
    return trial


@pytest.mark.parametrize("kernel_class", [Double, DoubleWithReference])
@pytest.mark.parametrize("wrong", list(REASONS))
def test_a_wrong_candidate_is_never_chosen_and_the_reason_is_kept(kernel_class, wrong, x):
    outcome = tune(kernel_class(kinds=(wrong, "right")), x)
    assert outcome.best == Kind("right")
    trial = trial_of(outcome, wrong)
    assert trial.verdict.value == ("failed" if wrong == "raises" else "wrong")
    assert REASONS[wrong] in trial.reason
    assert trial.seconds is None
    assert trial_of(outcome, "right").seconds > 0


def test_a_wrong_candidate_is_not_chosen_even_when_it_is_far_faster(clock, x):
    class Costly(Double):
        def run(self, x, *, cfg):
            return spending(clock, 1.0 if cfg.name == "right" else 0.01, double(x, cfg.name))

    outcome = tune(Costly(kinds=("zeros", "nan", "right")), x, tuner=quick_tuner(timer=clock))
    assert outcome.best == Kind("right")


def test_another_order_of_summation_is_not_wrong():
    class Sum(Double):
        def run(self, x, *, cfg):
            if cfg.name == "right":
                return x.sum(0)
            return jnp.stack(jnp.split(x, 8)).sum(0).sum(0)

    outcome = tune(Sum(kinds=("right", "split")), jnp.ones((64, 8)))
    assert [trial.verdict.value for trial in outcome.trials] == ["measured", "measured"]


def test_the_reference_decides_also_against_the_heuristic(x):
    kernel = DoubleWithReference(kinds=("zeros", "right", "nan"), heuristic="zeros")
    outcome = tune(kernel, x)
    assert outcome.best == Kind("right")
    assert trial_of(outcome, "zeros").verdict.value == "wrong"


def test_when_every_candidate_is_wrong_tuning_fails_with_every_reason(x):
    kernel = DoubleWithReference(kinds=("zeros", "shape", "raises"), heuristic="zeros")
    with pytest.raises(RuntimeError) as caught:
        tune(kernel, x)
    for name in ("zeros", "shape", "raises"):
        assert REASONS[name] in str(caught.value)


def test_make_inputs_gives_the_inputs_to_measure_with(x):
    class Picky(Double):
        asked = ()

        def make_inputs(self, inv, key):
            self.asked = (inv.args[0].shape, jax.random.uniform(key).shape)
            return (jnp.full(inv.args[0].shape, 7.0),), {}

        def run(self, x, *, cfg):
            # With anything but sevens this candidate would be wrong.
            return x * 2 if cfg.name == "right" else jnp.where(x == 7, x * 2, 0)

    kernel = Picky(kinds=("right", "only sevens"))
    outcome = tune(kernel, x)
    assert trial_of(outcome, "only sevens").verdict.value == "measured"
    assert kernel.asked == ((4,), ())


def test_tuning_uses_fresh_inputs_and_not_the_callers_zeros():
    outcome = tune(Double(kinds=("zeros", "right")), jnp.zeros(4))
    assert outcome.best == Kind("right")
    assert trial_of(outcome, "zeros").verdict.value == "wrong"


def test_the_outcome_holds_every_candidate_and_can_be_said_in_words(x):
    outcome = tune(Double(), x)
    assert {trial.cfg.name for trial in outcome.trials} == {"right", *REASONS}
    assert f"1 of {len(REASONS) + 1}" in outcome.summary()
    assert json.loads(json.dumps(outcome.about()))["measured"] == "forward"


# --- the backward pass ---------------------------------------------------------------------------


class OwnGradient(Kernel[Kind, jax.Array]):
    """Doubles; forward and backward spend what a table says, the gradient may be wrong."""

    costs = {}  # noqa: RUF012  set per test

    def __init__(self, clock, costs):
        super().__init__(name="own_gradient")
        self.clock, self.costs = clock, costs
        self.backward = type(clock)()

    def run(self, x, *, cfg):
        return spending(self.clock, self.costs[cfg.name][0], x * 2)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        factor = 3 if cfg.name == "wrong gradient" else 2
        gradient = spending(self.backward, 0.0, cotangents[0] * factor)
        return (spending(self.clock, self.costs[cfg.name][1], gradient),)

    def heuristic_cfg(self, inv):
        return Kind(next(iter(self.costs)))

    def candidate_cfgs(self, inv):
        return [Kind(name) for name in self.costs]


FAST_FORWARD_OR_FAST_BOTH = {
    "heuristic": (0.5, 0.5),
    "fast forward": (0.1, 0.9),
    "fast both": (0.3, 0.3),
}


def test_without_validate_backward_only_the_forward_pass_runs(clock, x):
    kernel = OwnGradient(clock, FAST_FORWARD_OR_FAST_BOTH)
    outcome = tune(kernel, x, tuner=Tuner(timer=clock))
    assert outcome.best == Kind("fast forward")
    assert outcome.measured == "forward"
    assert kernel.backward.runs == 0


def test_validate_backward_times_forward_plus_backward(clock, x):
    kernel = OwnGradient(clock, FAST_FORWARD_OR_FAST_BOTH)
    outcome = tune(kernel, x, tuner=Tuner(timer=clock), backward=True)
    assert outcome.best == Kind("fast both")
    assert outcome.seconds(Kind("fast both")) == pytest.approx(0.6)
    assert "backward" in outcome.measured
    assert kernel.backward.runs >= 3 * 3  # each candidate, each iteration


def test_the_policy_reaches_the_tuner(clock, x):
    kernel = OwnGradient(clock, FAST_FORWARD_OR_FAST_BOTH)
    policy = AutotunePolicy(validate_backward=True)
    selector = ConfigSelectorChain(ConfigCache(), policy, Tuner(timer=clock))
    assert selector.choose(kernel.bind(x), kernel) == Kind("fast both")
    assert kernel.backward.runs > 0


def test_a_candidate_with_wrong_gradients_is_refused(clock, x):
    kernel = OwnGradient(clock, {"right": (0.5, 0.5), "wrong gradient": (0.1, 0.1)})
    outcome = tune(kernel, x, tuner=quick_tuner(timer=clock), backward=True)
    assert outcome.best == Kind("right")
    assert trial_of(outcome, "wrong gradient").verdict.value == "wrong"


def test_gradients_made_by_jax_are_compared_too(x):
    class Stopped(Double):
        def run(self, x, *, cfg):
            return (x if cfg.name == "right" else jax.lax.stop_gradient(x)) * 2

    outcome = tune(Stopped(kinds=("right", "stopped")), x, backward=True)
    assert outcome.best == Kind("right")
    assert trial_of(outcome, "stopped").verdict.value == "wrong"
    assert trial_of(tune(Stopped(kinds=("right", "stopped")), x), "stopped").seconds > 0


class NotDifferentiable(Double):
    def run(self, x, *, cfg):
        count = jnp.argmax(x)  # a bound that is not known: no reverse mode
        _, same = jax.lax.while_loop(
            lambda state: state[0] < count, lambda state: (state[0] + 1, state[1] * 1.0), (0, x)
        )
        return same * 2


def test_a_kernel_that_cannot_be_differentiated_is_timed_forward_only_and_says_so(x):
    outcome = tune(NotDifferentiable(kinds=("right", "also right")), x, backward=True)
    assert outcome.measured == "forward"
    assert any("forward only" in note for note in outcome.notes)
    assert "forward only" in outcome.summary()
    assert all(trial.verdict.value in ("measured", "duplicate") for trial in outcome.trials)


def test_a_kernel_that_cannot_be_differentiated_is_served_under_validate_backward(x):
    kernel = NotDifferentiable(kinds=("right",))
    executor = Executor(quick_selector(policy=AutotunePolicy(validate_backward=True)))
    assert executor(kernel, x).tolist() == (x * 2).tolist()


def test_integer_arguments_do_not_prevent_the_backward_pass(x):
    class Gather(Double):
        def run(self, x, indices, *, cfg):
            gradient_free = jax.lax.stop_gradient(x) if cfg.name == "stopped" else x
            return gradient_free[indices] * 2

    outcome = tune(Gather(kinds=("right", "stopped")), x, jnp.array([0, 2]), backward=True)
    assert "backward" in outcome.measured
    assert trial_of(outcome, "stopped").verdict.value == "wrong"


def test_a_heuristic_that_cannot_run_does_not_switch_the_backward_check_off(x):
    class Stopped(DoubleWithReference):
        def run(self, x, *, cfg):
            if cfg.name == "stopped":
                return jax.lax.stop_gradient(x) * 2
            return double(x, cfg.name)

    kernel = Stopped(kinds=("stopped", "right"), heuristic="raises")
    outcome = tune(kernel, x, backward=True)
    assert outcome.best == Kind("right")
    assert trial_of(outcome, "stopped").verdict.value == "wrong"
    assert "backward" in outcome.measured


# --- tuning inside transforms --------------------------------------------------------------------


def test_tuning_under_a_transform_picks_the_one_right_candidate(transform, x):
    kernel = DoubleWithReference(
        kinds=("zeros", "nan", "shape", "right", "dtype", "raises"), heuristic="slightly off"
    )
    executor = Executor(quick_selector())
    out = transform(lambda x: executor(kernel, x), x)
    np.testing.assert_allclose(out, x * 2)
    configs = {cfg for _, cfg in executor.selector.cache.items()}
    assert configs == {Kind("right")}


def test_tuning_under_jit_compares_times_of_execution(clock, x):
    costs = {"heuristic": 0.5, "slow": 0.9, "fast": 0.1}

    class Costly(Double):
        def run(self, x, *, cfg):
            return spending(clock, costs[cfg.name], x * 2)

    kernel = Costly(kinds=tuple(costs), heuristic="heuristic")
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(timer=clock))
    executor = Executor(selector)
    jax.jit(lambda x: executor(kernel, x))(x)
    assert selector.choose(kernel.bind(x), kernel) == Kind("fast")


class OwnTuner(Tuner):
    """Runs every candidate for real and takes the one with the largest output."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def autotune(self, make_fn, args, kwargs, candidates):
        self.calls += 1
        return max(candidates, key=lambda cfg: float(make_fn(cfg)(*args, **kwargs).sum()))


class Larger(Double):
    def run(self, x, *, cfg):
        return jnp.ones_like(x) * len(cfg.name)


@pytest.mark.parametrize("how", ["choose", "eager", "jit", "grad", "vmap"])
def test_a_tuner_of_ones_own_is_used_and_may_run_the_candidates(how, x):
    kernel = Larger(kinds=("a", "aaaa", "aa"), heuristic="aaa")
    tuner = OwnTuner()
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=tuner))
    if how == "choose":
        assert executor.choose_config(kernel, x) == Kind("aaaa")
    elif how == "eager":
        assert executor(kernel, x)[0] == 4
    elif how == "jit":
        assert jax.jit(lambda x: executor(kernel, x))(x)[0] == 4
    elif how == "grad":
        assert jax.grad(lambda x: (executor(kernel, x) * x).sum())(x)[0] == 4
    else:
        assert jax.vmap(lambda x: executor(kernel, x))(x[None])[0, 0] == 4
    assert tuner.calls == (2 if how == "grad" else 1)  # JAX traces it forward first


def test_a_tuner_of_ones_own_that_returns_no_config_is_told_so(x):
    class Confused(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            return 42

    selector = ConfigSelectorChain(ConfigCache(), tuner=Confused())
    kernel = Double()
    with pytest.raises(TypeError, match="42"):
        selector.choose(kernel.bind(x), kernel)


# --- autotune(kernel, ...) -----------------------------------------------------------------------


def test_autotune_of_a_kernel_gives_its_best_config(x):
    kernel = DoubleWithReference(kinds=("zeros", "right", "nan"), heuristic="zeros")
    assert autotune(kernel, x, num_warmup=0, num_iters=1) == Kind("right")


def test_autotune_of_a_kernel_takes_keywords_and_shapes():
    class Scaled(Double):
        def run(self, x, *, cfg, factor):
            return x * factor if cfg.name == "right" else x

    kernel = Scaled(kinds=("wrong",))
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert autotune(kernel, shape, factor=3, num_warmup=0, num_iters=1) == Kind("right")


def test_autotune_tries_the_given_configs_only_beside_the_heuristic(x):
    tried = set()

    class Watched(Double):
        def run(self, x, *, cfg):
            tried.add(cfg.name)
            return x * 2

    kernel = Watched(kinds=("listed",), heuristic="heuristic")
    configs = (Kind(name) for name in ("a", "b"))
    best = autotune(kernel, x, configs=configs, num_warmup=0, num_iters=1)
    assert best.name in ("a", "b", "heuristic")
    assert {"a", "b"} <= tried <= {"a", "b", "heuristic"}


def test_autotune_refuses_a_given_config_that_is_wrong(x):
    kernel = Double(kinds=("right",))
    best = None
    with contextlib.suppress(RuntimeError):
        best = autotune(kernel, x, configs=[Kind("zeros")], num_warmup=0, num_iters=1)
    assert best != Kind("zeros")


def test_autotune_with_empty_configs_is_a_runtime_error(x):
    with pytest.raises(RuntimeError, match="configs"):
        autotune(Double(), x, configs=[])


def test_autotune_with_a_config_of_another_class_is_a_type_error(x):
    with pytest.raises(TypeError, match="Kind"):
        autotune(Double(), x, configs=["right"])


def test_autotune_of_something_else_is_a_type_error(x):
    with pytest.raises(TypeError, match="kernel or a function"):
        autotune("sin", x)


def test_autotune_of_a_function_tunes_every_kernel_in_it(x):
    double = Double(kinds=("right",))
    result = autotune(lambda x: double(x).sum(), x)
    assert [entry.op_id for entry in result] == [double.full_op_id]
    with result:
        assert double(x).shape == x.shape


@pytest.mark.parametrize("arguments", [{"num_warmup": -1}, {"num_iters": 0}, {"num_iters": 2.5}])
def test_autotune_with_a_wrong_count_is_refused(x, arguments):
    with pytest.raises((ValueError, TypeError)):
        autotune(Double(), x, **arguments)


def test_autotune_writes_nothing(x, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "store"))
    autotune(Double(kinds=("right",)), x, num_warmup=0, num_iters=1)
    assert not (tmp_path / "store" / "configs").exists()
    assert len(default_executor().selector.cache) == 0


# --- benchmark -----------------------------------------------------------------------------------


def test_benchmark_gives_milliseconds_per_call():
    # A sleep is never shorter than asked: seconds would be 0.005, microseconds 5000.
    milliseconds = benchmark(lambda: time.sleep(0.005), num_iters=3)
    assert isinstance(milliseconds, float)
    assert 5 <= milliseconds < 1000


def test_benchmark_calls_the_function_with_its_arguments_that_many_times(x):
    calls = []

    def function(x, factor, *, shift):
        calls.append((factor, shift))
        return x * factor + shift

    assert benchmark(function, x, 2, shift=1, num_iters=7, num_warmup=2) > 0
    assert calls == [(2, 1)] * 9


def test_benchmark_of_a_kernel_in_both_forms(x):
    kernel = Double()
    assert benchmark(lambda: kernel(x), num_iters=3) > 0
    assert benchmark(kernel, x, num_iters=3) > 0


def test_benchmark_passes_on_what_the_function_raises():
    def function():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        benchmark(function)


@pytest.mark.parametrize("count", [0, -1, 1.5, "10", None])
def test_benchmark_with_a_wrong_count_is_refused_by_name(count):
    with pytest.raises((ValueError, TypeError), match="num_iters"):
        benchmark(lambda: None, num_iters=count)


def test_benchmark_of_something_that_is_not_callable_is_a_type_error():
    with pytest.raises(TypeError):
        benchmark("not a function")


# --- what was called -----------------------------------------------------------------------------


def leaves_of(inv):
    return jax.tree.leaves((inv.args, dict(inv.kwargs), dict(inv.metadata), inv.override_cfg))


def test_record_invocation_is_listed_by_get_invocations(x):
    kernel = Double()
    record_invocation(kernel, kernel.bind(x))
    (inv,) = get_invocations()
    assert inv.op_id == "double"
    assert inv.kernel is kernel
    assert inv.key == kernel.bind(x).key


def test_get_invocations_of_a_device_gives_that_devices_only(x):
    kernel = Double()
    record_invocation(kernel, kernel.bind(x))
    other = Invocation(kernel=kernel, args=(x,), metadata={"device": "gpu|imaginary"})
    record_invocation(kernel, other)
    assert len(get_invocations()) == 2
    (here,) = get_invocations(device_fingerprint())
    (there,) = get_invocations("gpu|imaginary")
    assert here.device_fingerprint == device_fingerprint()
    assert there.device_fingerprint == "gpu|imaginary"
    assert get_invocations("tpu|none") == []


@pytest.mark.parametrize("call", ["eager", "jit", "lower", "grad", "vmap"])
@pytest.mark.parametrize("mode", [None, "1"])
def test_a_call_is_recorded(monkeypatch, x, call, mode):
    if mode is not None:
        monkeypatch.setenv("EJKERNEL_OPS_RECORD", mode)
    kernel = Double()
    if call == "eager":
        kernel(x)
    elif call == "jit":
        jax.jit(lambda x: kernel(x))(x)
    elif call == "lower":
        jax.jit(lambda x: kernel(x)).lower(x)
    elif call == "grad":
        jax.grad(lambda x: kernel(x).sum())(x)
    else:
        jax.vmap(kernel)(x[None])
    (inv,) = get_invocations()
    asked = kernel.bind(x)
    assert inv.key == (asked.differentiate() if call == "grad" else asked).key


def test_with_record_0_nothing_is_recorded(monkeypatch, x):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "0")
    kernel = Double()
    kernel(x)
    assert get_invocations() == []


def test_with_another_value_the_variable_is_named_in_the_error(monkeypatch, x):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "sometimes")
    with pytest.raises(ValueError, match=r"EJKERNEL_OPS_RECORD.*sometimes"):
        Double()(x)


def test_equal_calls_are_one_record(x):
    kernel = Double()
    for _ in range(3):
        record_invocation(kernel, kernel.bind(x))
        kernel(x + 1)
    assert len(get_invocations()) == 1


def test_records_are_listed_oldest_first():
    kernel = Double()
    for size in (3, 1, 2):
        record_invocation(kernel, kernel.bind(jnp.ones(size)))
    assert [inv.args[0].shape for inv in get_invocations()] == [(3,), (1,), (2,)]


class Masked(Double):
    def run(self, x, *, cfg, mask, tree, flag=True):
        return x * 2 * mask * tree["a"]


def test_records_hold_shapes_and_never_arrays_or_tracers(x):
    kernel = Masked()
    kernel(x, mask=jnp.ones(4), tree={"a": jnp.ones(4)}, flag=False)
    jax.jit(lambda x: kernel(x, mask=x, tree={"a": x}))(x)
    record_invocation(kernel, kernel.bind(x, mask=x, tree={"a": np.ones(4)}, cfg=Kind("right")))
    invocations = get_invocations()
    assert invocations
    for inv in invocations:
        leaves = leaves_of(inv)
        assert sum(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves) == 3
        assert not any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)


def test_records_hold_no_arrays_in_their_metadata_either(x):
    kernel = Double()
    inv = Invocation(kernel=kernel, args=(x,), metadata={"example": x, "note": "mine"})
    record_invocation(kernel, inv)
    (recorded,) = get_invocations()
    assert not any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves_of(recorded))


def test_a_recorded_array_can_be_collected():
    kernel = Double()
    x = jnp.ones(4)
    kernel(x)
    record_invocation(kernel, kernel.bind(x))
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    assert get_invocations()


def test_recording_leaks_no_tracer(x):
    kernel = Double()
    with jax.checking_leaks():
        jax.jit(lambda x: kernel(x) + 1)(x)
    assert get_invocations()


def test_the_memory_of_records_is_bounded_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(registry, "LIMIT", 3)
    kernel = Double()
    for size in range(1, 6):
        kernel(jnp.ones(size))
    assert [inv.args[0].shape for inv in get_invocations()] == [(3,), (4,), (5,)]


def test_with_record_1_every_call_is_kept(monkeypatch):
    monkeypatch.setattr(registry, "LIMIT", 3)
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    kernel = Double()
    for size in range(1, 6):
        kernel(jnp.ones(size))
    assert len(get_invocations()) == 5


def test_many_threads_record_at_once():
    kernel = Double()

    def work(number):
        for size in range(20):
            record_invocation(kernel, kernel.bind(jax.ShapeDtypeStruct((number, size), "float32")))
            get_invocations()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(get_invocations()) == 80


# --- autotune_recorded ---------------------------------------------------------------------------


def one_right_kernel():
    """Only tuning finds the right config: the heuristic one is wrong."""
    return DoubleWithReference(kinds=("zeros", "right"), heuristic="zeros")


def test_autotune_recorded_tunes_given_invocations(x):
    kernel = one_right_kernel()
    kernel(x)
    result = autotune_recorded(get_invocations())
    assert result.device == device_fingerprint()
    key = kernel.bind(x).key
    assert list(result.entries) == [Entry(key.op_id, key.call_key, Kind("right"))]


def test_autotune_recorded_with_a_selector_tunes_all_and_keeps_them(x, tmp_path):
    kernel = one_right_kernel()
    kernel(x)
    kernel(x[:2])
    selector = quick_selector(persistent=tmp_path / "store")
    result = autotune_recorded(selector)
    assert {entry.cfg for entry in result.entries} == {Kind("right")}
    for shape in (x, x[:2]):
        assert selector.cache.get(kernel.bind(shape).key) == Kind("right")
        assert PersistentCache(tmp_path / "store").get(kernel.bind(shape).key) == Kind("right")


def test_autotune_recorded_tunes_also_for_a_selector_that_does_not_tune_by_itself(x):
    kernel = one_right_kernel()
    kernel(x)
    selector = ConfigSelectorChain(ConfigCache(), autotune=False)
    with policy_override(autotune=False):
        assert [entry.cfg for entry in autotune_recorded(selector)] == [Kind("right")]


def test_autotune_recorded_tunes_each_distinct_call_once(x):
    calls = []

    class Counting(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            calls.append(args[0].shape)
            return Kind("right")

    kernel = Double()
    invocations = [kernel.bind(x), kernel.bind(x + 1), kernel.bind(x[:2])]
    selector = ConfigSelectorChain(ConfigCache(), tuner=Counting())
    result = autotune_recorded(invocations, selector)
    assert calls == [(4,), (2,)]
    assert len(result) == 2


def test_the_tuned_configs_of_a_recorded_function_run_inside_the_result(x):
    kernel = one_right_kernel()
    function = jax.jit(lambda x: kernel(x) + 1)
    assert function(x).tolist() == [1.0] * 4
    result = autotune_recorded(get_invocations())
    with result:
        assert function(x).tolist() == (x * 2 + 1).tolist()
    assert function(x).tolist() == [1.0] * 4


def test_autotune_recorded_with_nothing_recorded_gives_an_empty_result():
    clear_invocations()
    assert len(autotune_recorded(quick_selector())) == 0
    assert len(autotune_recorded([])) == 0


class BrokenInputs(Double):
    def make_inputs(self, inv, key):
        raise ValueError("no inputs today")


class AllFail(Double):
    kinds = ("raises",)

    def __init__(self):
        super().__init__(heuristic="raises")


@pytest.mark.parametrize(
    ("broken", "reason"), [(AllFail, "this candidate raises"), (BrokenInputs, "no inputs today")]
)
def test_what_cannot_be_tuned_is_reported_and_not_fatal(x, broken, reason):
    good, bad = one_right_kernel(), broken()
    result = autotune_recorded([bad.bind(x[:3]), good.bind(x)], quick_selector())
    assert [entry.cfg for entry in result.entries] == [Kind("right")]
    (skipped,) = result.skipped
    assert reason in skipped.reason
    assert bad.bind(x[:3]).call_key in skipped.label


def test_an_invocation_without_a_kernel_is_reported(x):
    result = autotune_recorded([Invocation(op_id="unknown", args=(x,))], quick_selector())
    assert len(result) == 0
    (skipped,) = result.skipped
    assert "unknown@v1" in skipped.label


def test_autotune_recorded_of_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="Invocation"):
        autotune_recorded([42])


# --- AutotuningResult ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Factor:
    value: float = 1.0
    inner: Kind | None = None


class Scale(Kernel[Factor, jax.Array]):
    """The output says which config ran."""

    def run(self, x, *, cfg):
        return x * cfg.value


@pytest.fixture
def scale():
    return Scale()


def result_for(kernel, x, factor, device=None):
    key = kernel.bind(x).key
    return AutotuningResult(device or key.device, [Entry(key.op_id, key.call_key, Factor(factor))])


def first(array):
    return float(array[0])


def test_a_result_is_in_force_inside_its_block_only(scale, x):
    function = jax.jit(lambda x: scale(x))
    assert first(function(x)) == 1
    with result_for(scale, x, 3.0) as entered:
        assert isinstance(entered, AutotuningResult)
        assert first(function(x)) == 3
        assert first(scale(x)) == 3
    assert first(function(x)) == 1
    assert first(scale(x)) == 1


def test_a_result_touches_the_calls_it_names_and_no_other(scale, x):
    with result_for(scale, x, 3.0):
        assert first(scale(x[:2])) == 1


def test_a_result_may_be_entered_again_while_active(scale, x):
    outer, inner = result_for(scale, x, 2.0), result_for(scale, x, 3.0)
    with outer:
        with inner:
            with outer:
                assert first(scale(x)) == 2
            assert first(scale(x)) == 3
        assert first(scale(x)) == 2
        with outer:
            assert first(scale(x)) == 2
        assert first(scale(x)) == 2
    assert first(scale(x)) == 1
    with outer:
        assert first(scale(x)) == 2


def test_a_result_is_undone_after_an_exception(scale, x):
    def broken():
        with result_for(scale, x, 2.0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert first(scale(x)) == 1


def test_one_result_can_be_used_by_several_threads_at_once(scale, x):
    result = result_for(scale, x, 2.0)
    barrier = threading.Barrier(6)

    def work(number):
        barrier.wait(60)
        if number % 3 == 0:
            barrier.wait(60)
            seen = first(scale(x))
            barrier.wait(60)
            return seen
        with result:
            barrier.wait(60)
            seen = first(scale(x))
            if number % 3 == 1:
                with result:
                    assert first(scale(x)) == 2
            barrier.wait(60)
            assert first(scale(x)) == 2
        assert first(scale(x)) == 1
        return seen

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [1, 2, 2, 1, 2, 2]


def test_leaving_a_result_that_was_not_entered_is_an_error(scale, x):
    with pytest.raises(RuntimeError):
        result_for(scale, x, 2.0).__exit__(None, None, None)
    assert first(scale(x)) == 1


def test_a_result_of_another_device_changes_nothing_here(scale, x):
    with result_for(scale, x, 2.0, device="gpu|imaginary"):
        assert first(scale(x)) == 1


def test_a_result_is_written_and_read_with_its_config_classes(scale, x):
    key = scale.bind(x).key
    config = Factor(2.0, inner=Kind("right"))
    result = AutotuningResult(key.device, [Entry(key.op_id, key.call_key, config)])
    read = AutotuningResult.loads(result.dumps())
    assert read == result
    assert read.device == result.device
    assert list(read.entries) == list(result.entries)
    assert type(read.entries[0].cfg.inner) is Kind
    with read:
        assert first(scale(x)) == 2


def test_the_text_of_a_result_is_json_and_the_same_every_time(scale, x):
    result = result_for(scale, x, 2.0)
    assert json.loads(result.dumps())
    assert result.dumps() == result_for(scale, x, 2.0).dumps()


def test_an_empty_result_is_written_and_read():
    assert AutotuningResult.loads(AutotuningResult("cpu|a", []).dumps()).device == "cpu|a"


def changed(**changes):
    return {"ejkernel_result": 1, "device": "cpu|a", "entries": [], **changes}


def entry_plain(**changes):
    plain = {
        "op_id": "scale@v1",
        "call_key": "0" * 16,
        "config": {"value": 2.0},
        "config_type": f"{__name__}:Factor",
    }
    return changed(entries=[{**plain, **changes}])


BAD_TEXTS = {
    "not json": "hello",
    "nothing": "",
    "cut short": '{"ejkernel_result": 1, "device": "cp',
    "null": "null",
    "number": "7",
    "list": "[]",
    "empty object": "{}",
    "no device": json.dumps({"ejkernel_result": 1, "entries": []}),
    "no entries": json.dumps({"ejkernel_result": 1, "device": "cpu|a"}),
    "newer": json.dumps(changed(ejkernel_result=99)),
    "schema is text": json.dumps(changed(ejkernel_result="1")),
    "device is null": json.dumps(changed(device=None)),
    "device is a number": json.dumps(changed(device=7)),
    "entries is null": json.dumps(changed(entries=None)),
    "entries is a number": json.dumps(changed(entries=7)),
    "entries is text": json.dumps(changed(entries="abc")),
    "entries is an object": json.dumps(changed(entries={"a": 1})),
    "entry is null": json.dumps(changed(entries=[None])),
    "entry is empty": json.dumps(changed(entries=[{}])),
    "operation is a number": json.dumps(entry_plain(op_id=7)),
    "operation is a list": json.dumps(entry_plain(op_id=["scale@v1"])),
    "call key is null": json.dumps(entry_plain(call_key=None)),
    "type name is a number": json.dumps(entry_plain(op_id="other@v1", config_type=7)),
    "config is of another class": json.dumps(entry_plain(config={"colour": "red"})),
    "config has a wrong type": json.dumps(entry_plain(config={"value": "much"})),
    "class is not loaded": json.dumps(entry_plain(op_id="b@v1", config_type="not_there:Config")),
}


@pytest.mark.parametrize("name", list(BAD_TEXTS))
def test_a_text_that_is_no_result_is_refused_with_a_message_that_says_where(scale, name):
    with pytest.raises((ValueError, TypeError)) as caught:
        AutotuningResult.loads(BAD_TEXTS[name])
    assert "AutotuningResult.loads" in str(caught.value)


def test_the_well_formed_neighbour_of_the_bad_texts_is_read(scale):
    (entry,) = AutotuningResult.loads(json.dumps(entry_plain())).entries
    assert entry == Entry("scale@v1", "0" * 16, Factor(2.0))


def test_reading_a_result_never_imports_a_module(tmp_path, monkeypatch):
    (tmp_path / "ejkernel_result_trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = json.dumps(entry_plain(op_id="trap@v1", config_type="ejkernel_result_trap:Trap"))
    with pytest.raises(ValueError, match="ejkernel_result_trap"):
        AutotuningResult.loads(text)
    assert "ejkernel_result_trap" not in sys.modules


def test_results_are_merged_and_the_right_one_wins():
    same, mine, other = "0" * 16, "1" * 16, "2" * 16
    left = AutotuningResult(
        "cpu|a", [Entry("op@v1", same, Factor(1.0)), Entry("op@v1", mine, Factor(2.0))]
    )
    right = AutotuningResult(
        "cpu|a", [Entry("op@v1", same, Factor(3.0)), Entry("op@v2", other, Factor(4.0))]
    )
    merged = left | right
    assert {(e.op_id, e.call_key): e.cfg.value for e in merged.entries} == {
        ("op@v1", same): 3.0,
        ("op@v1", mine): 2.0,
        ("op@v2", other): 4.0,
    }
    assert len(left.entries) == len(right.entries) == 2
    assert left.entries[0].cfg == Factor(1.0)


def test_merging_results_of_different_devices_is_refused_with_both_names():
    with pytest.raises(ValueError, match=r"cpu\|a.*gpu\|b"):
        AutotuningResult("cpu|a", []) | AutotuningResult("gpu|b", [])


def test_merging_with_something_else_is_a_type_error():
    with pytest.raises(TypeError):
        AutotuningResult("cpu|a", []) | {}


def test_a_merged_result_is_in_force_as_one(scale, x):
    with result_for(scale, x, 2.0) | result_for(scale, x[:2], 3.0):
        assert first(scale(x)) == 2
        assert first(scale(x[:2])) == 3


@pytest.mark.parametrize("entries", [[("op@v1", "0" * 16, Factor())], [None], ["op@v1"]])
def test_entries_that_are_no_entries_are_a_type_error(entries):
    with pytest.raises(TypeError, match="Entry"):
        AutotuningResult("cpu|a", entries)


def test_results_with_the_same_entries_are_equal_whatever_their_order():
    a, b = Entry("op@v1", "0" * 16, Factor(1.0)), Entry("op@v1", "1" * 16, Factor(2.0))
    assert AutotuningResult("cpu|a", [a, b]) == AutotuningResult("cpu|a", [b, a])
    assert AutotuningResult("cpu|a", [a]) != AutotuningResult("cpu|a", [b])
    assert AutotuningResult("cpu|a", [a]) != AutotuningResult("cpu|b", [a])


def test_install_puts_the_configs_in_force_for_good_in_the_default_executor(scale, x):
    function = jax.jit(lambda x: scale(x))
    assert first(function(x)) == 1
    result_for(scale, x, 2.0).install()
    assert first(function(x)) == 2
    assert first(scale(x)) == 2


def test_install_into_a_selector_reaches_that_selector_only(scale, x):
    selector = ConfigSelectorChain(ConfigCache(), autotune=False)
    executor = Executor(selector)
    assert first(executor(scale, x)) == 1
    result_for(scale, x, 2.0).install(selector)
    assert first(executor(scale, x)) == 2
    assert first(scale(x)) == 1


def test_a_result_as_text_for_people_names_operations_and_what_was_not_tuned(x):
    kernel = one_right_kernel()
    result = autotune_recorded([kernel.bind(x), AllFail().bind(x[:3])], quick_selector())
    assert "double@v1" in str(result)
    assert "not tuned" in str(result)
    assert device_fingerprint() in str(result)
