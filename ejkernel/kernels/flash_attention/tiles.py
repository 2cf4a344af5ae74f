"""What the Pallas kernels of both accelerators share: tiles, and which of them are needed.

Nothing here imports Pallas. Functions of block indices work on Python integers, to size a grid, and
on traced ones, inside a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .options import Options
from .scalars import ceil_div, larger, quotient, smaller

Index: TypeAlias = Any  # an int, or a traced int32 scalar; None where there is none

HIDDEN_SCORE = -jnp.inf
# A running maximum starts at the lowest number there is, because -inf - -inf is NaN. So a hidden
# score weighs nothing even in a row that has seen no key yet, and the lowest score does.
LOWEST_MAXIMUM = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Tiles:
    """How the score matrix is cut, and which tiles the positions of their keys leave out."""

    q_len: int
    kv_len: int
    block_q: int
    block_k: int
    left: int | None
    right: int | None

    @property
    def q_blocks(self) -> int:
        """Number of query blocks."""
        return ceil_div(self.q_len, self.block_q)

    @property
    def k_blocks(self) -> int:
        """Number of key blocks."""
        return ceil_div(self.kv_len, self.block_k)

    @property
    def padded_q_len(self) -> int:
        """Queries in all blocks."""
        return self.q_blocks * self.block_q

    @property
    def padded_kv_len(self) -> int:
        """Keys in all blocks."""
        return self.k_blocks * self.block_k

    def keys_of(self, i: Index) -> tuple[Index, Index]:
        """The key blocks `begin <= j < end` that query block `i` sees anything of."""
        begin: Index = 0
        end: Index = self.k_blocks
        if self.left is not None:
            begin = _block_of(i * self.block_q - self.left, self.block_k, self.kv_len)
        if self.right is not None:
            past_key = smaller((i + 1) * self.block_q, self.q_len) + self.right
            end = smaller(quotient(past_key + self.block_k - 1, self.block_k), self.k_blocks)
        return begin, end

    def queries_of(self, j: Index) -> tuple[Index, Index]:
        """The query blocks `begin <= i < end` that see anything of key block `j`."""
        begin: Index = 0
        end: Index = self.q_blocks
        if self.right is not None:
            begin = _block_of(j * self.block_k - self.right, self.block_q, self.q_len)
        if self.left is not None:
            past_query = smaller((j + 1) * self.block_k, self.kv_len) + self.left
            end = smaller(quotient(past_query + self.block_q - 1, self.block_q), self.q_blocks)
        return begin, end

    def whole_keys_of(self, i: Index) -> tuple[Index, Index]:
        """The key blocks `begin <= j < end` that query block `i` sees wholly."""
        begin, last = self.keys_of(i)
        end = smaller(last, self.kv_len // self.block_k)
        if self.left is not None:
            first_key = larger((i + 1) * self.block_q - 1 - self.left, 0)
            begin = larger(begin, quotient(first_key + self.block_k - 1, self.block_k))
        if self.right is not None:
            past_key = larger(i * self.block_q + self.right + 1, 0)
            end = smaller(end, quotient(past_key, self.block_k))
        begin = smaller(begin, last)
        return begin, larger(begin, end)

    def whole_queries_of(self, j: Index) -> tuple[Index, Index]:
        """The query blocks `begin <= i < end` that see key block `j` wholly."""
        begin, end = self.queries_of(j)
        last = end
        if self.right is not None:
            first_query = larger((j + 1) * self.block_k - 1 - self.right, 0)
            begin = larger(begin, quotient(first_query + self.block_q - 1, self.block_q))
        if self.left is not None:
            past_query = larger(j * self.block_k + self.left + 1, 0)
            end = smaller(end, quotient(past_query, self.block_q))
        begin = smaller(begin, last)
        end = larger(begin, end)
        if self.kv_len < self.padded_kv_len:
            # The last key block has keys that do not exist: nobody sees it wholly.
            is_padded = (j + 1) * self.block_k > self.kv_len
            end = jnp.where(is_padded, jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32))
        return begin, end

    @property
    def key_steps(self) -> int:
        """The most key blocks that a query block sees: as many steps does a grid need."""
        return _longest(self.keys_of(i) for i in range(self.q_blocks))

    @property
    def query_steps(self) -> int:
        """The most query blocks that see a key block."""
        return _longest(self.queries_of(j) for j in range(self.k_blocks))

    def whole(self, i: Index, j: Index, q_length: Index = None, kv_length: Index = None) -> Index:
        """Whether every position of tile `(i, j)` is visible: then nothing has to be compared."""
        answer: Index = True
        if q_length is not None:
            answer &= (i + 1) * self.block_q <= q_length
        if kv_length is not None:
            answer &= (j + 1) * self.block_k <= kv_length
        if self.kv_len < self.padded_kv_len:
            answer &= (j + 1) * self.block_k <= self.kv_len
        if self.right is not None:
            answer &= (j + 1) * self.block_k - 1 <= i * self.block_q + self.right
        if self.left is not None:
            answer &= j * self.block_k >= (i + 1) * self.block_q - 1 - self.left
        return answer

    def visible(
        self,
        i: Index,
        j: Index,
        q_length: Index = None,
        kv_length: Index = None,
        *,
        turned: bool,
    ) -> Any:
        """Which positions of tile `(i, j)` count, or None if all do.

        The tile is `(block_q, block_k)`, or `(block_k, block_q)` if `turned`.
        """
        shape = (self.block_k, self.block_q) if turned else (self.block_q, self.block_k)
        query = i * self.block_q + lax.broadcasted_iota(jnp.int32, shape, int(turned))
        key = j * self.block_k + lax.broadcasted_iota(jnp.int32, shape, int(not turned))
        conditions = []
        if q_length is not None:
            conditions.append(query < q_length)
        elif self.q_len < self.padded_q_len:
            conditions.append(query < self.q_len)
        if kv_length is not None:
            conditions.append(key < kv_length)
        elif self.kv_len < self.padded_kv_len:
            conditions.append(key < self.kv_len)
        if self.right is not None:
            conditions.append(key <= query + self.right)
        if self.left is not None:
            conditions.append(key >= query - self.left)
        return both(*conditions)


def clamped_lengths(options: Options, tiles: Tiles) -> dict[str, jax.Array]:
    """The lengths that a call has, by name, none longer than the arrays."""
    given = {
        "q_lengths": (options.q_lengths, tiles.q_len),
        "kv_lengths": (options.kv_lengths, tiles.kv_len),
    }
    return {
        name: jnp.clip(lengths.astype(jnp.int32), 0, longest)
        for name, (lengths, longest) in given.items()
        if lengths is not None
    }


def padded_ids(ids: jax.Array, length: int) -> jax.Array:
    """Segment ids up to a whole number of blocks: the last one again, which widens no range."""
    return jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), mode="edge")


def id_ranges(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest of the padded ids in each block, `(batch, blocks)`."""
    blocks = ids.reshape(ids.shape[0], -1, block)
    return blocks.min(axis=2), blocks.max(axis=2)


