"""The tuner as a whole: hostile candidates, duplicates, budgets, resuming, large spaces."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Space,
    Tuner,
    autotune,
)
from ejkernel.ops.config.outcome import TuningFailed, TuningInterrupted, Verdict
from ejkernel.ops.config.selection import Sources
from ejkernel.ops.tuner.session import tune_invocation
from ejkernel.ops.utils.locations import without_locations

X = jnp.linspace(1.0, 2.0, 64)


@dataclasses.dataclass(frozen=True)
class How:
    kind: str = "right"
    step: int = 1


class Sum(Kernel[How, jax.Array]):
    """Adds one to x, rightly or in one of many wrong ways."""

    kinds: tuple[str, ...] = ("right",)

    def __init__(self, *kinds: str) -> None:
        super().__init__(name="sum")
        self.kinds = kinds

    def run(self, x, *, cfg):
        if cfg.kind == "raises":
            raise ValueError("no such block")
        if cfg.kind == "terabyte":
            wide = jnp.ones(2**19) * x[0]
            return x + 1 + 0 * (jnp.outer(wide, wide) @ wide)[0]
        results = {
            "right": lambda: x + 1,
            "right too": lambda: x + jnp.ones_like(x) * jnp.float32(cfg.step),
            "zeros": lambda: jnp.zeros_like(x),
            "nan": lambda: x + jnp.nan,
            "shape": lambda: (x + 1)[:-1],
            "dtype": lambda: (x + 1).astype(jnp.bfloat16),
        }
        return results[cfg.kind]()

    def heuristic_cfg(self, inv):
        return How("right")

    def candidate_cfgs(self, inv):
        return [How(kind) for kind in self.kinds]


def tune(kernel, x=X, tuner=None, **options):
    return tune_invocation(tuner or Tuner(progress=False), kernel.bind(x), kernel, **options)


def verdicts(outcome):
    return {trial.cfg.kind: trial.verdict for trial in outcome.trials}


def test_wrong_failing_and_impossible_candidates_are_survived_with_their_reasons():
    outcome = tune(Sum("zeros", "nan", "raises", "shape", "dtype", "terabyte"))
    assert outcome.best == How("right")
    assert verdicts(outcome) == {
        "right": Verdict.MEASURED,
        "zeros": Verdict.WRONG,
        "nan": Verdict.WRONG,
        "raises": Verdict.FAILED,
        "shape": Verdict.WRONG,
        "dtype": Verdict.WRONG,
        "terabyte": Verdict.FAILED,
    }
    reasons = {trial.cfg.kind: trial.reason for trial in outcome.trials}
    assert "largest error" in reasons["zeros"]
    assert "NaN" in reasons["nan"]
    assert "no such block" in reasons["raises"]
    assert "shape (63,)" in reasons["shape"]
    assert "bfloat16" in reasons["dtype"]
    assert "TiB" in reasons["terabyte"]
    for reason in reasons.values():
        assert reason in outcome.explain()


def test_equal_programs_are_compiled_once_and_share_their_time():
    class Same(Sum):
        def candidate_cfgs(self, inv):
            return [How("right", step) for step in range(5)]

    tuner = Tuner(progress=False)
    outcome = tune(Same(), tuner=tuner)
    assert tuner.compilations == 1
    assert outcome.count(Verdict.DUPLICATE) == 4
    assert len({trial.seconds for trial in outcome.trials}) == 1


def test_what_a_kernel_does_not_support_is_never_lowered():
    class Picky(Sum):
        def not_supported(self, cfg, inv):
            return ["too large", f"step {cfg.step}"] if cfg.kind == "raises" else []

    outcome = tune(Picky("raises"))
    assert verdicts(outcome)["raises"] is Verdict.UNSUPPORTED
    assert "too large; step 1" in outcome.explain()


def test_all_failing_lists_every_reason():
    class Broken(Sum):
        def heuristic_cfg(self, inv):
            return How("raises")

    with pytest.raises(TuningFailed, match="no such block"):
        tune(Broken())


def test_a_reference_that_fails_is_said_to_be_the_culprit():
    class BadReference(Sum):
        def reference(self, x):
            raise ValueError("not today")

    with pytest.raises(TuningFailed, match=r"the reference itself failed.*not today"):
        tune(BadReference())


def test_a_budget_of_evaluations_gives_an_incomplete_result_that_is_continued(tmp_path):
    class Steps(Sum):
        def candidate_cfgs(self, inv):
            return [How("right too", step) for step in (1, 1, 1)] + [
                How("right"),
                How("zeros"),
                How("nan"),
            ]

    kernel, store = Steps(), PersistentCache(tmp_path)

    def selector(**options):
        tuner = Tuner(progress=False, **options)
        return ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store), tuner

    first, tuner = selector(evaluations=1)
    found = first.answer(kernel.bind(X), kernel, Sources.MEASURED)
    assert found.about.incomplete
    entry = store.entry(kernel.bind(X).key)
    assert "evaluations" in entry["about"]["incomplete"]

    second, tuner = selector()
    found = second.answer(kernel.bind(X), kernel, Sources.MEASURED)
    assert not found.about.incomplete
    assert tuner.compilations < 4  # what was measured before is not compiled again
    assert not store.entry(kernel.bind(X).key)["about"]["incomplete"]


def test_adding_one_candidate_later_compiles_and_times_one(tmp_path):
    store = PersistentCache(tmp_path)
    kernel = Sum("zeros")
    first = ConfigSelectorChain(ConfigCache(), tuner=Tuner(progress=False), persistent=store)
    first.answer(kernel.bind(X), kernel, Sources.MEASURED)

    kernel.kinds = ("zeros", "right too")
    tuner = Tuner(progress=False)
    later = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store)
    found = later.answer(kernel.bind(X), kernel, Sources.MEASURED)
    assert tuner.compilations == 1
    assert verdicts(found.about) == {
        "right": Verdict.MEASURED,
        "zeros": Verdict.WRONG,
        "right too": Verdict.MEASURED,
    }
    tuner = Tuner(progress=False)
    again = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store)
    again.answer(kernel.bind(X), kernel, Sources.MEASURED)
    assert tuner.compilations == 0


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    kernel, store = Sum("right too"), PersistentCache(tmp_path)
    ticks = itertools.count()

    def timer():
        now = next(ticks)
        if now > 9:  # after the first round
            raise KeyboardInterrupt
        return float(now)

    tuner = Tuner(progress=False, timer=timer)
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store)
    with pytest.raises(KeyboardInterrupt):
        selector.choose(kernel.bind(X), kernel)
    entry = store.entry(kernel.bind(X).key)
    assert entry["about"]["incomplete"] == "interrupted"
    trials = store.trials(kernel.bind(X).key)
    assert [trial["verdict"] for trial in trials] == ["measured", "measured"]


@pytest.mark.parametrize("name", ["seconds", "evaluations"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_budget_of_nothing_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Tuner(**{name: value})


def test_unknown_efforts_and_isolations_are_refused():
    with pytest.raises(ValueError, match=r"effort='huge'.*quick, standard, full"):
        Tuner(effort="huge")
    with pytest.raises(ValueError, match="isolation='jail'"):
        Tuner(isolation="jail")


def test_a_declared_space_serves_as_config_space():
    class Spaced(Sum):
        config_space = Space(
            kind=["right too"], step=[1, 2, 3], where=lambda step, inv: step < inv.args[0].ndim + 1
        )

    kernel = Spaced()
    assert kernel.candidates(kernel.bind(X)) == [How("right"), How("right too", 1)]
    assert autotune(kernel, X) in kernel.candidates(kernel.bind(X))


def test_a_large_space_is_searched_and_not_exhausted():
    class Large(Sum):
        def run(self, x, *, cfg):
            return x + 1 + 0 * jnp.sum(jnp.ones(cfg.step))

        def candidate_cfgs(self, inv):
            return [How("right", step) for step in range(1, 200)]

    tuner = Tuner(progress=False, effort="quick", strategy="random")
    outcome = tune(Large(), tuner=tuner)
    assert tuner.compilations <= 24
    assert outcome.count(Verdict.NOT_TRIED) >= 170
    assert not outcome.incomplete


def test_implementations_of_one_device_race_against_each_other():
    @dataclasses.dataclass(frozen=True)
    class Choice:
        implementation: str | None = None

    class Two(Kernel[Choice, jax.Array]):
        tune_implementations = True

        def run_xla(self, x, *, cfg):
            return x + 1

        def run_cpu(self, x, *, cfg):
            return x - 1  # fast, but not what the reference says

        def reference(self, x):
            return x + 1

    kernel = Two()
    assert kernel.candidates(kernel.bind(X)) == [Choice("cpu"), Choice("xla")]
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(progress=False)))
    assert executor(kernel, X)[0] == 2.0
    assert executor.choose_config(kernel, X) == Choice("xla")
    with pytest.raises(ValueError, match=r"two@v1.*'gpu'.*xla, cpu"):
        executor(kernel, X, cfg=Choice("gpu"))


class Hostile(Sum):
    """Some candidates do harm to the process that runs them."""

    def run(self, x, *, cfg):
        if cfg.kind == "hangs":
            return jax.lax.while_loop(lambda x: x[0] > 0, lambda x: x + 1e-6, x)
        if cfg.kind == "aborts":  # XLA's gate to Python, with the number of no callback
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            call = jax.ffi.ffi_call("xla_ffi_python_cpu_callback", shape)
            return call(x, index=np.uint64(10**6))
        return super().run(x, cfg=cfg)


def test_every_kind_of_hostile_candidate_in_one_run_is_survived_by_a_worker():
    from ejkernel.ops.tuner.isolation import worker_bench

    tuner = Tuner(progress=False, isolation="process")
    tuner.bench = lambda arrays: worker_bench.WorkerBench(arrays, run_seconds=3.0)
    kinds = ("zeros", "nan", "raises", "hangs", "aborts", "terabyte", "shape", "right too")
    outcome = tune(Hostile(*kinds), tuner=tuner)
    assert outcome.best.kind in ("right", "right too")
    found = verdicts(outcome)
    wrong = {kind for kind, verdict in found.items() if verdict is Verdict.WRONG}
    assert wrong == {"zeros", "nan", "shape"}
    failed = {kind for kind, verdict in found.items() if verdict is Verdict.FAILED}
    assert failed == {"raises", "hangs", "aborts", "terabyte"}
    reasons = {trial.cfg.kind: trial.reason for trial in outcome.trials}
    assert "3 s" in reasons["hangs"]
    assert "SIG" in reasons["aborts"]
    assert "TiB" in reasons["terabyte"]
    assert "NaN" in reasons["nan"]
    assert "no such block" in reasons["raises"]
    assert all(reason in outcome.explain() for reason in reasons.values())


def test_tuning_interrupted_is_a_keyboard_interrupt():
    assert issubclass(TuningInterrupted, KeyboardInterrupt)


def test_a_candidate_that_is_added_later_is_checked_too(tmp_path):
    store, kernel = PersistentCache(tmp_path), Sum()

    def tuned():
        tuner = Tuner(progress=False)
        selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store)
        return selector.answer(kernel.bind(X), kernel, Sources.MEASURED).about

    tuned()
    kernel.kinds = ("zeros",)
    assert verdicts(tuned())["zeros"] is Verdict.WRONG


def test_programs_are_lowered_without_locations_and_the_setting_comes_back():
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    with without_locations():
        with without_locations():  # a kernel is tuned while another one is traced
            assert getattr(jax.config, name) == 0
        assert getattr(jax.config, name) == 0
    assert getattr(jax.config, name) == before
    with pytest.raises(ZeroDivisionError), without_locations():
        1 / 0  # noqa: B018
    assert getattr(jax.config, name) == before
