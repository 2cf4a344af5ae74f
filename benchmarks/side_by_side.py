"""Time functions beside each other: correctness first, then interleaved rounds, ratios with spread.

Machines are shared and noisy, so no time stands alone: every round runs all contenders once, in an
order that changes, and what is compared are the best and the median of the same rounds.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ejkernel.ops import Kernel

OURS = "ours"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Our function beside others that compute the same.

    Args:
      name: what is computed, with its sizes.
      ours: our function of the arguments; the driver jits it.
      peers: the others, by name; jitted as well, unless they are marked with `outside_jax`.
      arguments: makes the arguments, when they are needed.
      limits: the largest ratio ours/peer that we promise.
      tolerance: largest difference, relative to the largest value.
      memory_limit: the largest ratio of temporary bytes that we promise.
    """

    name: str
    ours: Callable[..., Any]
    peers: Mapping[str, Callable[..., Any]]
    arguments: Callable[[], tuple[Any, ...]]
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-4
    memory_limit: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a kernel, for the benchmark of heuristics."""

    name: str
    kernel: Kernel[Any, Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one contender in every round."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Ours beside one peer: of the bests, and the median and quartiles over the rounds."""

    peer: str
    best: float
    median: float
    low: float
    high: float
    limit: float | None

    @property
    def kept(self) -> bool:
        """True if the promise is kept, by the best or by the median of the rounds."""
        return self.limit is None or min(self.best, self.median) <= self.limit


def outside_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a peer that is no JAX function, such as one of torch: it is called as it is."""
    function.outside_jax = True  # type: ignore[attr-defined]
    return function


def prepared(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """A call without arguments that returns when the result is there."""
    if getattr(function, "outside_jax", False):
        return lambda: function(*arguments)
    compiled = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def temporary_bytes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """What the compiled program needs beside arguments and results."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def check_agreement(comparison: Comparison, arguments: tuple[Any, ...]) -> None:
    """Raise unless all contenders give the same."""
    mine = jax.tree.leaves(prepared(comparison.ours, arguments)())
    for name, peer in comparison.peers.items():
        theirs = jax.tree.leaves(prepared(peer, arguments)())
        if len(mine) != len(theirs):
            raise AssertionError(f"{comparison.name}: {name} returns {len(theirs)} arrays")
        for index, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            one, other = np.asarray(x, np.float32), np.asarray(y, np.float32)
            apart = float(np.max(np.abs(one - other), initial=0.0))
            scale = max(1.0, float(np.max(np.abs(other), initial=0.0)))
            if not apart <= comparison.tolerance * scale:
                raise AssertionError(
                    f"{comparison.name}: result {index} differs from {name} by {apart:.2g} "
                    f"(largest value {scale:.2g})"
                )


def race(
    contenders: Mapping[str, Callable[[], Any]],
    seconds: float = 4.0,
    rounds: tuple[int, int] = (5, 60),
) -> dict[str, Times]:
    """Interleaved rounds until the time is used up, at least and at most `rounds` of them."""
    order, chance = list(contenders), random.Random(0)
    for call in contenders.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in order}
    end = time.perf_counter() + seconds
    for number in range(rounds[1]):
        if number >= rounds[0] and time.perf_counter() > end:
            break
        chance.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            contenders[name]()
            samples[name].append(time.perf_counter() - begin)
    return {name: Times(tuple(taken)) for name, taken in samples.items()}


def ratios(times: Mapping[str, Times], limits: Mapping[str, float]) -> list[Ratio]:
    """Ours against every other contender."""
    mine, found = times[OURS], []
    for name, theirs in times.items():
        if name == OURS:
            continue
        by_round = sorted(a / b for a, b in zip(mine.seconds, theirs.seconds, strict=True))
        low, _, high = statistics.quantiles(by_round, n=4)
        found.append(
            Ratio(
                name,
                mine.best / theirs.best,
                statistics.median(by_round),
                low,
                high,
                limits.get(name),
            )
        )
    return found


def compare(comparison: Comparison, seconds: float = 4.0) -> tuple[dict[str, Times], list[Ratio]]:
    """Check a comparison, then time it."""
    arguments = comparison.arguments()
    check_agreement(comparison, arguments)
    contenders = {OURS: prepared(comparison.ours, arguments)} | {
        name: prepared(peer, arguments) for name, peer in comparison.peers.items()
    }
    times = race(contenders, seconds)
    return times, ratios(times, comparison.limits)
