"""What the forward pass of a partitioned call leaves for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ...core.partitioning import Shards

Local = Callable[[Shards | None, Sequence[Any]], list[Any]]
"""The outputs of a call from a device's arrays (or the whole ones), as a list."""


class Recomputed:
    """Nothing: the backward pass is given the arguments, and computes the forward pass again."""

    def __init__(self, local: Local, wanted: tuple[int, ...], count: int) -> None:
        self._local = local
        self._wanted = wanted
        self.arguments = tuple(range(count))

    def forward(self, shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
        """The outputs, computed as `pullback` does it: a compiler then can merge the two."""
        return _vjp(self._local, shards, arrays, self._wanted)[0]

    def pullback(self, shards: Shards | None, arrays: Sequence[Any]) -> Callable[[Any], Any]:
        """The function from gradients of outputs to those of the wanted arguments."""
        return _vjp(self._local, shards, arrays, self._wanted)[1]


class Kept:
    """The residuals of each device, whatever their shapes, and those arguments that are needed."""

    def __init__(self, local: Local, wanted: tuple[int, ...]) -> None:
        self._local = local
        self._wanted = wanted
        self._structure: Any = None
        self._argument_at: dict[int, int] = {}  # of the residuals that are arguments

    @property
    def arguments(self) -> tuple[int, ...]:
        """Which arguments the backward pass needs."""
        return tuple(sorted(set(self._argument_at.values())))

    def forward(self, shards: Shards | None, arrays: Sequence[Any]) -> list[Any]:
        """The outputs, and what a device keeps."""
        leaves, pull = _vjp(self._local, shards, arrays, self._wanted)
        residuals, structure = jax.tree.flatten(pull)
        if self._structure is None:  # JAX may trace more than once, with the same result
            place = {id(array): i for i, array in enumerate(arrays)}
            found = enumerate(map(id, residuals))
            self._argument_at = {i: place[which] for i, which in found if which in place}
            self._structure = structure
        own = [r[None] for i, r in enumerate(residuals) if i not in self._argument_at]
        return [*leaves, *own]

    def pullback(self, shards: Shards | None, saved: Sequence[Any]) -> Callable[[Any], Any]:
        """The function from gradients of outputs to those of the wanted arguments."""
        arguments = dict(zip(self.arguments, saved, strict=False))
        own = iter(saved[len(arguments) :])
        residuals = [
            arguments[self._argument_at[i]] if i in self._argument_at else next(own)[0]
            for i in range(self._structure.num_leaves)
        ]
        pull: Callable[[Any], Any] = jax.tree.unflatten(self._structure, residuals)
        return pull


def _vjp(
    local: Local, shards: Shards | None, arrays: Sequence[Any], wanted: tuple[int, ...]
) -> tuple[list[Any], Callable[[Any], Any]]:
    """The outputs and the pullback, with respect to the wanted arrays."""

    def of_wanted(*some: Any) -> list[Any]:
        full = list(arrays)
        for i, value in zip(wanted, some, strict=True):
            full[i] = value
        return local(shards, full)

    return jax.vjp(of_wanted, *(arrays[i] for i in wanted))
