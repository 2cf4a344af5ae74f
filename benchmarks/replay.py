"""Recorded timings of a whole space, to try search strategies on without a device."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel.ops.tuner.clock import typical
from ejkernel.ops.tuner.search.strategies import BATCH, Candidates, Strategy, strategy_of
from ejkernel.store.reading import parse_json, read_regular

FORMAT = 1
SAMPLES_PER_EVALUATION = 3  # what a search can afford for every candidate it tries


class TableError(ValueError):
    """A file or value that is no table of timings; the message says where and why."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The configs of a space and the seconds each of them took, several times.

    Samples that were taken in the same interleaved round have the same position, so that drawing
    a position for several configs draws moments of the machine that they shared.

    Attributes:
      name: what was measured.
      configs: plain JSON values; the first one is what the heuristic would choose.
      samples: seconds, one list per config; an empty one is a config that failed.
      about: where and how it was recorded.
    """

    name: str
    configs: tuple[Any, ...]
    samples: tuple[tuple[float, ...], ...]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        if not self.configs:
            raise TableError(f"{where}: there are no configs")
        if len(self.configs) != len(self.samples):
            raise TableError(
                f"{where}: {len(self.configs)} configs but {len(self.samples)} lists of samples"
            )
        for index, samples in enumerate(self.samples):
            for sample in samples:
                if not (_is_number(sample) and 0 < sample < math.inf):
                    raise TableError(
                        f"{where}: samples[{index}] must be positive seconds; got {sample!r}"
                    )
        if not any(self.samples):
            raise TableError(f"{where}: every config failed, there is nothing to choose")

    def __len__(self) -> int:
        return len(self.configs)

    @property
    def seconds(self) -> tuple[float | None, ...]:
        """The typical seconds of every config, from all of its samples; None if it failed."""
        return tuple(typical(samples) if samples else None for samples in self.samples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, in tenths of microseconds: finer is noise, and files stay small."""
        lines = [
            json.dumps([config, [round(s * 1e6, 1) for s in samples]], separators=(",", ":"))
            for config, samples in zip(self.configs, self.samples, strict=True)
        ]
        head = {"ejkernel_table": FORMAT, "name": self.name, "about": dict(self.about)}
        text = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
        text += ',\n "microseconds": [\n' + ",\n".join(lines) + "\n]}\n"
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        """Read what `save` wrote.

        Raises:
          TableError: the file is no table of this format.
        """
        where = os.fspath(path)
        try:
            plain = parse_json(read_regular(path), nan=True)
        except (OSError, ValueError) as error:
            raise TableError(f"{where}: cannot be read as JSON: {error}") from error
        if not isinstance(plain, dict) or "ejkernel_table" not in plain:
            raise TableError(f"{where}: this is no table of timings (no 'ejkernel_table')")
        if plain["ejkernel_table"] != FORMAT:
            raise TableError(
                f"{where}: format {plain['ejkernel_table']!r}, this version reads {FORMAT}"
            )
        name, about, rows = (plain.get(key) for key in ("name", "about", "microseconds"))
        if not isinstance(name, str) or not isinstance(about, dict) or not isinstance(rows, list):
            raise TableError(
                f"{where}: 'name' must be a string, 'about' an object, 'microseconds' a list"
            )
        for index, row in enumerate(rows):
            well_formed = (
                isinstance(row, list)
                and len(row) == 2
                and isinstance(row[1], list)
                and all(map(_is_number, row[1]))
            )
            if not well_formed:
                raise TableError(f"{where}: microseconds[{index}] must be [config, [numbers]]")
        try:
            return cls(
                name,
                tuple(config for config, _ in rows),
                tuple(tuple(sample * 1e-6 for sample in samples) for _, samples in rows),
                about,
            )
        except TableError as error:
            raise TableError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Replayed:
    """How a search on a table ended.

    Attributes:
      chosen: the config it chose, by its position in the table; None if all it tried failed.
      ratio: the true time of that config by the true time of the table's best one.
      evaluations: how many configs it tried.
    """

    chosen: int | None
    ratio: float
    evaluations: int


def replay(
    table: Table,
    strategy: str | Strategy,
    evaluations: int,
    seed: int,
    finalists: int = 8,
    rounds: int = 20,
    *,
    batch: int = BATCH,
) -> Replayed:
    """What a search with so many evaluations would have chosen on a recorded space.

    Args:
      table: the recorded space.
      strategy: a name, which gets the seed too, or a strategy, which has its own.
      evaluations: how many configs may be tried.
      seed: of the noise, that is of which samples are drawn.
      finalists: how many of the best are raced at the end.
      rounds: samples of each finalist in that race.
      batch: how many configs the strategy proposes at a time.
    """
    return replay_at(table, strategy, [evaluations], seed, finalists, rounds, batch=batch)[0]


def replay_at(
    table: Table,
    strategy: str | Strategy,
    budgets: Sequence[int],
    seed: int,
    finalists: int = 8,
    rounds: int = 20,
    *,
    batch: int = BATCH,
) -> list[Replayed]:
    """The same as `replay` for several budgets, as stops on the way of a single search."""
    for name, value in (("finalists", finalists), ("rounds", rounds), ("batch", batch)):
        if value < 1:
            raise ValueError(f"replay: {name}={value!r} must be at least 1")
    if not budgets or min(budgets) < 1:
        raise ValueError(f"replay: evaluations must be at least 1; got {list(budgets)}")
    strategy = strategy_of(strategy, seed)
    candidates = Candidates(table.configs)
    times = table.seconds
    best = min(seconds for seconds in times if seconds is not None)
    history: dict[int, float | None] = {}
    stops: dict[int, Replayed] = {}
    for budget in sorted(set(budgets)):
        while len(history) < budget:
            proposed = strategy.propose(candidates, history, min(batch, budget - len(history)))
            if not proposed:
                break
            for index in proposed:
                history[index] = _evaluated(table.samples[index], f"{seed} {index}")
        chosen = _winner(table, history, finalists, rounds, seed)
        seconds = None if chosen is None else times[chosen]
        ratio = math.inf if seconds is None else seconds / best
        stops[budget] = Replayed(chosen, ratio, len(history))
    return [stops[budget] for budget in budgets]


def _evaluated(samples: Sequence[float], seed: str) -> float | None:
    """The time a search sees: of few samples, hence noisy."""
    if not samples:
        return None
    return typical(random.Random(seed).choices(samples, k=SAMPLES_PER_EVALUATION))


def _winner(
    table: Table, history: Mapping[int, float | None], finalists: int, rounds: int, seed: int
) -> int | None:
    """Race the best of a search: more samples of each, from the same moments."""
    times = {index: seconds for index, seconds in history.items() if seconds is not None}
    fastest = sorted(times, key=times.__getitem__)[:finalists]
    moments = [random.Random(f"race {seed} {turn}").random() for turn in range(rounds)]

    def raced(index: int) -> float:
        samples = table.samples[index]
        return typical([samples[int(moment * len(samples))] for moment in moments])

    return min(fastest, key=raced, default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
