"""The calls of the GPU kernels: operands by name, the loops over tiles, masked loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..options import Options
from ..scalars import int32, larger, quotient, smaller, times_cap
from ..tiles import Index, Tiles, blocks_in, both, clamped_lengths, id_ranges, padded_ids

SMALLEST_BLOCK = 16  # of Triton's matrix products


@dataclass(frozen=True)
class Place:
    """What a program computes: a query block `i` of a head, or a key block `j` of a key head."""

    batch: Index
    head: Index
    kv_head: Index
    i: Index
    j: Index


@dataclass
class Call:
    """Operands by name, and the geometry that all programs share."""

    options: Options
    tiles: Tiles
    group: int
    keys_first: bool  # programs own key blocks
    turned: bool  # tiles are (keys, queries)
    operands: dict[str, tuple[jax.Array, pl.BlockSpec]] = field(default_factory=dict)

    @staticmethod
    def of(
        q: jax.Array,
        k: jax.Array,
        options: Options,
        block_q: int,
        block_k: int,
        *,
        keys_first: bool = False,
    ) -> Call:
        q_len, kv_len = q.shape[1], k.shape[1]
        tiles = Tiles(
            q_len,
            kv_len,
            fitting_block(q_len, block_q),
            fitting_block(kv_len, block_k),
            *options.band,
        )
        return Call(options, tiles, q.shape[2] // k.shape[2], keys_first, turned=keys_first)

    def add(self, name: str, x: jax.Array, spec: pl.BlockSpec) -> None:
        self.operands[name] = (x, spec)

    def all_keys(self, x: jax.Array) -> pl.BlockSpec:
        """All keys of a program's key head."""
        group = self.group
        return pl.BlockSpec(
            (None, self.tiles.padded_kv_len, None, padded(x.shape[3])),
            lambda i, h, b: (b, 0, quotient(h, group), 0),
        )

    def add_options(self) -> None:
        options, tiles = self.options, self.tiles
        for name, lengths in clamped_lengths(options, tiles).items():
            self._add_scalars(name, lengths)
        if options.sinks is not None:
            self._add_scalars("sinks", options.sinks.astype(jnp.float32))
        if options.segment_ids is not None and options.kv_segment_ids is not None:
            queries = options.segment_ids.astype(jnp.int32)
            keys = options.kv_segment_ids.astype(jnp.int32)
            for name, ids, length in (
                ("q_segments", queries, tiles.padded_q_len),
                ("kv_segments", keys, tiles.padded_kv_len),
            ):
                self.add(name, ids, pl.BlockSpec((None, length), lambda x, h, b: (b, 0)))
            begin, end = _blocks_that_share_segments(queries, keys, tiles, self.keys_first)
            self._add_scalars("segments_begin", begin)
            self._add_scalars("segments_end", end)
        for name in ("bias", "mask"):
            x = getattr(options, name)
            if x is not None:
                # Triton has no memory of booleans; bytes are the smallest it has.
                self._add_scores(name, x.astype(jnp.int8) if name == "mask" else x)

    def _add_scalars(self, name: str, x: jax.Array) -> None:
        self.add(name, x, pl.BlockSpec(x.shape, lambda x_, h, b: (0,) * x.ndim))

    def _add_scores(self, name: str, x: jax.Array) -> None:
        tiles, group = self.tiles, self.group
        batches, heads, queries, keys = x.shape
        # With key heads in the grid, a program reads the scores of all heads that share its own.
        members = 1 if heads == 1 else (group if self.keys_first else 1)

        def index(_: Index, h: Index, b: Index) -> tuple[Index, ...]:
            return (0 if batches == 1 else b, 0 if heads == 1 else h, 0, 0)

        shape = (
            None,
            members,
            1 if queries == 1 else tiles.padded_q_len,
            1 if keys == 1 else tiles.padded_kv_len,
        )
        self.add(name, x, pl.BlockSpec(shape, index))

    def over_keys(
        self,
        at: Place,
        refs: dict[str, Any],
        add: Callable[..., Any],
        state: Any,
        *,
        only_if: Any = True,
    ) -> Any:
        block_q, block_k = self.tiles.block_q, self.tiles.block_k
        begin, end = self.tiles.keys_of(at.i)
        first, last = self.tiles.whole_keys_of(at.i)
        if "kv_lengths" in refs:
            length = plgpu.load(refs["kv_lengths"].at[at.batch])
            end = smaller(end, blocks_in(length, block_k))
            last = smaller(last, quotient(length, block_k))
        if "q_lengths" in refs:
            only_if &= at.i * block_q < plgpu.load(refs["q_lengths"].at[at.batch])
        if only_if is not True:
            end = jnp.where(only_if, int32(end), int32(begin))
        begin, end = self._in_segments(at, refs, at.i, begin, end)
        return self._loop(begin, end, (first, last), add, state)

    def over_queries(
        self, at: Place, refs: dict[str, Any], add: Callable[..., Any], state: Any
    ) -> Any:
        block_q, block_k = self.tiles.block_q, self.tiles.block_k
        begin, end = self.tiles.queries_of(at.j)
        first, last = self.tiles.whole_queries_of(at.j)
        if "q_lengths" in refs:
            length = plgpu.load(refs["q_lengths"].at[at.batch])
            end = smaller(end, blocks_in(length, block_q))
            last = smaller(last, quotient(length, block_q))
        if "kv_lengths" in refs:
            length = plgpu.load(refs["kv_lengths"].at[at.batch])
            end = jnp.where(at.j * block_k < length, int32(end), int32(begin))
            whole = (at.j + 1) * block_k <= length
            last = jnp.where(whole, int32(last), int32(first))
        begin, end = self._in_segments(at, refs, at.j, begin, end)
        return self._loop(begin, end, (first, last), add, state)

    def _in_segments(
        self, at: Place, refs: dict[str, Any], block: Index, begin: Index, end: Index
    ) -> tuple[Index, Index]:
        if "segments_begin" not in refs:
            return begin, end
        first = plgpu.load(refs["segments_begin"].at[at.batch, block])
        last = plgpu.load(refs["segments_end"].at[at.batch, block])
        return larger(begin, first), smaller(end, last)

    def _loop(
        self,
        begin: Index,
        end: Index,
        whole: tuple[Index, Index],
        add: Callable[..., Any],
        state: Any,
    ) -> Any:
        """Add the blocks, those in `whole` without hiding anything if nothing else hides it."""

        def loop(start: Index, stop: Index, state: Any, *, masked: bool) -> Any:
            if isinstance(start, int) and isinstance(stop, int) and start >= stop:
                return state
            return lax.fori_loop(start, stop, lambda x, s: add(x, s, masked=masked), state)

        options, tiles = self.options, self.tiles
        if options.mask is not None or options.segment_ids is not None:
            return loop(begin, end, state, masked=True)
        first, last = (smaller(edge, end) for edge in whole)
        last = larger(first, last)
        if tiles.left is not None or (self.keys_first and tiles.right is not None):
            state = loop(begin, first, state, masked=True)
        state = loop(first, last, state, masked=False)
        is_ragged = tiles.kv_len < tiles.padded_kv_len
        has_lengths = options.kv_lengths is not None or (
            self.keys_first and options.q_lengths is not None
        )
        before_last = tiles.left if self.keys_first else tiles.right
        if is_ragged or has_lengths or before_last is not None:
            state = loop(last, end, state, masked=True)
        return state

    def key_tile(self, ref: Any, j: Index, like: jax.Array) -> Any:
        start = j * self.tiles.block_k
        part = ref.at[pl.ds(start, self.tiles.block_k), :]
        return load(part, (self.tiles.kv_len - start, like.shape[3]))

    def scores(
        self, at: Place, refs: dict[str, Any], i: Index, j: Index, q: Any, k: Any
    ) -> tuple[Any, Any]:
        """A tile of scores, and their slope by the scaled products if that is not one."""
        options = self.options
        left, right = (k, q) if self.turned else (q, k)
        scores = plgpu.dot(left, right.T) * options.softmax_scale
        slope = None
        if options.logits_soft_cap is not None:
            capped = _tanh(scores / options.logits_soft_cap)
            slope = 1.0 - capped * capped
            scores = times_cap(capped, options.logits_soft_cap)
        if "bias" in refs:
            scores += self._score_tile(refs["bias"], at, i, j).astype(jnp.float32)
        return scores, slope

    def visible(self, at: Place, refs: dict[str, Any], i: Index, j: Index) -> Any:
        """Which scores of a tile count; None: all."""
        tiles = self.tiles
        lengths: list[Index] = [None, None]
        if "q_lengths" in refs and self.keys_first:  # only there something is summed over queries
            lengths[0] = plgpu.load(refs["q_lengths"].at[at.batch])
        if "kv_lengths" in refs:
            lengths[1] = plgpu.load(refs["kv_lengths"].at[at.batch])
        visible = tiles.visible(i, j, *lengths, turned=self.turned)
        if "mask" in refs:
            visible = both(visible, self._score_tile(refs["mask"], at, i, j) != 0)
        if "q_segments" in refs:
            start_q, start_k = i * tiles.block_q, j * tiles.block_k
            queries = refs["q_segments"].at[pl.ds(start_q, tiles.block_q)]
            keys = refs["kv_segments"].at[pl.ds(start_k, tiles.block_k)]
            q_ids = load(queries, (tiles.q_len - start_q,))
            kv_ids = load(keys, (tiles.kv_len - start_k,))
            same = (
                kv_ids[:, None] == q_ids[None, :]
                if self.turned
                else q_ids[:, None] == kv_ids[None, :]
            )
            visible = both(visible, same)
        return visible

    def _score_tile(self, ref: Any, at: Place, i: Index, j: Index) -> Any:
        """A tile of a bias or a mask, as the tiles are turned."""
        tiles = self.tiles
        members, queries, keys = ref.shape
        zero = jnp.int32(0)  # the interpreter does not take a Python integer for an index
        member = at.head - at.kv_head * self.group if members > 1 else zero
        shape = (tiles.block_q, tiles.block_k)
        start_q, start_k = i * tiles.block_q, j * tiles.block_k
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

    def run(
        self,
        body: Callable[..., None],
        *,
        name: str,
        grid: tuple[int, ...],
        outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
        num_warps: int,
        num_stages: int,
        interpret: bool,
    ) -> list[jax.Array]:
        names = list(self.operands)

        def kernel(*refs: Any) -> None:
            block, head, batch = (pl.program_id(axis) for axis in range(3))
            if self.keys_first:
                at = Place(batch, None, head, None, block)
            else:
                at = Place(batch, head, quotient(head, self.group), block, None)
            body(at, dict(zip(names, refs, strict=False)), refs[len(names) :])

        results: list[jax.Array] = pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[spec for _, spec in self.operands.values()],
            out_specs=[spec for _, spec in outputs],
            out_shape=[shape for shape, _ in outputs],
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )(*(array for array, _ in self.operands.values()))
        return results


