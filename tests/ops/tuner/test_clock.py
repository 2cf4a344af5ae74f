"""The stopwatch: how many calls make a sample."""

from __future__ import annotations

import pytest

from ejkernel.ops.tuner.clock import Stopwatch


def test_a_stopwatch_gives_the_seconds_of_one_call(clock):
    watch = Stopwatch(lambda: clock.spend(0.5), clock)
    watch.warm_up(1)
    assert watch.sample() == pytest.approx(0.5)


def test_a_stopwatch_puts_many_short_calls_into_one_sample(clock):
    watch = Stopwatch(lambda: clock.spend(1e-4), clock, shortest_sample=2e-3)
    watch.warm_up(1)
    before = clock.runs
    assert watch.sample() == pytest.approx(1e-4)
    assert 20 <= clock.runs - before <= 21


def test_on_a_cpu_calls_of_a_sample_do_not_overlap(clock):
    """JAX runs calls that do not need each other at once there, on as many cores as there are."""
    seen = []

    class Running:
        def block_until_ready(self):
            seen.append("done")
            return self

    def begin():
        clock.spend(1e-3)
        seen.append("begun")
        return Running()

    watch = Stopwatch(begin, clock, shortest_sample=3e-3)
    watch.warm_up(1)
    seen.clear()
    watch.sample()
    assert seen == ["begun", "done"] * 3


def test_a_stopwatch_calls_a_long_function_once_per_sample(clock):
    watch = Stopwatch(lambda: clock.spend(1.0), clock)
    watch.warm_up(3)
    assert clock.runs == 3
    watch.sample()
    assert clock.runs == 4


def test_a_stopwatch_survives_a_clock_that_stands_still(clock):
    calls = []
    watch = Stopwatch(lambda: calls.append(1), clock)
    watch.warm_up(1)
    assert watch.sample() == 0
    assert len(calls) <= 20_000


def test_a_first_slow_call_does_not_decide_how_many_calls_make_a_sample(clock):
    costs = iter([1.0] + [1e-4] * 1000)
    watch = Stopwatch(lambda: clock.spend(next(costs)), clock, shortest_sample=2e-3)
    watch.warm_up(2)
    before = clock.runs
    watch.sample()
    assert clock.runs - before >= 20
