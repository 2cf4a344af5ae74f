"""How often a traced program calls each labelled operation."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from ..utils.meta import ATTRIBUTE


def count_calls(jaxpr: Any) -> dict[str, int]:
    """The calls of each label when the program runs once.

    The body of a `scan` counts as often as it runs. Of a `while` loop nobody knows how often it
    runs, so what it calls is left out. Each branch of a `cond` counts once. What a backward pass
    computes again belongs to the call that was made forward.
    """
    differentiated: collections.Counter[str] = collections.Counter()
    plain: collections.Counter[str] = collections.Counter()
    unknown: set[str] = set()
    _count(getattr(jaxpr, "jaxpr", jaxpr), 1, plain, differentiated, unknown)
    # What JAX moves out of a differentiated loop is a part of a call that is counted there.
    counts = dict(plain) | dict(differentiated)
    return {label: calls for label, calls in counts.items() if label not in unknown}


def _count(
    jaxpr: Any,
    times: int,
    counts: collections.Counter[str],
    differentiated: collections.Counter[str],
    unknown: set[str],
) -> None:
    for equation in jaxpr.eqns:
        stack = str(equation.source_info.name_stack)
        if "transpose(" in stack or "rematted" in stack:
            continue
        now = differentiated if "jvp(" in stack else counts
        label = _label(equation)
        # A call is one jitted function; what stands in it is labelled too.
        if label is not None and "jaxpr" in equation.params:
            # Differentiating a loop moves what depends on no argument in front of it, if only
            # an empty call.
            if equation.invars and equation.outvars:
                now[label] += times
            continue
        if equation.primitive.name == "while":
            inside: collections.Counter[str] = collections.Counter()
            for inner in _inner(equation):
                _count(inner, 1, inside, inside, unknown)
            unknown.update(inside)
            continue
        repeated = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in _inner(equation):
            _count(inner, times * repeated, now, differentiated, unknown)


def _label(equation: Any) -> str | None:
    stamp = (getattr(equation.ctx, "xla_metadata", None) or {}).get(ATTRIBUTE)
    return None if stamp is None else str(stamp).partition(" ")[0]


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item
