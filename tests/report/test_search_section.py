"""How a search went, which parameter mattered, what is cut off, and where the chosen config is."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from sample_runs import attention, blocks, large_run, loss, plain_run

from ejkernel.report import Candidate, render
from ejkernel.report.operations import operation_card
from ejkernel.report.search import improvements, in_words
from ejkernel.report.space import importances, maps


def operation_with(candidates, **changes):
    return dataclasses.replace(attention(), candidates=tuple(candidates), **changes)


def timed(times, orders=None):
    return [
        Candidate({"n": n}, "measured", seconds, order=order)
        for n, (seconds, order) in enumerate(
            zip(times, orders or range(1, len(times) + 1), strict=True)
        )
    ]


def test_the_best_so_far_follows_the_order_of_the_trials():
    operation = operation_with(timed([3.0, 1.0, 2.0], orders=[2, 3, 1]))
    assert [(n, c.seconds) for n, c in improvements(operation)] == [(1, 2.0), (3, 1.0)]
    assert in_words(operation) == "3 trials: 2.00 s at first, the fastest at trial 3 with 1.00 s."
    never = operation_with(timed([1.0, 2.0]))
    assert in_words(never) == "2 trials: 1.00 s at first, which no later one improved."


def test_trials_without_a_time_count_as_trials():
    wrong = Candidate({"n": 9}, "wrong", order=1)
    operation = operation_with([wrong, *timed([2.0, 1.0], orders=[2, 3])])
    assert [n for n, _ in improvements(operation)] == [2, 3]
    assert "3 trials" in in_words(operation)
    assert 'class="untimed"' in operation_card(operation, "x", True)


def test_without_an_order_there_is_no_history():
    bare = operation_with(dataclasses.replace(c, order=None) for c in attention().candidates)
    assert in_words(bare) == ""
    page = operation_card(bare, "x", True)
    assert "trial by trial" not in page
    assert "trial by trial" in operation_card(attention(), "x", True)


def grid(effect, fields=("a", "b", "c"), values=(1, 2, 4)):
    for choice in itertools.product(values, repeat=len(fields)):
        config = dict(zip(fields, choice, strict=True))
        yield Candidate(config, "measured", effect(**config))


def test_a_parameter_that_does_everything_has_it_all():
    shares = importances(operation_with(grid(lambda a, b, c: float(a))))
    assert shares[0] == ("a", pytest.approx(1.0, abs=1e-6))
    assert [share for _, share in shares[1:]] == [pytest.approx(0.0, abs=1e-6)] * 2


def test_shares_are_those_of_the_variance_of_logarithms():
    # a doubles twice, b by steps of half of that: variances of 4 to 1.
    shares = dict(importances(operation_with(grid(lambda a, b, c: a * b**0.5))))
    assert shares["a"] == pytest.approx(0.8, abs=0.01)
    assert shares["b"] == pytest.approx(0.2, abs=0.01)
    assert shares["c"] == pytest.approx(0.0, abs=0.01)


def test_a_combination_is_nobodys_own():
    shares = importances(operation_with(grid(lambda a, b, c: 2.0 if a == b else 1.0)))
    assert all(share < 0.05 for _, share in shares)


def test_shares_never_add_up_to_more_than_all():
    for operation in (attention(), large_run().operations[0]):
        shares = [share for _, share in importances(operation)]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) <= 1 + 1e-9


def test_too_few_candidates_are_said():
    assert importances(loss()) is None
    assert "Too few candidates" in operation_card(loss(), "x", True)
    # As many values as candidates: each value would explain its own time.
    many = operation_with(timed([float(n) for n in range(1, 20)]))
    assert importances(many) is None


def test_equal_times_have_no_cause():
    flat = operation_with(grid(lambda a, b, c: 1.0))
    assert [share for _, share in importances(flat)] == [0.0] * 3
    assert "None of them by itself" in operation_card(flat, "x", True)


def test_a_sample_beyond_the_plot_has_a_mark():
    rows = re.findall(r'<li class="row measured.*?</li>', render(plain_run()), re.DOTALL)
    wild = [row for row in rows if "to 90.0 ms" in row]
    assert len(wild) == 1
    assert 'class="beyond"' in wild[0]
    assert wild[0].count('class="dot"') == 11  # not the one that is not where it would be drawn
    inside = [row for row in rows if "4.12 ms" in row]
    assert inside
    assert not any('class="beyond"' in row for row in inside)


def test_the_cell_of_the_chosen_config_is_framed_though_another_one_there_is_faster():
    slow, fast = {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 2}
    others = [{"a": a, "b": b, "c": 1} for a, b in ((1, 2), (2, 1), (2, 2))]
    candidates = [
        Candidate(config, "measured", seconds)
        for config, seconds in zip([slow, fast, *others], (1.01, 1.0, 2.0, 2.0, 2.0), strict=True)
    ]
    operation = operation_with(candidates, config=slow, heuristic=slow, seconds=1.01)
    drawn = next(m for m in maps(operation) if {m.down, m.across} == {"a", "b"})
    cell = drawn.cells[1, 1]
    assert cell.candidate.config == fast
    assert cell.chosen.config == slow
    card = operation_card(operation, "x", True)
    framed = re.findall(r"<td[^>]*class=\"best[^>]*>", card)
    assert len(framed) == len(maps(operation))  # one in each map
    assert "the chosen one is here too: 1.01 s per call" in card


def test_one_cell_is_framed_in_each_map_of_a_usual_run():
    card = operation_card(attention(), "x", True)
    assert len(re.findall(r"<td[^>]*class=\"[^\"]*best", card)) == len(maps(attention()))
    assert attention().config == blocks(256, 128)
