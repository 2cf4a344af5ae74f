"""The calls of the TPU kernels: operands by name, the grid, which tile a step visits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..options import Options
from ..rows import NOTHING_SEEN
from ..scalars import ceil_div, larger, quotient, smaller, times_cap
from ..tiles import Index, Tiles, blocks_in, both, clamped_lengths, id_ranges, padded_ids

LANES = 128
ROWS_TIMES_COLUMNS = (((1,), (0,)), ((), ()))
ROWS_TIMES_ROWS = (((1,), (1,)), ((), ()))


@dataclass(frozen=True)
class Place:
    """Where in the grid a step is: `(i, j)` is its tile."""

    batch: Index
    head: Index
    kv_head: Index
    i: Index
    j: Index
    needed: Index
    is_first: Index
    is_last: Index


@dataclass(frozen=True)
class Query:
    """A block `(block_q, features)` of an array of queries."""

    block: int
    features: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 1, self.block, self.features)

    def index(self, at: Place) -> tuple[Index, ...]:
        return (at.batch, at.head, at.i, 0)


@dataclass(frozen=True)
class Key(Query):
    """A block `(block_k, features)` of an array of keys."""

    def index(self, at: Place) -> tuple[Index, ...]:
        return (at.batch, at.kv_head, at.j, 0)


@dataclass(frozen=True)
class QueryRow:
    """A block `(1, block_q)` of an array with a number per query."""

    block: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 1, 1, self.block)

    def index(self, at: Place) -> tuple[Index, ...]:
        return (at.batch, at.head, 0, at.i)


@dataclass(frozen=True)
class _Segments:
    """Segment ids of a block, as a row `(1, block)` or as a column `(block, 1)`."""

    block: int
    row: bool
    of_queries: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 1, self.block) if self.row else (1, self.block, 1)

    def index(self, at: Place) -> tuple[Index, ...]:
        block = at.i if self.of_queries else at.j
        return (at.batch, 0, block) if self.row else (at.batch, block, 0)


@dataclass(frozen=True)
class _Score:
    """A tile of a bias or a mask; an axis of size 1 has one block."""

    array_shape: tuple[int, ...]
    block_q: int
    block_k: int

    @property
    def shape(self) -> tuple[int, ...]:
        _, _, queries, keys = self.array_shape
        return (1, 1, 1 if queries == 1 else self.block_q, 1 if keys == 1 else self.block_k)

    def index(self, at: Place) -> tuple[Index, ...]:
        place = (at.batch, at.head, at.i, at.j)
        return tuple(0 if n == 1 else x for n, x in zip(self.array_shape, place, strict=True))


@dataclass
class Call:
    """Operands by name, and the geometry that index maps and bodies share."""

    options: Options
    tiles: Tiles
    group: int
    keys_first: bool  # the grid walks over key blocks
    turned: bool  # tiles are (keys, queries)
    scalars: dict[str, jax.Array] = field(default_factory=dict)
    operands: dict[str, tuple[jax.Array, Any]] = field(default_factory=dict)

    @staticmethod
    def of(
        q: jax.Array,
        k: jax.Array,
        options: Options,
        block_q: int,
        block_k: int,
        *,
        keys_first: bool = False,
        turned: bool = False,
    ) -> Call:
        q_len, kv_len = q.shape[1], k.shape[1]
        tiles = Tiles(
            q_len,
            kv_len,
            equal_blocks(q_len, block_q),
            equal_blocks(kv_len, block_k),
            *options.band,
        )
        return Call(options, tiles, q.shape[2] // k.shape[2], keys_first, turned)

    def add_queries(self, name: str, x: jax.Array) -> None:
        spec = Query(self.tiles.block_q, x.shape[3])
        self.operands[name] = (_heads_first(x, self.tiles.padded_q_len), spec)

    def add_keys(self, name: str, x: jax.Array) -> None:
        spec = Key(self.tiles.block_k, x.shape[3])
        self.operands[name] = (_heads_first(x, self.tiles.padded_kv_len), spec)

    def add_query_rows(self, name: str, x: jax.Array) -> None:
        # Rows that only fill the last block see nothing.
        padding = self.tiles.padded_q_len - x.shape[2]
        fill = NOTHING_SEEN if name == "shift" else 0.0
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding)), constant_values=fill)
        self.operands[name] = (x[:, :, None, :], QueryRow(self.tiles.block_q))

    def add_options(self) -> None:
        options, tiles = self.options, self.tiles
        self.scalars |= clamped_lengths(options, tiles)
        if options.sinks is not None:
            self.scalars["sinks"] = options.sinks.astype(jnp.float32)
        for side, ids in (("q", options.segment_ids), ("kv", options.kv_segment_ids)):
            if ids is not None:
                self._add_segments(side, ids.astype(jnp.int32))
        for name in ("bias", "mask"):
            x = getattr(options, name)
            if x is not None:
                padding = [
                    (0, 0 if n == 1 else padded - n)
                    for n, padded in zip(
                        x.shape[2:], (tiles.padded_q_len, tiles.padded_kv_len), strict=True
                    )
                ]
                x = jnp.pad(x, ((0, 0), (0, 0), *padding))
                # Mosaic has no memory of booleans; bytes are the smallest it has.
                x = x.astype(jnp.int8) if name == "mask" else x
                self.operands[name] = (x, _Score(x.shape, tiles.block_q, tiles.block_k))

    def _add_segments(self, side: str, ids: jax.Array) -> None:
        tiles = self.tiles
        of_queries = side == "q"
        block, length = (
            (tiles.block_q, tiles.padded_q_len)
            if of_queries
            else (tiles.block_k, tiles.padded_kv_len)
        )
        ids = padded_ids(ids, length)
        self.scalars[f"{side}_least"], self.scalars[f"{side}_most"] = id_ranges(ids, block)
        row = of_queries == self.turned
        array = ids[:, None, :] if row else ids[:, :, None]
        self.operands[f"{side}_segments"] = (array, _Segments(block, row, of_queries))

    def place(self, grid: tuple[Index, ...], scalars: dict[str, Any], *, steps: int) -> Place:
        """The tile of a step, and whether it is needed at all."""
        tiles = self.tiles
        if self.keys_first:
            batch, kv_head, j, member, step = grid
            head = kv_head * self.group + member
            begin, end = tiles.queries_of(j)
            i = begin + step
            needed = i < end
            is_first = jnp.logical_and(member == 0, step == 0)
            is_last = jnp.logical_and(member == self.group - 1, step == steps - 1)
        else:
            batch, head, i, step = grid
            kv_head = quotient(head, self.group)
            begin, end = tiles.keys_of(i)
            j = begin + step
            needed = j < end
            is_first, is_last = step == 0, step == steps - 1
        # A step that is not needed stays on the last tile that was: nothing new is fetched.
        if self.keys_first:
            if "q_lengths" in scalars:
                needed &= i * tiles.block_q < scalars["q_lengths"][batch]
                end = smaller(end, blocks_in(scalars["q_lengths"][batch], tiles.block_q))
            i = larger(smaller(i, end - 1), 0)
            if "kv_lengths" in scalars:
                needed &= j * tiles.block_k < scalars["kv_lengths"][batch]
        else:
            if "kv_lengths" in scalars:
                needed &= j * tiles.block_k < scalars["kv_lengths"][batch]
                end = smaller(end, blocks_in(scalars["kv_lengths"][batch], tiles.block_k))
            j = larger(smaller(j, end - 1), 0)
            if "q_lengths" in scalars:
                needed &= i * tiles.block_q < scalars["q_lengths"][batch]
        if "q_least" in scalars:
            needed &= scalars["q_least"][batch, i] <= scalars["kv_most"][batch, j]
            needed &= scalars["kv_least"][batch, j] <= scalars["q_most"][batch, i]
        return Place(batch, head, kv_head, i, j, needed, is_first, is_last)

    def visit(self, at: Place, refs: dict[str, Any], add: Callable[..., None]) -> None:
        """Add the step's tile if it is needed, without hiding anything where it is whole."""
        whole = self.tiles.whole(at.i, at.j, *self._lengths(at, refs))
        if "q_least" in refs:
            one = refs["q_least"][at.batch, at.i]
            others = (refs["q_most"], at.i), (refs["kv_least"], at.j), (refs["kv_most"], at.j)
            for ref, block in others:
                whole &= ref[at.batch, block] == one
        if "mask" in refs:
            pl.when(at.needed)(partial(add, masked=True))
        elif whole is True:
            pl.when(at.needed)(partial(add, masked=False))
        else:
            pl.when(jnp.logical_and(at.needed, whole))(partial(add, masked=False))
            pl.when(jnp.logical_and(at.needed, jnp.logical_not(whole)))(partial(add, masked=True))

    def scores(self, refs: dict[str, Any], q: Any, k: Any) -> tuple[Any, Any]:
        """A tile of scores, and their slope by the scaled products if that is not one."""
        options = self.options
        left, right = (k, q) if self.turned else (q, k)
        scores = dot(left, right, ROWS_TIMES_ROWS) * options.softmax_scale
        slope = None
        if options.logits_soft_cap is not None:
            capped = jnp.tanh(scores / options.logits_soft_cap)
            slope = 1.0 - capped * capped
            scores = times_cap(capped, options.logits_soft_cap)
        if "bias" in refs:
            scores += self._as_tile(refs["bias"][0, 0].astype(jnp.float32))
        return scores, slope

    def visible(self, at: Place, refs: dict[str, Any]) -> Any:
        """Which scores of the step's tile count; None: all."""
        visible = self.tiles.visible(at.i, at.j, *self._lengths(at, refs), turned=self.turned)
        if "mask" in refs:
            seen = self._as_tile(refs["mask"][0, 0].astype(jnp.int32)) != 0
            visible = both(visible, seen)
        if "q_segments" in refs:
            visible = both(visible, refs["q_segments"][0] == refs["kv_segments"][0])
        return visible

    def _lengths(self, at: Place, refs: dict[str, Any]) -> tuple[Index, Index]:
        """Lengths beyond which a tile hides queries, where it sums over them, and keys, or None."""
        q_length = refs["q_lengths"][at.batch] if "q_lengths" in refs and self.keys_first else None
        return q_length, refs["kv_lengths"][at.batch] if "kv_lengths" in refs else None

    def _as_tile(self, x: Any) -> Any:
        """A block of a bias or a mask, `(block_q or 1, block_k or 1)`, as the tiles are turned."""
        if not self.turned:
            return x
        return jnp.broadcast_to(x, (self.tiles.block_q, self.tiles.block_k)).T

    def run(
        self,
        body: Callable[..., None],
        *,
        name: str,
        grid: tuple[int, ...],
        outputs: list[tuple[jax.ShapeDtypeStruct, Any]],
        scratch: list[Any],
        interpret: bool,
    ) -> list[jax.Array]:
        scalar_names, names = list(self.scalars), list(self.operands)
        count = len(scalar_names)

        def block_spec(spec: Any) -> pl.BlockSpec:
            def index_map(*indices_and_scalars: Any) -> tuple[Index, ...]:
                indices = indices_and_scalars[: len(grid)]
                scalars = dict(zip(scalar_names, indices_and_scalars[len(grid) :], strict=True))
                place: tuple[Index, ...] = spec.index(self.place(indices, scalars, steps=grid[-1]))
                return place

            return pl.BlockSpec(spec.shape, index_map)

        def kernel(*refs: Any) -> None:
            scalars = dict(zip(scalar_names, refs[:count], strict=True))
            blocks = dict(zip(names, refs[count : count + len(names)], strict=True))
            rest = refs[count + len(names) :]
            indices = tuple(pl.program_id(axis) for axis in range(len(grid)))
            at = self.place(indices, scalars, steps=grid[-1])
            body(at, {**scalars, **blocks}, rest[: len(outputs)], rest[len(outputs) :])

        summed = 2 if self.keys_first else 1  # the innermost axes, which add to one output block
        semantics: list[Any] = ["parallel"] * (len(grid) - summed) + ["arbitrary"] * summed
        results: list[jax.Array] = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=count,
                grid=grid,
                in_specs=[block_spec(spec) for _, spec in self.operands.values()],
                out_specs=[block_spec(spec) for _, spec in outputs],
                scratch_shapes=scratch,
            ),
            out_shape=[shape for shape, _ in outputs],
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            interpret=interpret,
            name=name,
        )(*self.scalars.values(), *(array for array, _ in self.operands.values()))
        return results


def equal_blocks(length: int, block: int) -> int:
    """Blocks of at most `block` that hardly pad: multiples of 128, as equal as these can be."""
    return round_up(ceil_div(length, ceil_div(length, round_up(block, LANES))), LANES)


def round_up(x: int, to: int) -> int:
    """The next multiple."""
    return ceil_div(x, to) * to


def row_shape(batch: int, heads: int, length: int) -> jax.ShapeDtypeStruct:
    """An array with a number per query, as rows."""
    return jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32)


def _heads_first(x: jax.Array, length: int) -> jax.Array:
    """`(batch, sequence, heads, features)` to `(batch, heads, length, features)`."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))).swapaxes(1, 2)


def dot(a: Any, b: Any, dimensions: Any) -> Any:
    """A product that is summed in float32."""
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
