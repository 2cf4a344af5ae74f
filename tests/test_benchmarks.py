"""The tools of the benchmarks: a verdict is worth what they can tell apart."""

from __future__ import annotations

import json
import pathlib
import random
import re
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import charts, results
from benchmarks.ops import run_bound
from benchmarks.reference_times import ReferenceTimes
from benchmarks.side_by_side import (
    OURS,
    Bound,
    Comparison,
    Ratio,
    Times,
    outside_jax,
    prepared,
    program_text,
    race,
    ratios,
    trace_times,
)

X = jnp.ones((4, 8))


def text(function):
    return program_text(prepared(function, (X,)))


def test_the_same_program_is_recognised_under_other_names():
    def one(x):
        return jnp.sin(x) @ x.T

    def other(values):
        with jax.named_scope("a scope of its own"):
            changed = jnp.sin(values)
        return changed @ values.T

    assert text(one) == text(other)
    for different in (lambda x: jnp.cos(x) @ x.T, lambda x: jnp.sin(x) @ x.T + 1, jnp.sin):
        assert text(one) != text(different)
    assert text(outside_jax(lambda x: x)) is None


@pytest.mark.parametrize(
    ("best", "median", "low", "same", "verdict"),
    [
        (0.9, 1.1, 0.9, False, "kept"),
        (1.1, 0.9, 0.9, False, "kept"),
        (1.1, 1.1, 0.9, False, "in doubt"),
        (1.1, 1.1, 1.05, False, "missed"),
        (1.1, 1.1, 1.05, True, "same program"),
    ],
)
def test_verdicts(best, median, low, same, verdict):
    assert Ratio("peer", best, median, low, 2.0, 1.0, same).verdict == verdict
    assert Ratio("peer", best, median, low, 2.0, None, same).verdict == ""


def test_a_promise_below_one_is_not_kept_by_the_same_program():
    assert Ratio("peer", 1.0, 1.0, 0.9, 1.1, 0.5, True).verdict == "missed"


def test_rounds_are_interleaved_and_compared_by_round():
    order = []
    times = race(
        {"ours": lambda: order.append("ours"), "peer": lambda: order.append("peer")},
        seconds=0.0,
        rounds=(5, 60),
    )
    assert len(times["ours"].seconds) == len(times["peer"].seconds) == 3  # one took all the time
    assert all(set(order[i : i + 2]) == {"ours", "peer"} for i in range(0, len(order), 2))
    [ratio] = ratios({"ours": Times((1.0, 2.0, 4.0)), "peer": Times((2.0, 4.0, 4.0))}, {"peer": 1})
    assert (ratio.best, ratio.median) == (0.5, 0.5)


class NoisyWatch:
    """Samples the seconds that its call gives, with noise."""

    def __init__(self, call):
        self._call = call

    def warm_up(self, times):
        pass

    def sample(self):
        return self._call()


def noisy_times(seconds, seed):
    noise = random.Random(seed)
    calls = {
        name: lambda mean=mean: mean * (1 + noise.expovariate(2)) for name, mean in seconds.items()
    }
    times = ReferenceTimes(calls, NoisyWatch)
    times.measure(60)
    return times


def test_among_equals_nobody_seems_slower_than_the_best():
    """Beside the smallest of thirty noisy times, each of thirty equals would look slower."""
    found = []
    for seed in range(20):
        times = noisy_times(dict.fromkeys(range(30), 1.0), seed)
        found += [times.versus_the_best(name) for name in range(30)]
    assert statistics.fmean(found) == pytest.approx(1.0, abs=0.01)


def test_what_is_slower_than_the_best_is_seen_to_be():
    all_times = [noisy_times({"best": 1.0, "slow": 1.5, "slower": 2.0}, seed) for seed in range(20)]
    for name, expected in (("best", 1.0), ("slow", 1.5), ("slower", 2.0)):
        mean = statistics.fmean(times.versus_the_best(name) for times in all_times)
        assert mean == pytest.approx(expected, rel=0.05)


