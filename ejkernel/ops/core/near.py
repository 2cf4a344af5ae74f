"""When is a call near enough to a tuned one to run with its config?

A kernel that declares `near_shapes` says in which sizes its calls may differ from a tuned one, and
in which direction: the config of a longer sequence may fit a shorter one, and not the other way
round. Everything else (dtypes, ranks, keywords, all other sizes) has to be equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from ..utils.fingerprint import LEAF_SIGNATURE

Rounding = Literal["up", "down", "nearest"]


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One size that may differ.

    Args:
      argument: the position of the argument, or several of them; None: of every argument.
      axis: which of its axes; None: every axis.
      rounding: where a size may be rounded to: `"up"` to a tuned size that is larger, `"down"` to a
        smaller one, `"nearest"` to either.
      buckets: limits of size classes, such as `(128, 512, 2048)`. A size is rounded to a limit in
        the direction given, and two sizes are near if they are rounded to the same one. Without
        buckets the factor `within` of `NearShapes` counts.
    """

    argument: int | tuple[int, ...] | None = None
    axis: int | None = None
    rounding: Rounding = "up"
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rounding not in ("up", "down", "nearest"):
            raise ValueError(
                f"Dimension: rounding={self.rounding!r} must be 'up', 'down' or 'nearest'"
            )
        limits = tuple(self.buckets)
        if any(not isinstance(limit, int) or limit < 1 for limit in limits):
            raise ValueError(f"Dimension: buckets={self.buckets!r} must be positive whole numbers")
        object.__setattr__(self, "buckets", tuple(sorted(limits)))

    def covers(self, argument: int, axis: int, rank: int) -> bool:
        """Is it about this axis of this argument?"""
        mine = self.argument
        if isinstance(mine, int):
            mine = (mine,)
        wanted = self.axis if self.axis is None or self.axis >= 0 else self.axis + rank
        return (mine is None or argument in mine) and (wanted is None or axis == wanted)

    def accepts(self, asked: int, tuned: int, within: float) -> bool:
        """May a call of size `asked` run with a config that was tuned for size `tuned`?"""
        if self.buckets:
            return self.bucket(asked) is not None and self.bucket(asked) == self.bucket(tuned)
        if (self.rounding == "up" and tuned < asked) or (self.rounding == "down" and tuned > asked):
            return False
        return max(asked, tuned) <= within * min(asked, tuned)

    def bucket(self, size: int) -> int | None:
        """The limit that a size is rounded to; None if it is beyond the last one."""
        if self.rounding == "up":
            return next((limit for limit in self.buckets if limit >= size), None)
        if self.rounding == "down":
            return next((limit for limit in reversed(self.buckets) if limit <= size), None)
        return min(self.buckets, key=lambda limit: abs(math.log2(limit / max(size, 1))))


class NearShapes:
    """Which tuned calls may lend their config to others.

    Args:
      dimensions: the sizes that may differ; none given: all sizes of all arguments, rounded to the
        nearest.
      within: without buckets, no size may differ by more than this factor.

    ::

        class Attention(Kernel[Config, jax.Array]):
            near_shapes = NearShapes(Dimension(argument=(0, 1, 2), axis=1, rounding="up"))
    """

    def __init__(self, *dimensions: Dimension, within: float = 2.0) -> None:
        for dimension in dimensions:
            if not isinstance(dimension, Dimension):
                raise TypeError(
                    f"NearShapes takes Dimension values, got {dimension!r} "
                    f"({type(dimension).__name__})"
                )
        if not within >= 1:
            raise ValueError(f"NearShapes: within={within!r} must be a factor of at least 1")
        self.dimensions = dimensions or (Dimension(rounding="nearest"),)
        self.within = within

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.dimensions))
        return f"NearShapes({shown}, within={self.within:g})"

    def distance(self, asked: Mapping[str, Any], tuned: Mapping[str, Any]) -> float | None:
        """How far two calls are apart, as doublings of sizes; None if they are not near.

        Calls are what `call_fields` gives of an invocation.
        """
        must_agree = ("structure", "kwargs", "batch", "implementation", "differentiated")
        if any(asked.get(part) != tuned.get(part) for part in must_agree):
            return None
        mine, others = _leaves(asked.get("args")), _leaves(tuned.get("args"))
        if mine is None or others is None or [i for i, _ in mine] != [i for i, _ in others]:
            return None
        total = 0.0
        for (argument, one), (_, another) in zip(mine, others, strict=True):
            apart = self._leaf_distance(argument, one, another)
            if apart is None:
                return None
            total += apart
        return total

    def _leaf_distance(self, argument: int, asked: str, tuned: str) -> float | None:
        if asked == tuned:
            return 0.0
        mine, other = LEAF_SIGNATURE.fullmatch(asked), LEAF_SIGNATURE.fullmatch(tuned)
        if mine is None or other is None:
            return None
        if any(mine[part] != other[part] for part in ("dtype", "weak", "sharding")):
            return None
        sizes, tuned_sizes = _sizes(mine["shape"]), _sizes(other["shape"])
        if len(sizes) != len(tuned_sizes) or max(tuned_sizes, default=0) > _LARGEST_SIZE:
            return None
        total = 0.0
        for axis, (size, tuned_size) in enumerate(zip(sizes, tuned_sizes, strict=True)):
            if size == tuned_size:
                continue
            near = size > 0 < tuned_size and any(
                dimension.covers(argument, axis, len(sizes))
                and dimension.accepts(size, tuned_size, self.within)
                for dimension in self.dimensions
            )
            if not near:
                return None
            total += abs(math.log2(tuned_size / size))
        return total


_LARGEST_SIZE = 2**63  # of anything that was ever tuned; a file may say more


def _sizes(text: str) -> list[int]:
    # Twenty digits are above `_LARGEST_SIZE` already; thousands would take `int` long.
    return [int(size[:20]) for size in text.split(",") if size]


def _leaves(args: Any) -> list[tuple[int, str]] | None:
    """The leaves of a call, each with the number of its argument; a file may hold anything."""
    if not isinstance(args, list) or not all(isinstance(leaves, list) for leaves in args):
        return None
    return [(number, str(leaf)) for number, leaves in enumerate(args) for leaf in leaves]
