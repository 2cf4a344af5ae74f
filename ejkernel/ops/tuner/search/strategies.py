"""Which candidates of a large space to evaluate next.

A space that is too large to race is searched: a strategy proposes a few candidates, they are
evaluated, and it proposes again knowing the results. A strategy keeps nothing between proposals:
the same seed and history give the same proposal, so that a search continues after a restart.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from . import surrogate
from .surrogate import Floats

History = Mapping[int, float | None]

BATCH = 2  # proposed at a time: more would be compiled at once, fewer are chosen knowing more


class Candidates:
    """Configs as a search sees them: numbers to learn from, and who is next to whom.

    Configs may be dataclasses, mappings, tuples, single values, or any nesting of them.

    Args:
      configs: the candidates; the first one is the heuristic's choice.
    """

    def __init__(self, configs: Sequence[Any]) -> None:
        self.configs = list(configs)
        flat = [dict(_flattened(config)) for config in self.configs]
        names = dict.fromkeys(name for fields in flat for name in fields)
        # A field that some configs lack counts as None there.
        columns = {name: [fields.get(name) for fields in flat] for name in names}
        self.dimensions: dict[str, list[Any]] = {
            name: values
            for name, values in columns.items()
            if len({_category(value) for value in values}) > 1
        }

    def __len__(self) -> int:
        return len(self.configs)

    @cached_property
    def features(self) -> Floats:
        """One row per config; columns that are the same for all are left out.

        Sizes matter by their ratios, hence logarithms. What is no number gets a column per value.
        """
        columns: list[list[float]] = []
        for values in self.dimensions.values():
            sizes = [float(v) for v in values if _is_number(v)]
            if sizes:
                scale = math.log2 if min(sizes) > 0 else _signed_log
                columns.append([scale(float(v)) if _is_number(v) else 0.0 for v in values])
            categories = [None if _is_number(v) else _category(v) for v in values]
            for known in dict.fromkeys(c for c in categories if c is not None):
                columns.append([float(c == known) for c in categories])
        varied = [column for column in columns if len(set(column)) > 1]
        return np.array(varied, dtype=np.float64).T.reshape(len(self), len(varied))

    @cached_property
    def neighbours(self) -> list[list[int]]:
        """The configs that differ from each one in one dimension, by one step.

        A step goes to the nearest value that exists with all else equal, so constraints leave no
        gaps; values without an order are all one step apart.
        """
        keys = [
            tuple(_category(values[index]) for values in self.dimensions.values())
            for index in range(len(self))
        ]
        found: list[dict[int, None]] = [{} for _ in keys]
        for axis, values in enumerate(self.dimensions.values()):
            lines: dict[tuple[Any, ...], list[int]] = {}
            for index, key in enumerate(keys):
                lines.setdefault(key[:axis] + key[axis + 1 :], []).append(index)
            for line in lines.values():
                for one, other in _steps(line, values):
                    found[one][other] = found[other][one] = None
        return [sorted(near) for near in found]


@runtime_checkable
class Strategy(Protocol):
    """Proposes what to evaluate next; what it knows is its seed and the history."""

    @property
    def name(self) -> str:
        """What it is called."""

    def propose(self, candidates: Candidates, history: History, count: int) -> list[int]:
        """Up to `count` candidates that are not in the history, the most promising first.

        Args:
          candidates: the whole space.
          history: seconds by candidate; None for one that failed or was wrong.
          count: how many are wanted; fewer come back when there are no more.
        """


@dataclasses.dataclass(frozen=True)
class Exhaustive:
    """All candidates, in their order."""

    name: ClassVar[str] = "exhaustive"

    def propose(self, candidates: Candidates, history: History, count: int) -> list[int]:
        return _left(candidates, history)[: max(count, 0)]


@dataclasses.dataclass(frozen=True)
class Random:
    """Candidates in a random order, after the heuristic's choice."""

    seed: int = 0
    name: ClassVar[str] = "random"

    def propose(self, candidates: Candidates, history: History, count: int) -> list[int]:
        order = np.random.default_rng(self.seed).random(len(candidates))
        order[:1] = -1  # the heuristic's choice
        return sorted(_left(candidates, history), key=order.__getitem__)[: max(count, 0)]


