"""`ejkernel.tune`: one call that tunes, stores, puts in force, compares and says so."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from front_kernels import (
    FAST,
    SLOW,
    FastIsFound,
    Repeats,
    clock,
    decorated,
    fast_is_found,
    misled,
    repeated,
    slow_in_the_model,
    slow_is_best,
)

import ejkernel
from ejkernel.ops import Executor, PersistentCache, Tuner, default_executor, set_default_executor
from ejkernel.report import BeforeAfter, Gain, Run, render, summary
from ejkernel.report.before_after import MOST_ROUNDS, is_settled
from ejkernel.tuning import NothingToTune

X = jnp.ones((4, 4))


class FakeTimed(Tuner):
    def __init__(self, **options):
        super().__init__(timer=clock.perf_counter, **options)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A store, a default executor and a clock of the test's own."""
    monkeypatch.setattr("ejkernel.ops.tuner.tuner.Tuner", FakeTimed)
    monkeypatch.setattr("ejkernel.ops.execution.whole_function.time", clock)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("EJKERNEL_CONFIG_PATH", raising=False)
    set_default_executor(None)
    yield tmp_path / "cache"
    set_default_executor(None)


def tune(function, *args, **options):
    return ejkernel.tune(function, *args, effort="quick", progress=False, **options)


def choice(kernel, x=X):
    return default_executor().choose_config(kernel, x)


def entry(kernel, x=X):
    return PersistentCache().entry(kernel.bind(x).key)


# --- one call -------------------------------------------------------------------------------------


def test_it_is_stored_in_force_and_said(capsys):
    model = jax.jit(lambda x: fast_is_found(x).sum())
    traced = model.lower(X).as_text()
    result = tune(model, X)
    assert [entry.cfg for entry in result] == [Repeats(FAST)]
    assert result.in_force
    assert entry(fast_is_found)["config"] == {"times": FAST}
    assert choice(fast_is_found) == Repeats(FAST)
    assert model.lower(X).as_text() != traced  # what was jitted before runs it too
    shown = capsys.readouterr().out
    assert "fast_is_found@v1" in shown
    assert re.search(r"<lambda>: \d+(\.\d+)?× faster than default configs", shown)
    assert result.run.model.gain.low > 1


def test_another_process_finds_it(tmp_path):
    tune(fast_is_found, X, quiet=True)
    code = (
        "import jax.numpy as jnp; from front_kernels import fast_is_found as k; "
        "from ejkernel.ops import default_executor; "
        "print(default_executor().choose_config(k, jnp.ones((4, 4))))"
    )
    tests = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
    )
    assert done.stdout.strip() == "Repeats(times=1)", done.stderr


def test_without_save_nothing_is_on_disk(cache):
    result = tune(fast_is_found, X, save=False, quiet=True)
    assert result.in_force
    assert choice(fast_is_found) == Repeats(FAST)
    assert not list(cache.rglob("*.sqlite3"))


def test_another_store(tmp_path):
    tune(fast_is_found, X, store=tmp_path / "other", quiet=True)
    assert entry(fast_is_found) is None
    assert PersistentCache(tmp_path / "other").entry(fast_is_found.bind(X).key) is not None


def test_quiet_prints_nothing(capsys):
    tune(fast_is_found, X, quiet=True)
    assert capsys.readouterr().out == ""


def test_training_is_tuned_as_training():
    tune(jax.grad(lambda x: fast_is_found(x).sum()), X, quiet=True)
    assert entry(fast_is_found) is None
    call = fast_is_found.bind(X).differentiate()
    assert PersistentCache().entry(call.key)["about"]["measured"] == "forward and backward"


def test_shapes_are_enough():
    result = tune(fast_is_found, jax.ShapeDtypeStruct(X.shape, X.dtype), quiet=True)
    assert result.run.step_seconds > 0


# --- again ----------------------------------------------------------------------------------------


def test_what_is_known_is_not_measured_and_it_says_how_to(capsys):
    tune(fast_is_found, X, quiet=True)
    known = tune(fast_is_found, X)
    assert known.entries[0].outcome is None
    shown = capsys.readouterr().out
    assert "known already, not measured: all of 1 operation" in shown
    assert "ejkernel.tune(…, force=True)" in shown
    assert "the same configs were in force before; nothing to compare" in shown


def test_force_measures_again():
    tune(fast_is_found, X, quiet=True)
    first = PersistentCache().trials(fast_is_found.bind(X).key)
    again = tune(fast_is_found, X, force=True, quiet=True)
    assert again.entries[0].outcome is not None
    second = PersistentCache().trials(fast_is_found.bind(X).key)
    assert {t["config"]["times"] for t in second} == {FAST, SLOW}
    for old, new in zip(first, second, strict=True):
        assert old["samples_ns"] != new["samples_ns"]  # none of the stored ones counts


