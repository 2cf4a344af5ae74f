"""The whole function with different configs, interleaved: what tuning was worth."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import AutotuningResult, overlay_cache
from ..ops.core.types import ConfigKey
from ..ops.execution.whole_function import WholeFunction
from ..ops.registry import find_invocation
from ..speedup import gain_of
from .record import BeforeAfter, Gain

LEAST_ROUNDS = 3
CLAIM_ROUNDS = 9  # fewer say little of the noise: no claim is made from them
MOST_ROUNDS = 1000
NO_DIFFERENCE = 0.01  # a confidence interval within this of 1 says that nothing changed

Configs = Mapping[ConfigKey, Any]


def before_and_after(
    function: Callable[..., Any],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    result: AutotuningResult,
    rounds: int = 9,
    seconds: float = 60.0,
    what: str = "the whole model",
) -> BeforeAfter:
    """Run a function with the heuristic configs and with a result's, interleaved, and compare.

    Args:
      function: what was tuned; it is jitted unless it is already.
      arguments: what it is called with.
      keywords: likewise.
      result: the tuned configs.
      rounds: most runs of each.
      seconds: begin no round after this time; three are always run.
      what: a name for the report.
    """
    if rounds < 1:
        raise ValueError(f"before_and_after: rounds={rounds!r} must be 1 or more")
    whole = WholeFunction(function, arguments, keywords, what)
    whole.lowered  # noqa: B018  its calls are recorded now, so their heuristic configs are known
    heuristics, notes = heuristic_configs(result)
    tuned = result.as_mapping()
    difference = difference_of(run(whole, heuristics)[1], run(whole, tuned)[1])
    before, after = interleaved(
        [lambda: run(whole, heuristics)[0], lambda: run(whole, tuned)[0]],
        rounds=rounds,
        seconds=seconds,
    )
    return BeforeAfter(
        what, tuple(before), tuple(after), gain_of(before, after), difference, tuple(notes)
    )


def run(whole: WholeFunction, configs: Configs) -> tuple[float, Any]:
    """Seconds of one run of a function with these configs, and what it returned."""
    with overlay_cache(configs):
        return whole.timed()


def interleaved(
    runs: Sequence[Callable[[], float]],
    *,
    rounds: int = MOST_ROUNDS,
    seconds: float,
    enough: Callable[[list[list[float]]], bool] = lambda _: False,
) -> list[list[float]]:
    """The times of each run, taken in turns.

    Args:
      runs: each runs something once and gives its seconds.
      rounds: most runs of each.
      seconds: begin no round after this time; three are always run.
      enough: asked after each round, with the times so far, whether they tell what they should.
    """
    samples: list[list[float]] = [[] for _ in runs]
    start = time.perf_counter()
    for done in range(rounds):
        if done >= LEAST_ROUNDS and (time.perf_counter() - start > seconds or enough(samples)):
            break
        # The second of two programs reads what the first left in the caches: they take turns at it.
        for i in range(len(runs))[:: -1 if done % 2 else 1]:
            samples[i].append(runs[i]())
    return samples


def is_settled(gain: Gain, rounds: int) -> bool:
    """True if a confidence interval is narrower than the change that it claims.

    Or if it says that there is none worth a word.

    >>> is_settled(Gain(1.10, 1.08, 1.12), 9), is_settled(Gain(1.10, 1.02, 1.18), 9)
    (True, False)
    >>> is_settled(Gain(1.00, 0.995, 1.004), 9)
    True
    """
    if rounds < CLAIM_ROUNDS:
        return False
    if 1 - NO_DIFFERENCE <= gain.low <= gain.high <= 1 + NO_DIFFERENCE:
        return True
    return gain.is_real and gain.high - gain.low < abs(gain.times - 1)


def heuristic_configs(result: AutotuningResult) -> tuple[dict[ConfigKey, Any], list[str]]:
    """The configs that the calls of a result have without tuning, and remarks."""
    configs, unknown = {}, []
    for entry in result.entries:
        cfg = None if entry.outcome is None else entry.outcome.heuristic
        inv = find_invocation(entry.op_id, entry.call_key, result.device)
        if cfg is None and inv is not None and inv.kernel is not None:
            with contextlib.suppress(NotImplementedError):
                cfg = inv.kernel.heuristic(inv)
        if cfg is None:
            unknown.append(entry.op_id)
        else:
            configs[ConfigKey(result.device, entry.op_id, entry.call_key)] = cfg
    return configs, without_before(unknown)


def without_before(operations: Iterable[str]) -> list[str]:
    """The remark about operations that nobody knows another config of."""
    names = ", ".join(dict.fromkeys(operations))
    note = f"before and after alike, because they have no heuristic config: {names}"
    return [note] if names else []


def difference_of(before: Any, after: Any) -> float | None:
    """The largest difference of two outputs, relative to the size of each array."""
    largest = None
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if not jnp.issubdtype(jnp.result_type(a), jnp.inexact) or jnp.size(a) == 0:
            continue
        difference, scale = float(jnp.max(jnp.abs(a - b))), float(jnp.max(jnp.abs(a)))
        share = difference / scale if scale else difference
        largest = share if largest is None else max(largest, share)
    return largest
