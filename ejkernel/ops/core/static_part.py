"""Split a pytree into what JAX traces (arrays) and what is fixed when the program is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ..utils.fingerprint import is_array


@dataclasses.dataclass(frozen=True)
class StaticPart:
    """The fixed part of a pytree; `merge` puts arrays back in their places."""

    structure: Any
    fixed: tuple[Any, ...]  # one per leaf; `ARRAY` where an array belongs

    def merge(self, arrays: Any) -> Any:
        """The original pytree with these arrays in it."""
        supply = iter(arrays)
        leaves = [next(supply) if leaf is ARRAY else leaf for leaf in self.fixed]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def array_positions(self) -> tuple[int, ...]:
        """The indices, among all leaves, of those that are arrays."""
        return tuple(i for i, leaf in enumerate(self.fixed) if leaf is ARRAY)


class _Array:
    def __repr__(self) -> str:
        return "<array>"


ARRAY = _Array()
"""Stands where an array belongs."""


def split(tree: Any, is_data: Callable[[Any], bool] = is_array) -> tuple[list[Any], StaticPart]:
    """The arrays (or whatever `is_data` says) of a pytree, in order, and everything else."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_data(leaf)]
    fixed = tuple(ARRAY if is_data(leaf) else leaf for leaf in leaves)
    return arrays, StaticPart(structure, fixed)