def test_tracing_is_timed_when_nothing_is_remembered():
    traced = []

    def ours(x):
        traced.append("ours")
        return x + 1

    def peer(x):
        traced.append("peer")
        return x + 1

    comparison = Comparison("both", ours, {"peer": peer}, lambda: (X,))
    times = trace_times(comparison, ["peer"], rounds=3)
    assert traced == ["ours", "peer"] * 3
    assert set(times) == {OURS, "peer"}
    assert all(len(t.seconds) == 3 for t in times.values())


@pytest.mark.parametrize(("mib", "verdict"), [(100.0, "kept"), (1.0, "missed"), (None, "")])
def test_a_bound_is_of_what_the_compiled_program_needs(mib, verdict):
    def needs_four_mib(x):
        return jnp.tanh(x @ x) @ x  # no product is fused with both what it reads and what reads it

    def arguments():
        return (jnp.ones((1024, 1024)),)

    row = run_bound("none", Bound("two products", needs_four_mib, arguments, mib))
    assert row["verdict"] == verdict
    assert row["ours_ms"] >= 4


@pytest.mark.parametrize(("mib", "verdict"), [(1.0, "kept"), (None, "")])
def test_a_program_may_need_nothing(mib, verdict):
    row = run_bound("none", Bound("a sum", jnp.add, lambda: (jnp.ones(()), jnp.ones(())), mib))
    assert (row["verdict"], row["ours_ms"], row["best"]) == (verdict, 0, 0)


def one():
    return (jnp.ones(()),)


def plus_one(x):
    return x + 1


def refuse(result, x):
    raise AssertionError(f"{result} is wrong for {x}")


@pytest.mark.parametrize("compiler_knows", [True, False])
def test_a_bound_that_is_run_is_checked(compiler_knows):
    with pytest.raises(AssertionError, match=re.escape("2.0 is wrong for 1.0")):
        run_bound("none", Bound("one", plus_one, one, 1.0, refuse, compiler_knows))


def takes_forty_mib_by_itself(x):
    def kernel(x):
        return np.full(5 * 2**20, x, np.float64).sum().astype(np.float32)

    return jax.pure_callback(kernel, jax.ShapeDtypeStruct((), jnp.float32), x)


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_memory_that_the_compiler_does_not_see_is_counted():
    unseen = run_bound("none", Bound("by itself", takes_forty_mib_by_itself, one, 20.0))
    assert (unseen["verdict"], unseen["ours_ms"]) == ("kept", pytest.approx(0, abs=1))
    counted = Bound("by itself", takes_forty_mib_by_itself, one, 20.0, compiler_knows=False)
    row = run_bound("none", counted)
    assert row["verdict"] == "missed"
    assert 38 <= row["ours_ms"] < 60  # the system counts by and by


def test_a_chart_has_a_mark_for_each_timed_row_and_escapes_names():
    row = {
        "operation": "op",
        "name": "a <b>",
        "peer": "jax",
        "median": 0.5,
        "quartiles": [0.4, 0.8],
    }
    drawn = charts.chart([row, {**row, "name": "tracing a"}, {**row, "peer": "torch"}], "op")
    assert drawn.count("<g>") == 2
    assert "a &lt;b&gt;: 2.00× (1.25–2.50) versus jax" in drawn


def test_the_page_of_results_shows_the_kept_data():
    rows = json.loads(results.DATA.read_text(encoding="utf-8"))["rows"]
    page = results.PAGE.read_text(encoding="utf-8")
    assert results.ops_table(rows) in page
    for name in {row["operation"] for row in rows}:
        mine = [row for row in rows if row["operation"] == name]
        assert (results.CHARTS / f"{name}.svg").read_text("utf-8") == charts.chart(
            mine, name
        ) + "\n"
        assert f"images/results/{name}.svg" in page
