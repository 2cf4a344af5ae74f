"""Time functions against each other: correctness first, then interleaved rounds, with their spread.

Machines are shared and noisy, so no time stands alone: every round runs all candidates once, in an
order that changes, and what is compared are the best and the median of the same rounds.
"""

from __future__ import annotations

import dataclasses
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ejkernel.ops import Kernel

OURS = "ours"

# The threads of OpenMP, which torch uses, go on spinning for milliseconds after a call, on the
# cores of whoever is next: without a rest, our attention of 1024 took 1.15 times as long.
REST_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Our function versus others that compute the same.

    Args:
      name: what is computed, with its sizes.
      ours: our function of the arguments; the driver jits it.
      peers: the others, by name; jitted as well, unless they are marked with `outside_jax`.
      arguments: makes the arguments, when they are needed.
      limits: the largest ratio ours/peer that we promise.
      tolerance: largest difference, relative to the largest value.
      memory_limit: the largest ratio of temporary bytes that we promise.
      trace_limit: the largest ratio of the times that tracing takes that we promise.
    """

    name: str
    ours: Callable[..., Any]
    peers: Mapping[str, Callable[..., Any]]
    arguments: Callable[[], tuple[Any, ...]]
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-4
    memory_limit: Mapping[str, float] = dataclasses.field(default_factory=dict)
    trace_limit: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A call that may need so many MiB in addition to its arguments and results, and no more.

    Args:
      name: what is computed, with its sizes.
      function: of the arguments; it is compiled, and run if `check` is given.
      arguments: makes the arguments, or what is known of them, when they are needed.
      mib: the most that is promised; None: nothing is.
      check: raises unless the result, which it is given with the arguments, is right.
      compiler_knows: False if a kernel takes memory by itself: then it is run, and counted.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    mib: float | None
    check: Callable[..., None] | None = None
    compiler_knows: bool = True


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a kernel, for the benchmark of heuristics."""

    name: str
    kernel: Kernel[Any, Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one candidate in every round."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Ours versus one peer: of the bests, and the median and quartiles over the rounds."""

    peer: str
    best: float
    median: float
    low: float
    high: float
    limit: float | None
    same_program: bool = False

    @property
    def verdict(self) -> str:
        """Whether a promise is kept, by the best or by the median of the rounds.

        It is in doubt if only the fastest quarter of the rounds keeps it. If the compiler made the
        same program of both, whatever differs is noise.
        """
        if self.limit is None:
            return ""
        if self.same_program and self.limit >= 1:
            return "same program"
        if min(self.best, self.median) <= self.limit:
            return "kept"
        return "in doubt" if self.low <= self.limit else "missed"


def outside_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a peer that is no JAX function, such as one of torch: it is called as it is."""
    function.outside_jax = True  # type: ignore[attr-defined]
    return function


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call without arguments that returns when the result is there; compiled once.

    `program` is None for what is no JAX function.
    """

    call: Callable[[], Any]
    program: jax.stages.Compiled | None

    def __call__(self) -> Any:
        return self.call()


def prepared(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Prepared:
    """A function of these arguments, ready to be timed."""
    if getattr(function, "outside_jax", False):
        return Prepared(lambda: function(*arguments), None)
    compiled = jax.jit(function).lower(*arguments).compile()
    return Prepared(lambda: jax.block_until_ready(compiled(*arguments)), compiled)


def program_text(candidate: Prepared) -> str | None:
    """The compiled program, without the names that its parts have; None for what is no program."""
    if candidate.program is None:
        return None
    text = candidate.program.as_text()
    # In front of the computations stand its name and tables of source lines.
    start = re.search(r"(?m)^(?:ENTRY )?%", text)
    if start is None or "ENTRY" not in text:
        raise ValueError(f"this is not the text of a compiled program: {text[:200]!r}")
    body = re.sub(
        r', (?:metadata|frontend_attributes)=\{(?:[^{}"]|"[^"]*")*\}', "", text[start.start() :]
    )
    body = re.sub(r"(?m)^((?:ENTRY )?%\S+) \(.*\) -> ", r"\1 -> ", body)  # named parameters
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), body)


def temporary_bytes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """What the compiled program needs in addition to arguments and results."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def trace_times(comparison: Comparison, names: Iterable[str], rounds: int = 9) -> dict[str, Times]:
    """Seconds that tracing takes when nothing of it is remembered, interleaved."""
    arguments = comparison.arguments()
    functions = {OURS: comparison.ours, **{name: comparison.peers[name] for name in names}}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            jax.clear_caches()
            begin = time.perf_counter()
            jax.jit(function).trace(*arguments)
            samples[name].append(time.perf_counter() - begin)
    return {name: Times(tuple(taken)) for name, taken in samples.items()}


def check_agreement(comparison: Comparison, candidates: Mapping[str, Prepared]) -> None:
    """Raise unless all candidates give the same."""
    mine = jax.tree.leaves(candidates[OURS]())
    for name in comparison.peers:
        theirs = jax.tree.leaves(candidates[name]())
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
    candidates: Mapping[str, Callable[[], Any]],
    seconds: float = 4.0,
    rounds: tuple[int, int] = (5, 60),
) -> dict[str, Times]:
    """Interleaved rounds until the time is used up, at least and at most `rounds` of them.

    Three are enough where a single one takes longer than that: nothing that long is noise. If one
    of them is no JAX function, each waits until the threads of the one before have come to rest.
    """
    order, chance = list(candidates), random.Random(0)
    others = any(isinstance(c, Prepared) and c.program is None for c in candidates.values())
    for call in candidates.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in order}
    start = time.perf_counter()
    least = rounds[0]
    for number in range(rounds[1]):
        spent = time.perf_counter() - start
        if number == 1 and spent > seconds:
            least = min(least, 3)
        if number >= least and spent > seconds:
            break
        chance.shuffle(order)
        for name in order:
            if others:
                time.sleep(REST_SECONDS)
            begin = time.perf_counter()
            candidates[name]()
            samples[name].append(time.perf_counter() - begin)
    return {name: Times(tuple(taken)) for name, taken in samples.items()}


def ratios(times: Mapping[str, Times], limits: Mapping[str, float]) -> list[Ratio]:
    """Ours against every other candidate."""
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
    candidates = {
        name: prepared(function, arguments)
        for name, function in {OURS: comparison.ours, **comparison.peers}.items()
    }
    check_agreement(comparison, candidates)
    times = race(candidates, seconds)
    mine = program_text(candidates[OURS])
    return times, [
        dataclasses.replace(
            ratio,
            same_program=mine is not None and program_text(candidates[ratio.peer]) == mine,
        )
        for ratio in ratios(times, comparison.limits)
    ]
