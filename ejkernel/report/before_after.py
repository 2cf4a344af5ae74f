"""The whole function with heuristic configs and with tuned ones: what tuning was worth."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import AutotuningResult, overlay_cache
from ..ops.core.types import ConfigKey
from ..ops.registry import find_invocation
from ..speedup import gain_of
from .record import BeforeAfter

LEAST_ROUNDS = 3


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
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    # Arguments that are given away with a call are gone after it: each run gets its own.
    donates = _donates(jitted, arguments, keywords or {})
    heuristics, notes = _heuristics(result)  # after it was traced: its calls are recorded now
    tuned = result.as_mapping()

    def run(configs: Mapping[ConfigKey, Any]) -> tuple[float, Any]:
        given = (tuple(arguments), dict(keywords or {}))
        args, kwargs = jax.block_until_ready(jax.tree.map(_copy, given)) if donates else given
        with overlay_cache(configs):
            start = time.perf_counter()
            out = jax.block_until_ready(jitted(*args, **kwargs))
            return time.perf_counter() - start, out

    difference = _difference(run(heuristics)[1], run(tuned)[1])
    before: list[float] = []
    after: list[float] = []
    start = time.perf_counter()
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        # The second of two programs reads what the first left in the caches: they take turns at it.
        for samples, configs in ((before, heuristics), (after, tuned))[:: -1 if done % 2 else 1]:
            samples.append(run(configs)[0])
    return BeforeAfter(
        what, tuple(before), tuple(after), gain_of(before, after), difference, tuple(notes)
    )


def _heuristics(result: AutotuningResult) -> tuple[dict[ConfigKey, Any], list[str]]:
    """The configs that the calls of a result would have without tuning."""
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
    names = ", ".join(dict.fromkeys(unknown))
    note = f"before and after alike, because they have no heuristic config: {names}"
    return configs, [note] if unknown else []


def _donates(jitted: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    infos = jax.tree.leaves(
        jitted.lower(*arguments, **keywords).args_info,
        is_leaf=lambda leaf: hasattr(leaf, "donated"),
    )
    return any(getattr(info, "donated", False) for info in infos)


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _difference(before: Any, after: Any) -> float | None:
    """The largest difference of two outputs, relative to the size of each array."""
    largest = None
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if not jnp.issubdtype(jnp.result_type(a), jnp.inexact) or jnp.size(a) == 0:
            continue
        difference, scale = float(jnp.max(jnp.abs(a - b))), float(jnp.max(jnp.abs(a)))
        share = difference / scale if scale else difference
        largest = share if largest is None else max(largest, share)
    return largest
