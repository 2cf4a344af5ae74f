"""The calls of the GPU kernels: operands by name, the loops over tiles, masked loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .. import pallas
from ..pallas import Place, Refs, id_ranges, padded_ids
from ..scalars import int32, larger, quotient, smaller
from ..tiles import Index, Tiles, blocks_in, both

SMALLEST_BLOCK = 16  # of Triton's matrix products


@dataclass
class Call(pallas.Call):
    """Operands are read where they are; a program owns a block and loops over the others."""

    keepdims = False

    @staticmethod
    def fitting_block(length: int, block: int) -> int:
        """The block as a power of two, no longer than the sequence needs."""
        return padded(min(block, length))

    def queries(self, x: Any) -> pl.BlockSpec:
        """The query block of a program, or all queries of the heads that share its key head."""
        tiles, features = self.tiles, padded(x.shape[3])
        if self.keys_first:
            shape = (None, tiles.padded_q_len, tiles.group, features)
            return pl.BlockSpec(shape, lambda j, h, b: (b, 0, h, 0))
        return pl.BlockSpec((None, tiles.block_q, None, features), lambda i, h, b: (b, i, h, 0))

    def keys(self, x: Any) -> pl.BlockSpec:
        """The key block of a program, or all keys of its key head."""
        tiles, features = self.tiles, padded(x.shape[3])
        if self.keys_first:
            return pl.BlockSpec((None, tiles.block_k, None, features), lambda j, h, b: (b, j, h, 0))
        shape = (None, tiles.padded_kv_len, None, features)
        return pl.BlockSpec(shape, lambda i, h, b: (b, 0, quotient(h, tiles.group), 0))

    @property
    def rows(self) -> pl.BlockSpec:
        """The numbers of the same queries."""
        tiles = self.tiles
        if self.keys_first:
            return pl.BlockSpec((None, tiles.group, tiles.padded_q_len), lambda j, h, b: (b, h, 0))
        return pl.BlockSpec((None, None, tiles.block_q), lambda i, h, b: (b, h, i))

    def add_queries(self, name: str, x: jax.Array) -> None:
        self.operands[name] = (x, self.queries(x))

    def add_keys(self, name: str, x: jax.Array) -> None:
        self.operands[name] = (x, self.keys(x))

    def add_rows(self, name: str, x: jax.Array) -> None:
        self.operands[name] = (x, self.rows)

    def add_scalars(self, name: str, x: jax.Array) -> None:
        self.operands[name] = (x, pl.BlockSpec(x.shape, lambda x_, h, b: (0,) * x.ndim))

    def add_segments(self, queries: jax.Array, keys: jax.Array) -> None:
        tiles = self.tiles
        for name, ids, length in (
            ("q_segments", queries, tiles.padded_q_len),
            ("kv_segments", keys, tiles.padded_kv_len),
        ):
            self.operands[name] = (ids, pl.BlockSpec((None, length), lambda x, h, b: (b, 0)))
        begin, end = _blocks_that_share_segments(queries, keys, tiles, self.keys_first)
        self.add_scalars("segments_begin", begin)
        self.add_scalars("segments_end", end)

    def add_table(self, name: str, x: jax.Array) -> None:
        tiles = self.tiles
        batches, heads, queries, keys = x.shape
        # With key heads in the grid, a program reads the scores of all heads that share its own.
        members = tiles.group if self.keys_first and heads > 1 else 1

        def index(_: Index, h: Index, b: Index) -> tuple[Index, ...]:
            return (0 if batches == 1 else b, 0 if heads == 1 else h, 0, 0)

        shape = (
            None,
            members,
            1 if queries == 1 else tiles.padded_q_len,
            1 if keys == 1 else tiles.padded_kv_len,
        )
        self.operands[name] = (x, pl.BlockSpec(shape, index))

    def number(self, ref: Any, *index: Index) -> Any:
        return plgpu.load(ref.at[index])

    def table(self, ref: Any, at: Place) -> Any:
        tiles = self.tiles
        members, queries, keys = ref.shape
        zero = jnp.int32(0)  # the interpreter does not take a Python integer for an index
        member = at.head - at.kv_head * tiles.group if members > 1 else zero
        shape = (tiles.block_q, tiles.block_k)
        start_q, start_k = at.i * tiles.block_q, at.j * tiles.block_k
        rows, columns = pl.ds(start_q, tiles.block_q), pl.ds(start_k, tiles.block_k)
        if queries == 1 and keys == 1:
            tile = jnp.broadcast_to(plgpu.load(ref.at[member, zero, zero]), shape)
        elif queries == 1:
            line = load(ref.at[member, zero, columns], (tiles.kv_len - start_k,))
            tile = jnp.broadcast_to(line[None, :], shape)
        elif keys == 1:
            line = load(ref.at[member, rows, zero], (tiles.q_len - start_q,))
            tile = jnp.broadcast_to(line[:, None], shape)
        else:
            real = (tiles.q_len - start_q, tiles.kv_len - start_k)
            tile = load(ref.at[member, rows, columns], real)
        return tile.T if self.turned else tile

    def same_segment(self, at: Place, refs: Refs) -> Any:
        tiles = self.tiles
        start_q, start_k = at.i * tiles.block_q, at.j * tiles.block_k
        queries = refs["q_segments"].at[pl.ds(start_q, tiles.block_q)]
        keys = refs["kv_segments"].at[pl.ds(start_k, tiles.block_k)]
        q_ids, kv_ids = (
            load(queries, (tiles.q_len - start_q,)),
            load(keys, (tiles.kv_len - start_k,)),
        )
        if self.turned:
            return kv_ids[:, None] == q_ids[None, :]
        return q_ids[:, None] == kv_ids[None, :]

    def dot(self, a: Any, b: Any) -> Any:
        return plgpu.dot(a, b)

    def dot_rows(self, a: Any, b: Any) -> Any:
        return plgpu.dot(a, b.T)

    def tanh(self, x: Any) -> Any:
        # Triton lowers tanh to a library call per element; this is two instructions more than exp.
        positive = jnp.exp(-2.0 * jnp.abs(x))
        return jnp.sign(x) * (1.0 - positive) / (1.0 + positive)

    def column(self, x: Any) -> Any:
        return x[:, None]

    def key_tiles(self, at: Place, refs: Refs) -> list[Any]:
        """The keys and values of a tile, from all those of a program."""
        start, size = at.j * self.tiles.block_k, self.tiles.block_k
        features = {name: self.operands[name][0].shape[3] for name in "kv"}
        return [
            load(refs[name].at[pl.ds(start, size), :], (self.tiles.kv_len - start, features[name]))
            for name in "kv"
        ]

    def each_tile(
        self, at: Place, refs: Refs, add: Callable[..., Any], state: Any, *, only_if: Any = None
    ) -> Any:
        """Pass the state through `add(at, state, masked=...)`, once for every tile of a program.

        Those that are whole are added without hiding anything, if nothing else hides it.
        """
        options, tiles = self.options, self.tiles
        (own_lengths, own_block), (other_lengths, other_block) = self.sides
        if self.keys_first:
            own, (begin, end), whole = at.j, tiles.queries_of(at.j), tiles.whole_queries_of(at.j)
        else:
            own, (begin, end), whole = at.i, tiles.keys_of(at.i), tiles.whole_keys_of(at.i)
        first, last = whole
        if other_lengths in refs:
            length = self.number(refs[other_lengths], at.batch)
            end = smaller(end, blocks_in(length, other_block))
            last = smaller(last, quotient(length, other_block))
        if own_lengths in refs:
            length = self.number(refs[own_lengths], at.batch)
            only_if = both(only_if, own * own_block < length)
            if self.keys_first:
                last = jnp.where((own + 1) * own_block <= length, int32(last), int32(first))
        if only_if is not None:
            end = jnp.where(only_if, int32(end), int32(begin))
        if "segments_begin" in refs:
            begin = larger(begin, self.number(refs["segments_begin"], at.batch, own))
            end = smaller(end, self.number(refs["segments_end"], at.batch, own))

        def loop(start: Index, stop: Index, state: Any, *, masked: bool) -> Any:
            if isinstance(start, int) and isinstance(stop, int) and start >= stop:
                return state
            side = "i" if self.keys_first else "j"
            return lax.fori_loop(
                start, stop, lambda x, s: add(at._replace(**{side: x}), s, masked=masked), state
            )

        if options.mask is not None or options.segment_ids is not None:
            return loop(begin, end, state, masked=True)
        first, last = smaller(first, end), smaller(last, end)
        last = larger(first, last)
        if tiles.left is not None or (self.keys_first and tiles.right is not None):
            state = loop(begin, first, state, masked=True)
        state = loop(first, last, state, masked=False)
        has_lengths = options.kv_lengths is not None or (
            self.keys_first and options.q_lengths is not None
        )
        before_last = tiles.left if self.keys_first else tiles.right
        if tiles.kv_len < tiles.padded_kv_len or has_lengths or before_last is not None:
            state = loop(last, end, state, masked=True)
        return state

    def run(
        self,
        body: Callable[..., None],
        *,
        name: str,
        outputs: list[tuple[Any, pl.BlockSpec]],
    ) -> list[jax.Array]:
        """Run `body(at, refs, outputs)`; outputs are given by what they are like, and blocks."""
        names, tiles = list(self.operands), self.tiles
        batch, _, kv_heads, _ = self.operands["k"][0].shape
        grid = (tiles.q_blocks, kv_heads * tiles.group, batch)

        def kernel(*refs: Any) -> None:
            block, head, batch = (pl.program_id(axis) for axis in range(3))
            if self.keys_first:
                at = Place(batch, None, head, None, block)
            else:
                at = Place(batch, head, quotient(head, tiles.group), block, None)
            body(at, dict(zip(names, refs, strict=False)), refs[len(names) :])

        results: list[jax.Array] = pl.pallas_call(
            kernel,
            grid=(tiles.k_blocks, kv_heads, batch) if self.keys_first else grid,
            in_specs=[spec for _, spec in self.operands.values()],
            out_specs=[spec for _, spec in outputs],
            out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for like, _ in outputs],
            compiler_params=plgpu.CompilerParams(**self.launch),
            interpret=self.interpret,
            name=name,
        )(*(array for array, _ in self.operands.values()))
        return results


def padded(size: int) -> int:
    """Features or positions as a power of two: what is beyond is masked."""
    return max(SMALLEST_BLOCK, pl.next_power_of_2(size))


def _blocks_that_share_segments(
    queries: jax.Array, keys: jax.Array, tiles: Tiles, keys_first: bool
) -> tuple[jax.Array, jax.Array]:
    """`(batch, blocks)`: begin and end of the blocks whose ranges of ids overlap with a block's."""
    q_least, q_most = id_ranges(padded_ids(queries, tiles.padded_q_len), tiles.block_q)
    kv_least, kv_most = id_ranges(padded_ids(keys, tiles.padded_kv_len), tiles.block_k)
    overlap = (q_least[:, :, None] <= kv_most[:, None]) & (kv_least[:, None] <= q_most[:, :, None])
    overlap = overlap.swapaxes(1, 2) if keys_first else overlap
    number = jnp.arange(overlap.shape[2], dtype=jnp.int32)
    begin = jnp.min(jnp.where(overlap, number, overlap.shape[2]), axis=2)
    end = jnp.max(jnp.where(overlap, number + 1, 0), axis=2)
    return begin.astype(jnp.int32), end.astype(jnp.int32)


def _inside(shape: tuple[int, ...], real: tuple[Index, ...]) -> Any:
    """Which elements of a block exist; None if that is known to be all of them."""
    conditions = []
    for axis, (size, limit) in enumerate(zip(shape, real, strict=True)):
        if not (isinstance(limit, int) and limit >= size):
            conditions.append(lax.broadcasted_iota(jnp.int32, shape, axis) < limit)
    return both(*conditions)


def load(ref: Any, real: tuple[Index, ...], other: float = 0) -> Any:
    """A block, with `other` where it is beyond `real` elements."""
    mask = _inside(ref.shape, real)
    return plgpu.load(ref, mask=mask, other=None if mask is None else other)


def store(ref: Any, x: Any, real: tuple[Index, ...]) -> None:
    """Write what is within `real` elements."""
    plgpu.store(ref, x.astype(ref.dtype), mask=_inside(ref.shape, real))
