"""What is to be tuned, as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .bench import Function
from .outcome import Trial


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be tuned: a function for every config, and how to know whether it is right.

    Attributes:
      name: what it is, for messages.
      make_function: gives the function of a config; it takes `args` and `kwargs`.
      args: the positional inputs to measure with.
      kwargs: those by keyword.
      candidates: the configs to try.
      reference: the truth to compare outputs with; None compares with the favourite's output, or
        not at all without a favourite.
      favourite: the config that wins ties (the heuristic one).
      reasons_against: why a config is not supported, if so.
      known: what earlier runs found out, by the config's `stable_json`.
      guard: a context manager made for each candidate, entered around its first run.
      measured: what the functions compute, for the report.
      notes: remarks to keep with the outcome.
    """

    name: str
    make_function: Callable[[Any], Function]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    candidates: Sequence[Any]
    reference: Function | None = None
    favourite: Any = None
    reasons_against: Callable[[Any], Sequence[str]] | None = None
    known: Mapping[str, Trial[Any]] = dataclasses.field(default_factory=dict)
    guard: Callable[[Any], Any] | None = None
    measured: str = "forward"
    notes: tuple[str, ...] = ()
