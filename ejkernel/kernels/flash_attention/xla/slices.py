"""Some examples and heads at a time: tiles that stay in the cache, and bounds of their own.

All heads of all examples in one tile is the fewest steps. Fewer of them are a smaller tile, and
where examples have their own lengths or segments, one example at a time skips the most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax

from ...slicing import put
from ..options import Options
from ..scalars import Index, times
from .layout import block, loop

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Slices:
    """How the examples and key heads of a call are shared out."""

    batch: int
    kv_heads: int
    group: int
    examples: int  # in a slice
    heads: int  # key heads in a slice

    @staticmethod
    def of(q: jax.Array, k: jax.Array, block_heads: int | None) -> Slices:
        """Slices of at most so many key heads, those of all examples counted; None: all."""
        batch, kv_heads = k.shape[0], k.shape[2]
        group = q.shape[2] // kv_heads
        if block_heads is None or block_heads >= batch * kv_heads:
            return Slices(batch, kv_heads, group, batch, kv_heads)
        examples = _largest_divisor(batch, block_heads // kv_heads)
        return Slices(batch, kv_heads, group, examples, _largest_divisor(kv_heads, block_heads))

    @property
    def count(self) -> int:
        return (self.batch // self.examples) * (self.kv_heads // self.heads)

    def each(
        self,
        body: Callable[[Slice, State], State],
        state: State,
        only_if: jax.Array | None = None,
    ) -> State:
        """Pass the state through `body`, once for every slice; not at all unless `only_if`."""

        def step(n: Index, state: State) -> State:
            rows = self.kv_heads // self.heads
            if isinstance(n, int):
                return body(Slice(self, n // rows, n % rows), state)
            if rows == self.count:
                return body(Slice(self, 0, n), state)
            size = np.int32(rows)
            return body(Slice(self, lax.div(n, size), lax.rem(n, size)), state)

        end: Index = self.count
        if only_if is not None:
            end = lax.mul(lax.convert_element_type(only_if, np.int32), np.int32(end))
        return loop(0, end, step, state)


@dataclasses.dataclass(frozen=True)
class Slice:
    """One of them, by the number of its block of examples and of its block of heads."""

    slices: Slices
    example: Index
    head: Index

    def queries(self, x: jax.Array) -> jax.Array:
        """Its part of a `(batch, length, heads, d)` array."""
        return self._take(x, 2, self.slices.heads * self.slices.group)

    def keys(self, x: jax.Array) -> jax.Array:
        """Its part of a `(batch, length, kv_heads, d)` array."""
        return self._take(x, 2, self.slices.heads)

    def rows(self, x: jax.Array) -> jax.Array:
        """Its part of a `(batch, kv_heads, ...)` array, in which both may be 1."""
        return self._take(x, 1, self.slices.heads)

    def set_rows(self, x: jax.Array, part: jax.Array, start: Index = 0) -> jax.Array:
        """The same array with this part replaced; a shorter one begins at `start` of its axis 3."""
        return self._put(x, part, 1, start)

    def set(self, x: jax.Array, part: jax.Array, start: Index = 0) -> jax.Array:
        """A `(batch, length, heads or kv_heads, d)` array with its part replaced.

        A part that is shorter than the array begins at the position `start`.
        """
        return self._put(x, part, 2, start)

    def options(self, options: Options) -> Options:
        """Its part of the options."""
        if self.slices.count == 1:
            return options
        rows = self.slices.heads * self.slices.group
        given = {name: x for name, x in vars(options).items() if x is not None}
        changed: dict[str, Any] = {
            name: block(given[name], self.example, self.slices.examples, 0)
            for name in ("segment_ids", "kv_segment_ids", "q_lengths", "kv_lengths")
            if name in given
        }
        changed |= {n: self._take(given[n], 1, rows) for n in ("bias", "mask") if n in given}
        if options.sinks is not None:
            changed["sinks"] = block(options.sinks, self.head, rows, 0)
        return options.replace(
            **changed,
            first_example=options.first_example + times(self.example, self.slices.examples),
            first_head=options.first_head + times(self.head, rows),
        )

    def _take(self, x: jax.Array, head_axis: int, heads: int) -> jax.Array:
        if x.shape[0] > 1:
            x = block(x, self.example, self.slices.examples, 0)
        return block(x, self.head, heads, head_axis) if x.shape[head_axis] > 1 else x

    def _put(self, x: jax.Array, part: jax.Array, head_axis: int, position: Index = 0) -> jax.Array:
        part = lax.convert_element_type(part, x.dtype)
        if part.shape == x.shape:
            return part
        starts: list[Index] = [0] * x.ndim
        if x.shape[0] > 1:
            starts[0] = times(self.example, part.shape[0])
        if x.shape[head_axis] > 1:
            starts[head_axis] = times(self.head, part.shape[head_axis])
        starts[1 if head_axis == 2 else 3] = position
        return put(x, part, starts)


def _largest_divisor(number: int, limit: int) -> int:
    return max((d for d in range(1, number + 1) if number % d == 0 and d <= limit), default=1)
