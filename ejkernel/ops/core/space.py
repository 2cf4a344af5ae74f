"""A declared space of configs: dimensions with their values, and constraints between them."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Constraint = Callable[..., bool]


class Space:
    """All combinations of some values that meet some constraints; iterating gives configs.

    Use it as a kernel's `config_space`, as a class attribute or returned by the method::

        config_space = Space(block_q=[64, 128, 256], block_k=[64, 128],
                             where=lambda block_q, block_k: block_q >= block_k)

    A dimension is named after a field of the config; `"fwd.q_blocksize"` (given with `**{…}`) names
    a field of a nested dataclass. A constraint takes dimensions by name, and `inv` for the
    invocation if it asks for it.

    Args:
      config_type: the config class; a kernel fills in its own.
      where: one constraint, or several.
      base: a config that gives the fields which are no dimensions; default `config_type()`.
      dimensions: the values of each field.

    >>> space = Space(dict, a=[1, 2, 3], b=[1, 2], where=lambda a, b: a > b)
    >>> list(space)
    [{'a': 2, 'b': 1}, {'a': 3, 'b': 1}, {'a': 3, 'b': 2}]
    """

    def __init__(
        self,
        config_type: Any = None,
        /,
        *,
        where: Constraint | Sequence[Constraint] = (),
        base: Any = None,
        inv: Any = None,
        **dimensions: Iterable[Any],
    ) -> None:
        self.config_type = config_type
        self.base = base
        self.inv = inv
        self.constraints = (where,) if callable(where) else tuple(where)
        self.dimensions: dict[str, tuple[Any, ...]] = {}
        if not dimensions:
            raise ValueError("Space: there are no dimensions; give at least one field=[values]")
        for name, values in dimensions.items():
            if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
                raise TypeError(f"Space: {name}={values!r} must be a list of values")
            distinct = tuple(dict.fromkeys(values))
            if not distinct:
                raise ValueError(f"Space: the dimension {name!r} has no values")
            self.dimensions[name] = distinct
        for constraint in self.constraints:
            _constraint_names(constraint, self.dimensions)

    def __call__(self, inv: Any = None) -> Space:
        """The space for an invocation: this is what makes it usable as `config_space`."""
        return self._with(inv=inv)

    def of(self, config_type: Any, base: Any = None) -> Space:
        """The same space with a config class, unless it has one of its own."""
        return self._with(
            config_type=self.config_type or config_type, base=self.base if self.base else base
        )

    def _with(self, **changes: Any) -> Space:
        copy = object.__new__(Space)
        copy.__dict__.update({**self.__dict__, **changes})
        return copy

    @property
    def size(self) -> int:
        """How many combinations there are before constraints."""
        return math.prod(len(values) for values in self.dimensions.values())

    def points(self) -> Iterator[dict[str, Any]]:
        """The combinations that meet every constraint, as dictionaries."""
        names = list(self.dimensions)
        checks = [(c, _constraint_names(c, self.dimensions)) for c in self.constraints]
        for values in itertools.product(*self.dimensions.values()):
            point = dict(zip(names, values, strict=True))
            known = {**point, "inv": self.inv}
            if all(check(**{name: known[name] for name in wanted}) for check, wanted in checks):
                yield point

    def __iter__(self) -> Iterator[Any]:
        empty = True
        for point in self.points():
            empty = False
            yield self.config(point)
        if empty:
            raise ValueError(
                f"Space: the constraints exclude all {self.size} combinations of "
                f"{', '.join(self.dimensions)}"
            )

    def config(self, point: Mapping[str, Any]) -> Any:
        """The config of one combination."""
        if self.config_type in (None, dict):
            return dict(point)
        base = self.base
        if base is None and any("." in name for name in point):
            base = self.config_type()
        if base is None:
            return self.config_type(**point)
        for name, value in point.items():
            base = _replaced(base, name.split("."), value)
        return base

    def __repr__(self) -> str:
        dimensions = ", ".join(f"{name}={list(v)}" for name, v in self.dimensions.items())
        return f"Space({dimensions}, {len(self.constraints)} constraints)"


def _replaced(config: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if rest:
        value = _replaced(getattr(config, name), rest, value)
    return dataclasses.replace(config, **{name: value})


def _constraint_names(constraint: Constraint, dimensions: Mapping[str, Any]) -> list[str]:
    """The dimensions a constraint asks for, by the names of its parameters."""
    names: list[str] = []
    for parameter in inspect.signature(constraint).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            names.extend(dimensions)
        elif parameter.name in dimensions or parameter.name == "inv":
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise TypeError(
                f"Space: a constraint asks for {parameter.name!r}, which is no dimension; "
                f"dimensions are {', '.join(dimensions)} (and inv)"
            )
    return names