@dataclasses.dataclass(frozen=True)
class ModelGuided:
    """Learns from what was evaluated: a model (`surrogate.py`) predicts the rest, the best go next.

    The first few are spread over the space, corners first, for a model knows little of what lies
    beyond what it was shown. Then half of every proposal is what the model thinks fastest, with a
    bonus for what it is unsure of; the other half are neighbours of the best so far, which need no
    trust in it.

    Needs scikit-learn, which is the extra `search`.

    Args:
      seed: of the spread and of the model.
      first: how many are spread before the model is asked.
    """

    seed: int = 0
    first: int = 6
    name: ClassVar[str] = "model"

    def propose(self, candidates: Candidates, history: History, count: int) -> list[int]:
        left = _left(candidates, history)
        if not left or count < 1:
            return []
        surrogate.check_installed()  # before anything is measured: an error should not come late
        spread = self._spread(candidates, history, min(count, self.first - len(history)))
        rest = [index for index in left if index not in spread]
        if len(spread) == count or not rest:
            return spread
        nothing_measured = all(seconds is None for seconds in history.values())
        if nothing_measured or not candidates.features.size:
            proposed = Random(self.seed).propose(candidates, history, len(candidates))
            return [*spread, *(i for i in proposed if i not in spread)][:count]
        expected = self._expected(candidates, history, rest)
        by_model = sorted(rest, key=expected.__getitem__)
        near = sorted(_near_the_best(candidates, history) & set(rest), key=expected.__getitem__)
        # Single proposals take turns, hence the parity.
        half = (count - len(spread) + len(history) % 2) // 2
        proposed = [*spread, *near[:half]]
        proposed += [index for index in by_model if index not in proposed]
        return proposed[:count]

    def _spread(self, candidates: Candidates, history: History, count: int) -> list[int]:
        """Each as far as can be from all before it; the heuristic's choice comes first."""
        if 0 not in history and count <= 0:
            count = 1
        features = surrogate.standardised(candidates.features)
        # Of several far ones the seed decides.
        jitter = np.random.default_rng(self.seed).uniform(0.75, 1.25, len(candidates))
        chosen: list[int] = []
        distance = np.full(len(candidates), np.inf)
        for index in sorted(history):
            distance = np.minimum(distance, ((features - features[index]) ** 2).sum(axis=1))
        for _ in range(min(count, len(candidates) - len(history))):
            score = distance * jitter
            score[[*history, *chosen]] = -1
            index = 0 if 0 not in history and not chosen else int(score.argmax())
            chosen.append(index)
            distance = np.minimum(distance, ((features - features[index]) ** 2).sum(axis=1))
        return chosen

    def _expected(
        self, candidates: Candidates, history: History, wanted: list[int]
    ) -> dict[int, float]:
        """An optimistic guess of the logarithm of the time of each wanted candidate."""
        known = sorted(history)
        slowest = max(seconds for seconds in history.values() if seconds is not None)
        # A failure counts as twice the slowest: the model avoids what looks like it.
        seconds = [2 * slowest if (value := history[i]) is None else value for i in known]
        guesses = surrogate.optimistic(
            candidates.features, known, np.log(seconds), wanted, seed=(self.seed, len(history))
        )
        return dict(zip(wanted, guesses.tolist(), strict=True))


STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "exhaustive": lambda seed: Exhaustive(),
    "random": Random,
    "model": ModelGuided,
}


def strategy_of(strategy: str | Strategy, seed: int = 0) -> Strategy:
    """A strategy by name; one of your own is taken as it is, with the seed it has.

    `"auto"` is the model where scikit-learn is installed, else random.
    """
    if not isinstance(strategy, str):
        if not isinstance(strategy, Strategy):
            raise TypeError(
                "a strategy is a name or an object with `name` and `propose`; "
                f"got {type(strategy).__name__}: {strategy!r}"
            )
        return strategy
    if strategy == "auto":
        strategy = "model" if importlib.util.find_spec("sklearn") else "random"
    if strategy not in STRATEGIES:
        raise ValueError(
            f"strategy={strategy!r} is not known; it is one of {', '.join(STRATEGIES)}, auto"
        )
    return STRATEGIES[strategy](seed)


def _left(candidates: Candidates, history: History) -> list[int]:
    """What was not evaluated yet."""
    for index in history:
        if not 0 <= index < len(candidates):
            raise ValueError(
                f"the history has a candidate {index}, the space has {len(candidates)} candidates; "
                "it belongs to another space"
            )
    return [index for index in range(len(candidates)) if index not in history]


def _near_the_best(candidates: Candidates, history: History) -> set[int]:
    """The neighbours of the three fastest so far: with noise, the fastest may not be the best."""
    times = {index: seconds for index, seconds in history.items() if seconds is not None}
    fastest = sorted(times, key=lambda index: (times[index], index))[:3]
    return {near for index in fastest for near in candidates.neighbours[index]}


def _flattened(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The single values in a config, each with the path to it."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        parts = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    elif isinstance(config, Mapping):
        parts = [(str(key), value) for key, value in config.items()]
    elif isinstance(config, (tuple, list)):
        parts = [(str(index), value) for index, value in enumerate(config)]
    else:
        yield path, config
        return
    for name, value in parts:
        yield from _flattened(value, f"{path}.{name}")


def _is_number(value: Any) -> bool:
    """Something with a size; an enum is a name even if it is an int, and NaN has no size."""
    return (
        isinstance(value, numbers.Real)
        and not isinstance(value, enum.Enum)
        and math.isfinite(value)
    )


def _category(value: Any) -> Any:
    """What makes two values the same one. (1, 1.0 and True are: they have the same size.)"""
    return float(value) if _is_number(value) else repr(value)


def _signed_log(value: float) -> float:
    """Logarithmic like log2 for large values, and defined for 0 and negative ones."""
    return math.copysign(math.log2(1 + abs(value)), value)


def _steps(line: list[int], values: list[Any]) -> Iterator[tuple[int, int]]:
    """The pairs of a line of configs that are one step apart."""
    sizes = sorted({float(values[i]) for i in line if _is_number(values[i])})
    rank = {size: position for position, size in enumerate(sizes)}
    for one, other in itertools.combinations(line, 2):
        a, b = values[one], values[other]
        if _is_number(a) and _is_number(b):
            if abs(rank[float(a)] - rank[float(b)]) == 1:
                yield one, other
        elif _category(a) != _category(b):
            yield one, other