def test_a_forced_run_that_is_not_finished_replaces_nothing(monkeypatch):
    tune(fast_is_found, X, quiet=True)
    before = entry(fast_is_found)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ejkernel.ops.tuner.bench.LocalBench.sample", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tune(fast_is_found, X, force=True, quiet=True)
    assert entry(fast_is_found) == before


def test_a_limit_of_a_forced_run_replaces_nothing(monkeypatch):
    tune(fast_is_found, X, quiet=True)
    before = entry(fast_is_found)
    result = tune(fast_is_found, X, force=True, seconds=1e-6, quiet=True)
    assert result.run.operations[0].incomplete
    assert entry(fast_is_found) == before


# --- the whole model ------------------------------------------------------------------------------


def test_calls_shares_and_limits_are_known():
    def model(x):
        def body(y, _):
            return fast_is_found(y), None

        return jax.lax.scan(body, x, length=3)[0] + fast_is_found(x)

    result = tune(model, X)
    (operation,) = result.run.operations
    assert operation.calls == 4
    assert operation.share == pytest.approx(
        4 * operation.seconds / result.run.step_seconds, rel=1e-6
    )
    assert operation.most_gain is None or operation.most_gain > 1
    assert Run.loads(result.run.dumps()) == result.run
    assert "of the step" in str(result)
    assert "4 calls" in render(result.run, "html")


@pytest.mark.parametrize("wrapped", [lambda body: body, jax.checkpoint])
def test_the_calls_of_a_training_step_over_layers(wrapped):
    def loss(x, weights):
        def body(y, weight):
            return decorated(y * weight), None

        return jax.lax.scan(wrapped(body), x, weights)[0].sum()

    result = tune(jax.grad(loss, 1), X, jnp.ones(5), quiet=True)
    assert [operation.calls for operation in result.run.operations] == [5]


@pytest.mark.parametrize(("save", "said"), [(True, "is stored"), (False, "nothing is stored")])
def test_ctrl_c_says_what_became_of_it(monkeypatch, save, said):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ejkernel.tuning.pipeline.tune_invocations", interrupted)
    with pytest.raises(ejkernel.tuning.Interrupted, match=said):
        tune(fast_is_found, X, save=save)


def test_of_a_loop_of_unknown_length_no_calls_are_claimed():
    def model(x):
        def body(state):
            return state[0] + 1, fast_is_found(state[1])

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1] + fast_is_found(x)

    result = tune(model, X, quiet=True)
    (operation,) = result.run.operations
    assert result.run.step_seconds > 0
    assert (operation.calls, operation.share, operation.most_gain) == (None, None, None)
    assert "at most" not in str(result)


def test_a_report_does_not_say_that_a_model_was_not_run_that_was():
    result = tune(slow_is_best, X, quiet=True)
    for page in (render(result.run, "html"), render(result.run, "md")):
        assert "was not run" not in page
        assert "it was not compared" in page


def test_default_configs_that_are_best_are_not_compared(capsys):
    result = tune(slow_is_best, X)
    assert result.run.model is None
    assert result.run.step_seconds > 0
    assert "default configs were best already; nothing to compare" in capsys.readouterr().out


def test_a_slower_model_keeps_what_it_had(capsys):
    result = tune(misled, X)
    assert [e.cfg for e in result] == [Repeats(FAST)]  # it is what the measurements say
    assert result.run.rejected
    assert not result.in_force
    assert choice(slow_in_the_model) == Repeats(SLOW)
    assert entry(slow_in_the_model) is None
    shown = capsys.readouterr().out
    assert "slower with the tuned configs: they are not put in force" in shown
    assert "not put in force" in render(result.run, "html")
    assert "slower than default configs" in summary.verdict(result.run)


def test_a_slower_model_gives_the_store_back_what_it_had():
    key = slow_in_the_model.bind(X).key
    trials = [{"config": {"times": SLOW}, "verdict": "measured", "seconds": 1e-3}]
    PersistentCache().put(key, Repeats(SLOW), about={"when": "2020", "trials": trials})
    before, tried = PersistentCache().entry(key), PersistentCache().trials(key)
    assert tune(misled, X, force=True, quiet=True).run.rejected
    assert PersistentCache().entry(key) == before
    assert PersistentCache().trials(key) == tried


