"""Plain JAX: timed with the winner, never chosen, never the reason that a run fails."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Kernel,
    PersistentCache,
    Tuner,
    autotune,
    export_bundle,
)
from ejkernel.ops.config.outcome import Verdict
from ejkernel.ops.tuner import plain as plain_module
from ejkernel.ops.tuner import run as run_module
from ejkernel.ops.tuner.session import tune_invocation
from ejkernel.speedup import Gain, PlainJax

X = jnp.linspace(1.0, 2.0, 4096)


@dataclasses.dataclass(frozen=True)
class Parts:
    parts: int = 1


class AddOne(Kernel[Parts, jax.Array]):
    """The sine of x and one, in parts."""

    def run(self, x, *, cfg):
        return jnp.concatenate([jnp.sin(part) + 1 for part in jnp.split(x, cfg.parts)])

    def candidate_cfgs(self, inv):
        return [Parts(1), Parts(4)]


def slowly(steps):
    def add_one(x):
        body = lambda _, total: total + jnp.sin(total) * 0.0  # noqa: E731
        return jax.lax.fori_loop(0, steps, body, jnp.sin(x)) + 1

    return add_one


def the_reference(x):
    return jnp.sin(x) + 1


def tune(kernel, **options):
    tuner = Tuner(progress=False, **options)
    return tune_invocation(tuner, kernel.bind(X), kernel)


def with_plain(plain=None, reference=the_reference):
    methods = {"reference": staticmethod(reference)} if reference else {}
    if plain is not None:
        methods["plain"] = staticmethod(plain)
    return type("AddOnePlainly", (AddOne,), methods)()


@pytest.fixture
def patient(monkeypatch):
    """On a busy machine anything may seem to be too slow."""
    monkeypatch.setattr(plain_module, "TOO_SLOW", 1e9)
    monkeypatch.setattr(plain_module, "LONGEST", 1e9)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_the_reference_is_timed_with_the_winner(isolation):
    outcome = tune(with_plain(reference=slowly(3)), isolation=isolation)
    plain = outcome.plain
    assert plain.name == "add_one"
    assert plain.reason == ""
    assert plain.speedup.low <= plain.speedup.times <= plain.speedup.high
    tuned = outcome.seconds(outcome.best)
    assert plain.seconds == pytest.approx(tuned * plain.speedup.times)  # never a contradiction
    assert "over plain JAX" in outcome.summary()
    assert "plain JAX (add_one)" in outcome.explain()
    assert len(outcome.trials) == 2  # it is no candidate


def test_what_users_would_write_is_preferred_to_the_reference():
    def what_users_write(x):
        return jnp.sin(x) + 1.0

    assert tune(with_plain(what_users_write)).plain.name == "what_users_write"


def test_a_call_that_it_cannot_express_is_timed_by_the_reference():
    def narrow(x):
        raise NotImplementedError("only scalars")

    plain = tune(with_plain(narrow)).plain
    assert plain.name == "the_reference"
    assert plain.seconds > 0


def test_a_kernel_without_either_has_no_plain_time():
    outcome = tune(with_plain(reference=None))
    assert outcome.plain is None
    assert outcome.about()["plain"] is None


def raises(x):
    raise ValueError("no such thing")


def terabyte(x):
    wide = jnp.ones(2**19) * x[0]
    return jnp.sin(x) + 1 + 0 * (jnp.outer(wide, wide) @ wide)[0]


@pytest.mark.parametrize("isolation", ["none", "process"])
@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        (raises, "no such thing"),
        (terabyte, "TiB"),
        (lambda x: jnp.sin(x) + 2, "it computes something else than the kernel: .*largest error"),
    ],
)
def test_its_failure_is_recorded_and_the_run_goes_on(plain, reason, isolation):
    outcome = tune(with_plain(plain), isolation=isolation)
    assert outcome.count(Verdict.MEASURED) == 2
    assert outcome.plain.seconds is None
    assert outcome.plain.faster(outcome.seconds(outcome.best)) == "–"
    assert re.search(reason, outcome.plain.reason)
    assert "not timed" in outcome.explain()


def test_one_that_cannot_be_differentiated_says_so():
    def forward_only(x):
        return jax.lax.while_loop(lambda y: y[0] < x[0] + 0.5, lambda y: y + 1, x)

    kernel = with_plain(forward_only)
    inv = dataclasses.replace(kernel.bind(X), differentiated=("0",))
    outcome = tune_invocation(Tuner(progress=False), inv, kernel)
    assert outcome.measured == "forward and backward"
    assert "while_loop" in outcome.plain.reason


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_one_that_is_far_slower_is_stopped(isolation):
    outcome = tune(with_plain(slowly(10_000)), isolation=isolation)
    plain = outcome.plain
    assert plain.more_than == 20.0
    assert plain.faster(None) == "> 20×"
    assert "more than 20 times as long" in plain.reason
    assert plain.seconds > 20 * outcome.seconds(outcome.heuristic)
    assert "speedup > 20× over plain JAX" in outcome.summary()


def test_one_run_beyond_the_limit_is_the_last(monkeypatch):
    monkeypatch.setattr(plain_module, "LONGEST", 0.0)
    plain = tune(with_plain()).plain
    assert plain.seconds > 0
    assert plain.speedup is None
    assert "one run takes longer than 0 s" in plain.reason


def test_it_is_not_timed_when_the_time_is_spent(monkeypatch):
    monkeypatch.setattr(plain_module, "SHORT", 1e9)
    outcome = tune(with_plain(), seconds=1e-3)
    assert outcome.incomplete
    assert outcome.plain is None or outcome.plain.reason == "no time was left to time it"


@pytest.mark.usefixtures("patient")
def test_it_takes_a_bounded_number_of_samples(monkeypatch):
    taken = []
    original = plain_module.gain_of
    monkeypatch.setattr(
        plain_module,
        "gain_of",
        lambda mine, other: taken.append(len(mine)) or original(mine, other),
    )
    tune(with_plain(), effort="full")
    assert plain_module.ROUNDS[0] <= max(taken) <= plain_module.ROUNDS[1]


def test_it_has_no_influence_on_who_wins(monkeypatch):
    """The race is decided, and its samples are taken, before it runs at all."""
    seen = {}

    def watched(*args, **options):
        seen.update(winner=options["winner"])
        return PlainJax("fast", 1e-9, Gain(1e-3, 1e-3, 1e-3))

    monkeypatch.setattr(run_module, "time_plain", watched)
    outcome = tune(with_plain())
    assert seen["winner"] is not None
    assert outcome.best in (Parts(1), Parts(4))
    assert all(trial.cfg != "fast" for trial in outcome.trials)


# --- stored, exported, read back -----------------------------------------------------------------


def selector(folder):
    return ConfigSelectorChain(
        ConfigCache(), tuner=Tuner(progress=False), persistent=PersistentCache(folder)
    )


@pytest.mark.usefixtures("patient")
def test_it_is_stored_exported_and_read_back(tmp_path):
    kernel = with_plain(slowly(3))
    first = autotune(lambda x: kernel(x), X, selector=selector(tmp_path / "store"))
    (entry,) = first.entries
    assert entry.plain == entry.outcome.plain
    again = autotune(lambda x: kernel(x), X, selector=selector(tmp_path / "store"))
    (known,) = again.entries
    assert known.outcome is None
    assert known.plain == entry.plain
    assert known.gain == entry.gain
    assert "plain JAX (add_one)" in again.explain(0)
    loaded = AutotuningResult.loads(again.dumps())
    assert loaded.entries[0].plain == entry.plain
    for result in (first, again, loaded):
        assert "over plain" in str(result)
        assert entry.plain.faster(entry.seconds) in str(result)
        assert entry.plain.faster(entry.seconds) in result._repr_html_()
    bundle = tmp_path / "bundle.json"
    export_bundle(PersistentCache(tmp_path / "store"), bundle)
    (exported,) = json.loads(bundle.read_text())["entries"]
    assert exported["about"]["plain"] == entry.plain.to_plain()
    assert exported["about"]["speedup"] == entry.gain.to_plain()


@pytest.mark.parametrize(
    "damaged", [7, {"seconds": "fast"}, {"name": 3}, {"seconds": -1.0}, {"more_than": [20]}]
)
def test_what_a_store_holds_is_read_with_care(damaged):
    assert PlainJax.from_plain(damaged) is None
    assert Gain.from_plain(damaged) is None


def test_entries_of_earlier_versions_show_a_dash():
    text = json.dumps(
        {
            "ejkernel_result": 1,
            "device": "cpu|x",
            "entries": [
                {
                    "op_id": "add_one@v1",
                    "call_key": "0" * 16,
                    "config": 3,
                    "config_type": "builtins:int",
                    "seconds": 1e-3,
                    "heuristic_seconds": 2e-3,
                }
            ],
        }
    )
    shown = str(AutotuningResult.loads(text))
    assert re.search(r"add_one@v1 +– +2\.00 ms +1\.00 ms +– +2\.00×", shown)


# --- one convention ------------------------------------------------------------------------------


def test_times_and_speedups_never_contradict_each_other():
    outcome = tune(with_plain())
    heuristic = outcome.seconds(outcome.heuristic)
    for trial in outcome.trials:
        assert trial.speedup is not None
        assert heuristic / trial.seconds == pytest.approx(trial.speedup.times)
    assert outcome.speedup == pytest.approx(outcome.gain.times)
    assert outcome.about()["speedup"] == outcome.gain.to_plain()
