"""How the score matrix is cut into tiles, and which of them positions leave out.

Functions of block indices work on Python integers, to size a grid, and on traced ones, inside a
Pallas kernel. What XLA skips, also by data, is in `xla/needed.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax

from .scalars import ceil_div, larger, quotient, smaller

Index: TypeAlias = Any  # an int, or a traced int32 scalar; None where there is none


@dataclass(frozen=True)
class Tiles:
    """How the score matrix is cut, and which tiles the positions of their keys leave out."""

    q_len: int
    kv_len: int
    block_q: int
    block_k: int
    left: int | None = None
    right: int | None = None
    group: int = 1  # query heads per key head

    @property
    def q_blocks(self) -> int:
        """Number of query blocks."""
        return max(1, ceil_div(self.q_len, self.block_q))

    @property
    def k_blocks(self) -> int:
        """Number of key blocks."""
        return max(1, ceil_div(self.kv_len, self.block_k))

    @property
    def padded_q_len(self) -> int:
        """Queries in all blocks."""
        return self.q_blocks * self.block_q

    @property
    def padded_kv_len(self) -> int:
        """Keys in all blocks."""
        return self.k_blocks * self.block_k

    @property
    def _turned(self) -> Tiles:
        """The same with queries in the place of keys: how far a key is seen is the other side."""
        return Tiles(self.kv_len, self.q_len, self.block_k, self.block_q, self.right, self.left)

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
        return self._turned.keys_of(j)

    def whole_keys_of(self, i: Index) -> tuple[Index, Index]:
        """The key blocks `begin <= j < end` that query block `i` sees wholly."""
        return self._whole(i, self.kv_len // self.block_k)

    def whole_queries_of(self, j: Index) -> tuple[Index, Index]:
        """The query blocks `begin <= i < end` that see key block `j` wholly."""
        begin, end = self._turned._whole(j)
        if self.kv_len < self.padded_kv_len:
            # The last key block has keys that do not exist: nobody sees it wholly.
            is_padded = (j + 1) * self.block_k > self.kv_len
            end = jnp.where(is_padded, jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32))
        return begin, end

    def _whole(self, i: Index, most: int | None = None) -> tuple[Index, Index]:
        """As `whole_keys_of`, by positions, and no block from `most` on."""
        begin, last = self.keys_of(i)
        end = last if most is None else smaller(last, most)
        if self.left is not None:
            first_key = larger((i + 1) * self.block_q - 1 - self.left, 0)
            begin = larger(begin, quotient(first_key + self.block_k - 1, self.block_k))
        if self.right is not None:
            past_key = larger(i * self.block_q + self.right + 1, 0)
            end = smaller(end, quotient(past_key, self.block_k))
        begin = smaller(begin, last)
        return begin, larger(begin, end)

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


def equal_blocks(length: int, most: int) -> int:
    """The size of equal blocks of at most so many: of 1000 positions and at most 512, it is 500."""
    return max(1, ceil_div(length, max(1, ceil_div(length, max(1, most)))))


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


def _block_of(position: Index, block: int, length: int) -> Index:
    """The block that holds a position; that of a position beyond the end is beyond the last."""
    position = smaller(larger(position, 0), length)
    return quotient(position + block * (position >= length), block)


def _longest(ranges: Iterable[tuple[int, int]]) -> int:
    return max(1, max(end - begin for begin, end in ranges))
