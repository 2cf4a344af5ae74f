"""The space of an operation's configs: its dimensions, and maps of two of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..formatting import Value, flat
from .record import Candidate, Operation

MOST_MAPS = 6
MOST_DIMENSIONS = 16  # that maps are drawn of: a record may have any number
MOST_VALUES = 32  # of one dimension; a larger map cannot be read
ROUNDS_OF_FITTING = 12
LEAST_TIMED = 8  # candidates with a time, before anything is said about what mattered


def dimensions(operation: Operation) -> list[str]:
    """The dimensions in which the candidates differ; the one that matters most first."""
    every = [flat(candidate.config) for candidate in operation.candidates]
    names = dict.fromkeys(name for fields in every for name in fields)
    varying = [name for name in names if len({str(fields.get(name)) for fields in every}) > 1]
    timed = [(flat(c.config), c.seconds) for c in operation.candidates if c.seconds]
    return sorted(varying, key=lambda name: -_importance(name, timed))


def importances(operation: Operation) -> list[tuple[str, float]] | None:
    """The share of the variance of log time that is the effect of each dimension, largest first.

    The effects are those of the sum that fits the logarithms best, one for each value of each
    dimension; what chance alone would give them is taken off. What is left to 1 is combinations of
    dimensions, and noise. None if too few candidates have a time to tell.
    """
    timed = [(flat(c.config), math.log(c.seconds)) for c in operation.candidates if c.seconds]
    groups: dict[str, list[list[int]]] = {}
    for name in dimensions(operation)[:MOST_DIMENSIONS]:
        members: dict[str, list[int]] = {}
        for place, (fields, _) in enumerate(timed):
            members.setdefault(str(fields.get(name)), []).append(place)
        if len(members) > 1:  # else all that were measured have the same value
            groups[name] = list(members.values())
    free = len(timed) - 1 - sum(len(values) - 1 for values in groups.values())
    if len(timed) < LEAST_TIMED or free < len(timed) / 4:
        return None
    middle = statistics.fmean(log for _, log in timed)
    differences = [log - middle for _, log in timed]
    rest, total = list(differences), sum(difference**2 for difference in differences)
    effects = {name: [0.0] * len(timed) for name in groups}
    for _ in range(ROUNDS_OF_FITTING):
        for name, values in groups.items():
            for places in values:
                change = statistics.fmean(rest[place] for place in places)
                for place in places:
                    rest[place] -= change
                    effects[name][place] += change
    left = sum(value * value for value in rest)
    if total <= 0:
        return [(name, 0.0) for name in groups]
    shares = {
        # Its product with the differences: of all dimensions together, what they explain.
        name: max(
            0.0,
            sum(map(operator.mul, effects[name], differences)) / total
            - (len(groups[name]) - 1) * (left / free) / total,
        )
        for name in groups
    }
    most = max(sum(shares.values()), 1 - left / total) or 1.0  # some may have been below zero
    return sorted(
        ((name, share * (1 - left / total) / most) for name, share in shares.items()),
        key=lambda pair: -pair[1],
    )


def _importance(name: str, timed: Sequence[tuple[dict[str, Value], float]]) -> float:
    """How much of the differences in time this dimension explains by itself, 0 to 1.

    Corrected for its number of values: one value per candidate would explain everything.
    """
    groups: dict[str, list[float]] = {}
    for fields, seconds in timed:
        groups.setdefault(str(fields.get(name)), []).append(math.log(seconds))
    logs = [log for group in groups.values() for log in group]
    count, kinds = len(logs), len(groups)
    if count <= kinds or kinds < 2:
        return 0.0
    middle = statistics.fmean(logs)
    total = sum((log - middle) ** 2 for log in logs)
    inside = sum((log - statistics.fmean(group)) ** 2 for group in groups.values() for log in group)
    if total <= 0:
        return 0.0
    return max(0.0, 1 - (inside / (count - kinds)) / (total / (count - 1)))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of a map: the best candidate with these two values, and how many there are.

    `chosen` is the config that was chosen, if it is one of them; it need not be the fastest.
    """

    candidate: Candidate
    count: int
    chosen: Candidate | None = None


@dataclasses.dataclass(frozen=True)
class Map:
    """The times over two dimensions; where there are more, the best over the others."""

    down: str
    across: str
    rows: tuple[Value, ...]
    columns: tuple[Value, ...]
    cells: Mapping[tuple[Value, Value], Cell]
    best_of_others: bool


def maps(operation: Operation) -> list[Map]:
    """Maps of pairs of dimensions, the most telling first. None if there are no two dimensions.

    Dimensions of one part of a config (`fwd.q`, `fwd.kv`) belong together and come first; then
    those that matter and whose combinations were tried.
    """
    names = dimensions(operation)
    fields = [(flat(candidate.config), candidate) for candidate in operation.candidates]
    timed = [(config, c.seconds) for config, c in fields if c.seconds]
    weight = {name: _importance(name, timed) for name in names[:MOST_DIMENSIONS]}
    found = []
    for a, b in itertools.combinations(weight, 2):
        drawn = _map(operation.config, fields, a, b, len(names) > 2)
        if drawn is None:
            continue
        tried = sum(cell.candidate.seconds is not None for cell in drawn.cells.values())
        share = tried / (len(drawn.rows) * len(drawn.columns))
        together = a.rpartition(".")[0] == b.rpartition(".")[0]
        found.append(((together, (weight[a] + weight[b]) * share, share), drawn))
    found.sort(key=lambda pair: pair[0], reverse=True)
    return [drawn for _, drawn in found[:MOST_MAPS]]


def _map(
    config: Any,
    candidates: Sequence[tuple[dict[str, Value], Candidate]],
    a: str,
    b: str,
    more: bool,
) -> Map | None:
    down, across = sorted((a, b))
    cells: dict[tuple[Value, Value], Cell] = {}
    for fields, candidate in candidates:
        place = (fields.get(down), fields.get(across))
        old = cells.get(place, Cell(candidate, 0))
        best = min(old.candidate, candidate, key=_rank)
        chosen = candidate if candidate.config == config else old.chosen
        cells[place] = Cell(best, old.count + 1, chosen)
    rows, columns = (tuple(sorted({place[i] for place in cells}, key=_order)) for i in (0, 1))
    small = len(rows) <= MOST_VALUES and len(columns) <= MOST_VALUES
    return Map(down, across, rows, columns, cells, more) if small else None


def _rank(candidate: Candidate) -> tuple[int, float]:
    """Measured before refused before not tried: what is known says more."""
    if candidate.seconds is not None:
        return (0, candidate.seconds)
    return (2, 0.0) if candidate.verdict == "not tried" else (1, 0.0)


def _order(value: Value) -> tuple[int, float, str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (0, value, "")  # as it is: an integer may be larger than any float
    return (1, 0.0, str(value))