def test_a_model_that_cannot_run_is_tuned_all_the_same(capsys):
    def model(x):
        jax.debug.callback(lambda: 1 / 0)
        return fast_is_found(x).sum()

    result = tune(model, X)
    assert result.in_force
    assert "not compared before and after:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gain", "rounds", "settled"),
    [
        (Gain(1.10, 1.08, 1.12), 9, True),
        (Gain(1.10, 1.08, 1.12), 5, False),
        (Gain(1.10, 1.01, 1.19), 9, False),
        (Gain(0.80, 0.78, 0.83), 9, True),
        (Gain(1.00, 0.97, 1.03), 99, False),
        (Gain(1.00, 0.995, 1.005), 9, True),
    ],
)
def test_it_runs_until_the_interval_is_narrower_than_the_claim(gain, rounds, settled):
    assert is_settled(gain, rounds) is settled


# --- plain JAX ------------------------------------------------------------------------------------


def plain(x):
    return repeated(x, 3).sum()


def test_against_plain_jax(capsys):
    result = tune(lambda x: fast_is_found(x).sum(), X, against=plain)
    assert result.run.plain.baseline == "plain JAX"
    assert len(result.run.plain.after) == len(result.run.model.after)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "plain JAX" in last
    assert "default configs" in last
    again = tune(lambda x: fast_is_found(x).sum(), X, against=plain, quiet=True)
    assert again.run.model.baseline == "default configs"  # all was known, and is compared again
    assert not again.run.rejected


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda x: 2 * plain(x), "outputs that differ by up to"),
        (lambda x: (plain(x), x), "returns something else"),
    ],
)
def test_something_else_is_not_compared_with(other, said):
    result = tune(fast_is_found.__call__, X, against=other, quiet=True)
    assert result.run.plain is None
    assert any(said in note for note in result.run.notes)


def raises(x):
    raise RuntimeError("boom")


def test_a_plain_version_that_raises_does_not_hide_a_slower_model():
    result = tune(misled, X, against=raises, quiet=True)
    assert "not compared with plain JAX: raises raised RuntimeError: boom" in result.run.notes
    assert result.run.rejected
    assert not result.in_force


def test_the_limit_that_ended_a_comparison_is_the_one_that_is_named(monkeypatch):
    monkeypatch.setattr("ejkernel.tuning.whole_model.is_settled", lambda gain, rounds: False)
    result = tune(lambda x: fast_is_found(x).sum(), X, quiet=True)
    assert len(result.run.model.after) == MOST_ROUNDS
    (note,) = (note for note in result.run.notes if "ended at its limit" in note)
    assert f"its limit of {MOST_ROUNDS} rounds:" in note


def test_what_could_not_be_stored_is_said(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file" / "below"))
        with pytest.warns(RuntimeWarning, match="journal"):
            result = tune(fast_is_found, X)
    assert result.not_stored == ("fast_is_found@v1",)
    said = "tuned, but not stored: fast_is_found@v1"
    assert said in capsys.readouterr().out


def compared(baseline, times, low, high):
    return BeforeAfter("m", (1.0,), (1.0,), Gain(times, low, high), baseline=baseline)


@pytest.mark.parametrize(
    ("plain_gain", "model_gain", "said"),
    [
        (
            (2.1, 1.9, 2.4),
            (1.04, 1.02, 1.06),
            "2.10× faster than plain JAX (1.90–2.40), 1.04× than default configs (1.02–1.06)",
        ),
        (
            (2.1, 1.9, 2.4),
            None,
            "2.10× faster than plain JAX (1.90–2.40), default configs were best already",
        ),
        (
            None,
            (1.0, 0.9, 1.1),
            "as fast as default configs, as far as can be measured (0.90–1.10)",
        ),
        (None, (0.8, 0.7, 0.9), "slower than default configs: 0.80× (0.70–0.90)"),
        (None, None, ""),
    ],
)
def test_the_verdict(plain_gain, model_gain, said):
    run = Run(
        "m",
        "cpu",
        "2026",
        model=None if model_gain is None else compared("default configs", *model_gain),
        plain=None if plain_gain is None else compared("plain JAX", *plain_gain),
    )
    assert summary.verdict(run) == said
    assert said in render(run, "html")
    assert said in render(run, "md")


# --- state ----------------------------------------------------------------------------------------


def test_donated_arguments_stay():
    step = jax.jit(lambda state, x: (state + fast_is_found(x).sum(), x), donate_argnums=0)
    state = jnp.zeros(())
    result = tune(step, state, X, quiet=True)
    assert result.run.model.difference == pytest.approx(0.0, abs=1e-6)
    assert not state.is_deleted()


def test_nnx_modules_are_compared_on_equal_state_and_stay():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(()))
            self.steps = nnx.Variable(jnp.zeros(()))

    @nnx.jit
    def step(model, x):
        model.steps[...] += 1
        model.weight[...] *= 3
        return model.weight[...] * fast_is_found(x).sum()

    model = Model()
    result = tune(step, model, X, quiet=True)
    assert result.run.model.difference == pytest.approx(0.0, abs=1e-6)
    assert float(model.steps[...]) == 0
    assert result.run.operations[0].calls == 1