def fitting_block(length: int, block: int) -> int:
    """The block as a power of two, no longer than the sequence needs."""
    return max(SMALLEST_BLOCK, pl.next_power_of_2(min(block, length)))


def padded(features: int) -> int:
    """Features as a power of two: what is beyond is masked."""
    return max(SMALLEST_BLOCK, pl.next_power_of_2(features))


def query_block(tiles: Tiles, x: Any) -> pl.BlockSpec:
    """The query block of a program."""
    shape = (None, tiles.block_q, None, padded(x.shape[3]))
    return pl.BlockSpec(shape, lambda i, h, b: (b, i, h, 0))


def key_block(tiles: Tiles, x: Any) -> pl.BlockSpec:
    """The key block of a program."""
    shape = (None, tiles.block_k, None, padded(x.shape[3]))
    return pl.BlockSpec(shape, lambda j, h, b: (b, j, h, 0))


def queries_of_group(tiles: Tiles, group: int, x: Any) -> pl.BlockSpec:
    """All queries of the heads that share a program's key head."""
    shape = (None, tiles.padded_q_len, group, padded(x.shape[3]))
    return pl.BlockSpec(shape, lambda j, h, b: (b, 0, h, 0))


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


def _tanh(x: Any) -> Any:
    # Triton lowers tanh to a library call per element; this is two instructions more than exp.
    positive = jnp.exp(-2.0 * jnp.abs(x))
    return jnp.sign(x) * (1.0 - positive) / (1.0 + positive)


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