def blocks_in(length: Index, block: int) -> Index:
    """How many blocks hold anything of a length."""
    return quotient(length + (block - 1), block)


def both(*conditions: Any) -> Any:
    """Their conjunction; None stands for a condition that always holds."""
    answer = None
    for condition in conditions:
        if condition is not None:
            answer = condition if answer is None else jnp.logical_and(answer, condition)
    return answer


def shown(x: Any, visible: Any, other: float = 0.0) -> Any:
    """A tile with `other` where it is not visible; None: all of it is."""
    return x if visible is None else jnp.where(visible, x, other)


# Zero times NaN is NaN, so in a tile that hides anything, what is summed over with weights of zero
# has to be finite: see `finite`. Half precision is not compared on all devices.


def finite_part(x: Any) -> Any:
    """A tile with zeros for NaN and infinity."""
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) < jnp.inf, wide, 0.0).astype(x.dtype)


def keys_that_stay_apart(k: Any, v: Any) -> tuple[Any, Any]:
    """Tiles of keys to compute scores with, NaN where a value is not finite, and of values."""
    size = jnp.abs(v.astype(jnp.float32))
    bad = jnp.max(jnp.where(size < jnp.inf, 0.0, 1.0), axis=1, keepdims=True)
    # Numbers are broadcast rather than booleans, which Mosaic cannot.
    apart = jnp.where(jnp.broadcast_to(bad, k.shape) > 0.0, jnp.nan, k.astype(jnp.float32))
    return apart.astype(k.dtype), finite_part(v)


def _block_of(position: Index, block: int, length: int) -> Index:
    """The block that holds a position; that of a position beyond the end is beyond the last."""
    position = smaller(larger(position, 0), length)
    return quotient(position + block * (position >= length), block)


def _longest(ranges: Iterable[tuple[int, int]]) -> int:
    return max(1, max(end - begin for begin, end in ranges))
