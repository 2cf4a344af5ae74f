"""Which candidates of a large space to evaluate next.

A space that is too large to race is searched: a strategy proposes a few candidates, they are
evaluated, and it proposes again knowing the results. A strategy keeps nothing between proposals:
the same seed and history give the same proposal, so that a search continues after a restart.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
History = Mapping[int, float | None]


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

    name: str

    def propose(self, candidates: Candidates, history: History, count: int) -> list[int]:
        """Up to `count` candidates that are not in the history, the most promising first.

        Args:
          candidates: the whole space.
          history: seconds by candidate; None for one that failed or was wrong.
          count: how many are wanted; fewer come back when there are no more.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Exhaustive:
    """All candidates, in their order."""

    name = "exhaustive"

    def propose(self, candidates: Candidates, history: History, count: int) -> list[int]:
        left = (index for index in range(len(candidates)) if index not in history)
        return list(itertools.islice(left, max(count, 0)))


@dataclasses.dataclass(frozen=True)
class Random:
    """Candidates in a random order, after the heuristic's choice."""

    seed: int = 0
    name = "random"

    def propose(self, candidates: Candidates, history: History, count: int) -> list[int]:
        order = 1 + np.random.default_rng(self.seed).permutation(max(len(candidates) - 1, 0))
        left = (int(i) for i in (0, *order) if i < len(candidates) and i not in history)
        return list(itertools.islice(left, max(count, 0)))


STRATEGIES = {"exhaustive": Exhaustive, "random": Random}


def strategy_of(name: str | Strategy, seed: int = 0) -> Strategy:
    """A strategy by name."""
    return Random(seed) if isinstance(name, str) else name


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