def test_refs_are_compared_on_equal_state_and_stay():
    given, closed_over = jax.new_ref(jnp.ones(())), jax.new_ref(jnp.ones(()))

    @jax.jit
    def step(counter, x):
        counter[...] = 2 * counter[...]
        closed_over[...] = 2 * closed_over[...]
        return counter[...] * closed_over[...] * fast_is_found(x).sum()

    result = tune(step, given, X, quiet=True)
    assert result.run.model.difference == pytest.approx(0.0, abs=1e-6)
    assert float(given[...]) == float(closed_over[...]) == 1


def test_a_module_that_is_closed_over_has_a_word_on_what_to_do():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.steps = nnx.Variable(jnp.zeros(()))

    model = Model()

    def step(x):
        model.steps[...] += 1
        return fast_is_found(x)

    with pytest.raises(Exception, match="trace level") as error:
        tune(step, X)
    assert "give the module as an argument" in "".join(error.value.__notes__)


# --- what comes back ------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["html", "md", "json"])
def test_reports(tmp_path, ending):
    page = tune(fast_is_found, X, quiet=True).report(tmp_path / f"page.{ending}")
    assert "fast_is_found" in page.read_text(encoding="utf-8").replace("\\_", "_")


@pytest.mark.parametrize("kernel", [fast_is_found, decorated])
def test_code_can_be_pasted(kernel):
    code = tune(kernel, X, quiet=True, save=False).code()
    set_default_executor(None)
    assert choice(kernel).times == SLOW
    scope = {"choose": lambda: chosen.append(choice(kernel))}
    chosen = []
    exec(code.replace("    ...  # the calls", "    choose()"), scope)
    assert chosen[0].times == FAST
    given = "times=1" if kernel is decorated else "cfg=Repeats(times=1)"
    assert f"{kernel.op_id}(..., {given})" in code


def of_somebody_else(x, *, times=SLOW):
    return repeated(x, times)


renamed = ejkernel.tunable(of_somebody_else, times=[SLOW, FAST], name="mine/renamed-it")


def test_code_names_the_variable_that_holds_the_function_of_somebody_else():
    text = tune(renamed, X, quiet=True).code()
    assert f"from {__name__} import renamed\n" in text
    names = {}
    exec(text, names)
    assert list(names["TUNED"].values()) == [renamed.best(X)]


def test_code_of_local_functions_can_be_pasted_where_they_are():
    @ejkernel.tunable(times=[SLOW, FAST])
    def local(x, *, times=SLOW):
        return repeated(x, times)

    nameless = ejkernel.tunable(
        lambda x, *, times=SLOW: repeated(x, times), times=[SLOW, FAST], name="no-name"
    )
    exec(tune(local, X, quiet=True).code(), {"local": local})
    exec(tune(nameless, X, quiet=True).code(), {"no_name": nameless})


def test_the_result_of_a_text_is_a_result():
    result = tune(fast_is_found, X, quiet=True)
    read = type(result).loads(result.dumps())
    assert read == result
    assert read.run.operations[0].config == {"times": FAST}


# --- bad arguments --------------------------------------------------------------------------------


def test_a_function_without_operations_of_ours():
    with pytest.raises(NothingToTune, match="sin: there is no operation of ejkernel in the"):
        tune(jnp.sin, X)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        ((3,), {}, TypeError, "the first argument must be a function or a kernel, got 3"),
        ((FastIsFound, X), {}, TypeError, r"the class FastIsFound; give an instance"),
        ((fast_is_found, X), {"seconds": 0}, ValueError, "seconds=0"),
        ((fast_is_found, X), {"effort": "x"}, ValueError, "effort"),
        ((fast_is_found, X), {"isolation": "x"}, ValueError, "isolation='x'"),
        ((fast_is_found, X), {"against": 3}, TypeError, "against must be a function"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, said):
    with pytest.raises(error, match=said):
        ejkernel.tune(*arguments, **options)


def test_the_default_executor_of_somebody_else_gets_it():
    mine = Executor(default_executor().selector)
    set_default_executor(mine)
    tune(fast_is_found, X, quiet=True)
    assert mine.choose_config(fast_is_found, X) == Repeats(FAST)
    assert isinstance(mine.selector.tuner, Tuner)


def test_the_run_is_listed_where_reports_and_the_dashboard_look():
    from ejkernel.report.runs import load_record, record_names

    tune(fast_is_found, X, save=False)
    assert record_names() == []
    result = tune(fast_is_found, X)
    (name,) = record_names()
    assert load_record(name).operations[0].op_id == result.run.operations[0].op_id
