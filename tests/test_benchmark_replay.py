"""Tables of recorded timings, and searches replayed on them."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.replay import Replayed, Table, TableError, replay, replay_at
from ejkernel.ops.tuner.search.strategies import Exhaustive, Random


def noisy_table(size: int = 40, failed: tuple[int, ...] = ()) -> Table:
    """Config 17 is the fastest; every third sample of any config is disturbed."""
    samples = tuple(
        ()
        if index in failed
        else tuple(
            (1e-3 + 1e-4 * abs(index - 17)) * (1.3 if turn % 3 == 0 else 1 + 0.001 * turn)
            for turn in range(15)
        )
        for index in range(size)
    )
    return Table("synthetic", tuple({"block": i} for i in range(size)), samples, {"machine": "x"})


def test_saving_and_loading_keeps_a_table(tmp_path):
    table = noisy_table(failed=(3,))
    table.save(tmp_path / "table.json")
    again = Table.load(tmp_path / "table.json")
    assert (again.name, again.configs, again.about) == (table.name, table.configs, table.about)
    assert again.samples[3] == ()
    for mine, theirs in zip(table.samples, again.samples, strict=True):
        assert theirs == pytest.approx(mine, abs=5.1e-8), "rounded to tenths of a microsecond"


def test_an_empty_about_survives(tmp_path):
    dataclasses.replace(noisy_table(2), about={}).save(tmp_path / "table.json")
    assert Table.load(tmp_path / "table.json").about == {}


def test_the_seconds_are_the_typical_of_all_samples():
    table = Table("t", (0, 1), ((1.0, 2.0, 9.0), ()))
    assert table.seconds == (1.5, None)


GOOD = {"ejkernel_table": 1, "name": "t", "about": {}, "microseconds": [[{"a": 1}, [1.0]]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "no table of timings"),
        ("{}", "no table of timings"),
        (json.dumps(GOOD | {"ejkernel_table": 2}), "format 2, this version reads 1"),
        (json.dumps(GOOD | {"name": 3}), "'name' must be a string"),
        (json.dumps(GOOD | {"microseconds": {}}), "'microseconds' a list"),
        (json.dumps(GOOD | {"microseconds": []}), "there are no configs"),
        (json.dumps(GOOD | {"microseconds": [[1, [1]], 7]}), r"microseconds\[1\] must be"),
        (json.dumps(GOOD | {"microseconds": [[1, ["fast"]]]}), r"microseconds\[0\] must be"),
        (json.dumps(GOOD | {"microseconds": [[1, [-1]]]}), r"samples\[0\] must be positive"),
        (json.dumps(GOOD | {"microseconds": [[1, [math.nan]]]}), r"samples\[0\] must be positive"),
        (json.dumps(GOOD | {"microseconds": [[1, []]]}), "every config failed"),
    ],
)
def test_a_file_that_is_no_table(tmp_path, content, message):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(TableError, match=message) as caught:
        Table.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(TableError, match=r"nowhere\.json"):
        Table.load(tmp_path / "nowhere.json")


def test_as_many_configs_as_lists_of_samples():
    with pytest.raises(TableError, match="1 configs but 2 lists of samples"):
        Table("t", (0,), ((1.0,), (2.0,)))


def test_trying_everything_finds_the_best():
    assert replay(noisy_table(), "exhaustive", 40, seed=0) == Replayed(17, 1.0, 40)


def test_the_same_seed_gives_the_same_result():
    table = noisy_table()
    once = [replay(table, "random", 8, seed) for seed in range(10)]
    assert once == [replay(table, "random", 8, seed) for seed in range(10)]
    assert len({result.chosen for result in once}) > 1, "other seeds search differently"


def test_it_stops_at_the_budget_and_at_the_end_of_the_space():
    table = noisy_table()
    assert replay(table, Exhaustive(), 7, seed=0).evaluations == 7
    assert replay(table, Exhaustive(), 7, seed=0).chosen == 6
    assert replay(table, Exhaustive(), 1000, seed=0).evaluations == 40


def test_failed_configs_are_never_chosen():
    result = replay(noisy_table(failed=(16, 17)), Exhaustive(), 40, seed=0)
    assert result == Replayed(18, 1.0, 40)


def test_a_search_that_sees_only_failures_chooses_nothing():
    assert replay(noisy_table(failed=(0, 1)), Exhaustive(), 2, seed=0) == Replayed(
        None, math.inf, 2
    )


def test_the_final_race_corrects_a_noisy_search():
    def mistakes(finalists: int) -> int:
        table = noisy_table()
        return sum(replay(table, Exhaustive(), 40, s, finalists).chosen != 17 for s in range(30))

    # 10 % lie between the best and the next; a disturbed sample takes 30 % longer.
    assert mistakes(finalists=5) < mistakes(finalists=1)


def test_several_budgets_are_stops_of_one_search():
    table = noisy_table()
    assert replay_at(table, Random(3), [20, 4], seed=3) == [
        replay(table, Random(3), 20, seed=3),
        replay(table, Random(3), 4, seed=3),
    ]


@pytest.mark.parametrize("wrong", ["evaluations", "finalists", "rounds", "batch"])
def test_numbers_below_one(wrong):
    numbers = {"evaluations": 4, "finalists": 5, "rounds": 20, "batch": 4} | {wrong: 0}
    with pytest.raises(ValueError, match=wrong):
        replay(noisy_table(), "random", seed=0, **numbers)


def test_an_unknown_strategy():
    with pytest.raises(ValueError, match="exhaustive, random, model"):
        replay(noisy_table(), "genetic", 4, seed=0)
