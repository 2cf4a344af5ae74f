"""Search strategies: what they see of configs, what they propose, how good they are."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import importlib.util
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.replay import Table, replay
from ejkernel.ops.tuner.search.strategies import (
    Candidates,
    Exhaustive,
    ModelGuided,
    Random,
    Strategy,
    strategy_of,
)

TABLES = sorted((Path(__file__).parents[3] / "benchmarks" / "tables").glob("*.json"))
needs_model = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="needs the extra search"
)
STRATEGIES = [Exhaustive(), Random(1), pytest.param(ModelGuided(1), marks=needs_model)]


class Variant(enum.Enum):
    LOOP = 1
    UNROLLED = 2


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int
    variant: Variant = Variant.LOOP


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    fused: bool = False
    constant: str = "same"


# --- what a search sees of configs ----------------------------------------------------------------


def test_sizes_are_logarithms_and_flags_are_zero_or_one():
    features = Candidates([Outer(Inner(8)), Outer(Inner(32), fused=True)]).features
    assert features.tolist() == [[3.0, 0.0], [5.0, 1.0]]


def test_names_get_a_column_each():
    features = Candidates(["a", "b", "c", "a"]).features
    assert features.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_enums_are_names_even_with_numbers():
    assert Candidates([Variant.LOOP, Variant.UNROLLED]).features.shape == (2, 2)


def test_zero_and_negative_numbers_keep_their_order():
    column = Candidates([-8, -1, 0, 1, 8]).features[:, 0]
    assert all(np.diff(column) > 0)
    assert np.isfinite(column).all()


def test_a_number_or_nothing_has_a_size_and_a_flag():
    features = Candidates([{"stages": 2}, {"stages": 8}, {"stages": None}]).features
    assert features.tolist() == [[1, 0], [3, 0], [0, 1]]


def test_nan_and_infinity_are_names():
    assert np.isfinite(Candidates([1.0, math.inf, math.nan]).features).all()


def test_configs_of_different_shape():
    candidates = Candidates([{"kind": "a", "block": 4}, {"kind": "b", "tile": (2, 8)}])
    assert set(candidates.dimensions) == {".kind", ".block", ".tile.0", ".tile.1"}
    assert np.isfinite(candidates.features).all()


def test_tuples_and_named_tuples():
    Pair = collections.namedtuple("Pair", "a b")
    expected = [[0.0, 1.0], [1.0, 0.0]]
    assert Candidates([(1, 2), (2, 1)]).features.tolist() == expected
    assert Candidates([Pair(1, 2), Pair(2, 1)]).features.tolist() == expected


def test_a_single_config_and_none_at_all():
    assert Candidates([Outer(Inner(8))]).features.shape == (1, 0)
    assert Candidates([Outer(Inner(8))]).neighbours == [[]]
    assert Candidates([]).features.shape == (0, 0)
    assert Candidates([]).neighbours == []


def test_neighbours_differ_in_one_dimension_by_one_step():
    configs = [(a, b) for a in (1, 2, 4) for b in ("x", "y", "z")]
    near = Candidates(configs).neighbours[configs.index((1, "x"))]
    assert [configs[i] for i in near] == [(1, "y"), (1, "z"), (2, "x")]


def test_a_step_goes_over_what_constraints_left_out():
    configs = [(1, 1), (8, 1), (2, 2), (4, 2)]
    assert Candidates(configs).neighbours == [[1], [0], [3], [2]]


def test_equal_configs_are_no_neighbours():
    assert Candidates([4, 4, 8]).neighbours == [[2], [2], [0, 1]]


# --- what every strategy does ---------------------------------------------------------------------


def bowl(config: tuple[int, int]) -> float | None:
    """Fastest at (64, 16); blocks that are too large together fail."""
    a, b = config
    if a * b > 2**14:
        return None
    return 1e-3 * (1 + 0.2 * (math.log2(a) - 6) ** 2 + 0.3 * (math.log2(b) - 4) ** 2)


BOWL = Candidates([(2**a, 2**b) for a in range(12) for b in range(12)])


def searched(strategy, candidates, evaluations, batch, history=()):
    history = dict(history)
    while len(history) < evaluations:
        proposed = strategy.propose(candidates, history, min(batch, evaluations - len(history)))
        if not proposed:
            break
        history |= {index: bowl(candidates.configs[index]) for index in proposed}
    return history


@pytest.mark.parametrize("strategy", STRATEGIES)
class TestEveryStrategy:
    def test_is_one(self, strategy):
        assert isinstance(strategy, Strategy)
        assert strategy_of(strategy) is strategy
        assert type(strategy_of(strategy.name)) is type(strategy)

    def test_starts_with_the_heuristic(self, strategy):
        assert strategy.propose(BOWL, {}, 1) == [0]
        assert strategy.propose(BOWL, {}, 5)[0] == 0
        assert strategy.propose(BOWL, {4: 1.0}, 5)[0] == 0

    def test_proposes_new_ones_once_until_there_are_no_more(self, strategy):
        small = Candidates(BOWL.configs[::8])
        history = searched(strategy, small, evaluations=1000, batch=5)
        assert sorted(history) == list(range(18))
        assert strategy.propose(small, history, 5) == []

    def test_gives_as_many_as_asked(self, strategy):
        history = {index: bowl(BOWL.configs[index]) for index in range(0, 144, 7)}
        for count in (0, 1, 3, 40):
            proposed = strategy.propose(BOWL, history, count)
            assert len(proposed) == len(set(proposed)) == count
            assert not set(proposed) & set(history)
        assert len(strategy.propose(BOWL, history, 1000)) == 144 - len(history)

    def test_proposals_are_plain_integers(self, strategy):
        assert {type(index) for index in strategy.propose(BOWL, {}, 20)} == {int}

    def test_a_search_continues_from_its_history(self, strategy):
        whole = searched(strategy, BOWL, evaluations=24, batch=4)
        half = dict(list(whole.items())[:12])
        # In another order, as a file might give it back.
        again = searched(strategy, BOWL, 24, 4, history=reversed(half.items()))
        assert again == whole

    def test_a_space_of_one(self, strategy):
        one = Candidates(["only"])
        assert strategy.propose(one, {}, 3) == [0]
        assert strategy.propose(one, {0: 1.0}, 3) == []
        assert strategy.propose(Candidates([]), {}, 3) == []

    def test_survives_failures_only(self, strategy):
        history: dict[int, float | None] = {}
        for _ in range(8):
            history |= dict.fromkeys(strategy.propose(BOWL, history, 4))
        assert len(history) == 32

    def test_survives_equal_times_and_configs(self, strategy):
        same = Candidates([1] * 30)
        history: dict[int, float | None] = {}
        for _ in range(10):
            history |= dict.fromkeys(strategy.propose(same, history, 3), 1.0)
        assert sorted(history) == list(range(30))

    def test_a_history_of_another_space_is_an_error(self, strategy):
        with pytest.raises(ValueError, match=r"candidate 500.*144 candidates"):
            strategy.propose(BOWL, {500: 1.0}, 1)


def test_exhaustive_keeps_the_order():
    assert Exhaustive().propose(BOWL, {1: 1.0}, 3) == [0, 2, 3]


def test_random_depends_on_the_seed_only():
    assert Random(1).propose(BOWL, {}, 9) == Random(1).propose(BOWL, {}, 9)
    assert Random(1).propose(BOWL, {}, 9) != Random(2).propose(BOWL, {}, 9)


# --- names ----------------------------------------------------------------------------------------


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"'genetic'.*exhaustive, random, model, auto"):
        strategy_of("genetic")


def test_something_that_is_no_strategy():
    with pytest.raises(TypeError, match=r"a name or an object with `name` and `propose`.*7"):
        strategy_of(7)


def test_names_take_the_seed():
    assert strategy_of("random", seed=5) == Random(5)
    assert strategy_of("model", seed=5) == ModelGuided(5)


@needs_model
def test_auto_is_the_model_where_it_can_run():
    assert strategy_of("auto", seed=3) == ModelGuided(3)


@pytest.fixture
def without_sklearn(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "sklearn":
            monkeypatch.delitem(sys.modules, name)
    find_spec, import_ = importlib.util.find_spec, builtins.__import__

    def missing(name, *args, **kwargs):
        if name.partition(".")[0] == "sklearn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "sklearn" else find_spec(name)
    )


@pytest.mark.usefixtures("without_sklearn")
def test_auto_is_random_without_scikit_learn():
    assert strategy_of("auto", seed=3) == Random(3)


@pytest.mark.usefixtures("without_sklearn")
def test_the_model_without_scikit_learn_names_the_extra():
    with pytest.raises(ImportError, match=r"pip install '\.\[search\]'"):
        ModelGuided().propose(BOWL, {0: 1.0}, 1)


# --- how good they are ----------------------------------------------------------------------------


@needs_model
def test_the_model_learns_where_configs_fail():
    failures = [
        sum(value is None for value in searched(strategy, BOWL, 40, 4).values())
        for strategy in (ModelGuided(0), Random(0))
    ]
    assert failures[0] < failures[1] / 2


@needs_model
def test_the_model_finds_the_bottom_of_a_bowl():
    for seed in range(5):
        times = searched(ModelGuided(seed), BOWL, 40, 4).values()
        assert min(time for time in times if time is not None) <= 1.35e-3, f"seed {seed}"


@needs_model
def test_the_model_beats_chance_on_recorded_spaces():
    def mean_ratio(strategy: str) -> float:
        return statistics.fmean(
            replay(table, strategy, 24, seed).ratio for table in tables for seed in range(4)
        )

    tables = [Table.load(path) for path in TABLES]
    model, chance = mean_ratio("model"), mean_ratio("random")
    assert model <= 1.15
    assert model - 1 < (chance - 1) / 2


@needs_model
@pytest.mark.parametrize("evaluated", [40, 200], ids=["few", "many"])
def test_both_models_see_where_the_unknown_is_fast(evaluated):
    """A Gaussian process learns from few, a forest from many."""
    configs = [(2**a, 2**b) for a in range(20) for b in range(20)]
    candidates = Candidates(configs)
    seconds = [1 + (math.log2(a) - 14) ** 2 + (math.log2(b) - 3) ** 2 for a, b in configs]
    far = [i for i, (a, b) in enumerate(configs) if abs(math.log2(a) - 14) > 1]
    known = np.random.default_rng(0).permutation(far)[:evaluated]
    history = {0: seconds[0]} | {int(index): seconds[index] for index in known}
    model = ModelGuided(seed=1)
    proposed = model.propose(candidates, history, 4)
    assert proposed == model.propose(candidates, history, 4)
    unknown = sorted(seconds[i] for i in range(len(configs)) if i not in history)
    assert min(seconds[i] for i in proposed) <= unknown[len(unknown) // 20]
