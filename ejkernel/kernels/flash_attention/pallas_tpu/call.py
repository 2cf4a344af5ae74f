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

from .. import pallas
from ..pallas import Place, Refs, id_ranges, padded_ids
from ..rows import NOTHING_SEEN
from ..scalars import ceil_div, larger, quotient, smaller
from ..tiles import Index, blocks_in, equal_blocks

LANES = 128

Spec = tuple[tuple[int, ...], Callable[[Place], tuple[Index, ...]]]
"""The shape of a block, and which one a step reads or writes."""


@dataclass
class Call(pallas.Call):
    """Operands are `(batch, heads, sequence, features)`, padded to whole blocks."""

    scalars: dict[str, jax.Array] = field(default_factory=dict)

    keepdims = True

    @staticmethod
    def fitting_block(length: int, block: int) -> int:
        """Blocks of at most `block` that hardly pad: multiples of 128, as equal as these can be."""
        return _round_up(equal_blocks(length, _round_up(block, LANES)), LANES)

    def queries(self, features: int) -> Spec:
        """A block `(block_q, features)` of an array of queries."""
        return (1, 1, self.tiles.block_q, features), lambda at: (at.batch, at.head, at.i, 0)

    def keys(self, features: int) -> Spec:
        """A block `(block_k, features)` of an array of keys."""
        return (1, 1, self.tiles.block_k, features), lambda at: (at.batch, at.kv_head, at.j, 0)

    @property
    def rows(self) -> Spec:
        """A block `(1, block_q)` of an array with a number per query."""
        return (1, 1, 1, self.tiles.block_q), lambda at: (at.batch, at.head, 0, at.i)

    def add_queries(self, name: str, x: jax.Array) -> None:
        array = _heads_first(x, self.tiles.padded_q_len)
        self.operands[name] = (array, self.queries(x.shape[3]))

    def add_keys(self, name: str, x: jax.Array) -> None:
        self.operands[name] = (_heads_first(x, self.tiles.padded_kv_len), self.keys(x.shape[3]))

    def add_rows(self, name: str, x: jax.Array) -> None:
        # Rows that only fill the last block see nothing.
        padding = self.tiles.padded_q_len - x.shape[2]
        fill = NOTHING_SEEN if name == "shift" else 0.0
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding)), constant_values=fill)
        self.operands[name] = (x[:, :, None, :], self.rows)

    def add_scalars(self, name: str, x: jax.Array) -> None:
        self.scalars[name] = x

    def add_table(self, name: str, x: jax.Array) -> None:
        tiles, shape = self.tiles, x.shape
        lengths = (tiles.padded_q_len, tiles.padded_kv_len)
        padding = [
            (0, 0 if n == 1 else length - n) for n, length in zip(shape[2:], lengths, strict=True)
        ]
        blocks = (tiles.block_q, tiles.block_k)
        block = (1, 1, *(1 if n == 1 else b for n, b in zip(shape[2:], blocks, strict=True)))

        def index(at: Place) -> tuple[Index, ...]:
            place = (at.batch, at.head, at.i, at.j)
            return tuple(0 if n == 1 else x for n, x in zip(shape, place, strict=True))

        self.operands[name] = (jnp.pad(x, ((0, 0), (0, 0), *padding)), (block, index))

    def add_segments(self, queries: jax.Array, keys: jax.Array) -> None:
        tiles = self.tiles
        self._add_ids("q", queries, tiles.block_q, tiles.padded_q_len, row=self.turned)
        self._add_ids("kv", keys, tiles.block_k, tiles.padded_kv_len, row=not self.turned)

    def _add_ids(self, side: str, ids: jax.Array, block: int, length: int, *, row: bool) -> None:
        """Segment ids as rows `(1, block)` or as columns `(block, 1)`."""
        ids = padded_ids(ids, length)
        self.scalars[f"{side}_least"], self.scalars[f"{side}_most"] = id_ranges(ids, block)

        def index(at: Place) -> tuple[Index, ...]:
            place = at.i if side == "q" else at.j
            return (at.batch, 0, place) if row else (at.batch, place, 0)

        array, shape = (ids[:, None, :], (1, 1, block)) if row else (ids[:, :, None], (1, block, 1))
        self.operands[f"{side}_segments"] = (array, (shape, index))

    def number(self, ref: Any, *index: Index) -> Any:
        return ref[index]

    def table(self, ref: Any, at: Place) -> Any:
        # Mosaic neither broadcasts nor turns bytes.
        x = ref[0, 0].astype(jnp.int32 if ref.dtype == jnp.int8 else jnp.float32)
        if not self.turned:
            return x
        return jnp.broadcast_to(x, (self.tiles.block_q, self.tiles.block_k)).T

    def same_segment(self, at: Place, refs: Refs) -> Any:
        return refs["q_segments"][0] == refs["kv_segments"][0]

    def dot(self, a: Any, b: Any) -> Any:
        return _dot(a, b, (((1,), (0,)), ((), ())))

    def dot_rows(self, a: Any, b: Any) -> Any:
        return _dot(a, b, (((1,), (1,)), ((), ())))

    def tanh(self, x: Any) -> Any:
        return jnp.tanh(x)

    def column(self, x: Any) -> Any:
        return x[:, :1]

    def place(self, grid: tuple[Index, ...], scalars: Refs, *, steps: int) -> Place:
        """The tile of a step, and whether it is needed at all."""
        tiles = self.tiles
        (own_lengths, own_block), (other_lengths, other_block) = self.sides
        if self.keys_first:
            batch, kv_head, own, member, step = grid
            head = kv_head * tiles.group + member
            begin, end = tiles.queries_of(own)
            is_first = jnp.logical_and(member == 0, step == 0)
            is_last = jnp.logical_and(member == tiles.group - 1, step == steps - 1)
        else:
            batch, head, own, step = grid
            kv_head = quotient(head, tiles.group)
            begin, end = tiles.keys_of(own)
            is_first, is_last = step == 0, step == steps - 1
        other = begin + step
        needed = other < end
        if other_lengths in scalars:
            needed &= other * other_block < scalars[other_lengths][batch]
            end = smaller(end, blocks_in(scalars[other_lengths][batch], other_block))
        # A step that is not needed stays on the last tile that was: nothing new is fetched.
        other = larger(smaller(other, end - 1), 0)
        if own_lengths in scalars:
            needed &= own * own_block < scalars[own_lengths][batch]
        i, j = (other, own) if self.keys_first else (own, other)
        if "q_least" in scalars:
            needed &= scalars["q_least"][batch, i] <= scalars["kv_most"][batch, j]
            needed &= scalars["kv_least"][batch, j] <= scalars["q_most"][batch, i]
        return Place(batch, head, kv_head, i, j, needed, is_first, is_last)

    def visit(self, at: Place, refs: Refs, add: Callable[..., None]) -> None:
        """Add the step's tile if it is needed, without hiding anything where it is whole."""
        whole = self.tiles.whole(at.i, at.j, *self.lengths(at, refs))
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

    def run(
        self,
        body: Callable[..., None],
        *,
        name: str,
        outputs: list[tuple[Any, Spec]],
        scratch: list[tuple[int, int]],
    ) -> list[jax.Array]:
        """Run `body(call, at, refs, outputs, scratch)`; outputs are given by dtype and block."""
        tiles, count, names = self.tiles, len(self.scalars), [*self.scalars, *self.operands]
        batch, kv_heads = self.operands["k"][0].shape[:2]
        heads = kv_heads * tiles.group
        grid: tuple[int, ...] = (batch, heads, tiles.q_blocks, tiles.key_steps)
        if self.keys_first:
            grid = (batch, kv_heads, tiles.k_blocks, tiles.group, tiles.query_steps)

        like = self.operands["k" if self.keys_first else "q"][0].shape

        def whole(dtype: Any, block: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            """The array that consists of such blocks: features of all positions, or rows."""
            shape = (*like[:3], block[3]) if block[2] > 1 else (*like[:2], 1, like[2])
            return jax.ShapeDtypeStruct(shape, dtype)

        def block_spec(shape: tuple[int, ...], index: Callable[[Place], Any]) -> pl.BlockSpec:
            def index_map(*indices_and_scalars: Any) -> tuple[Index, ...]:
                indices = indices_and_scalars[: len(grid)]
                scalars = dict(zip(self.scalars, indices_and_scalars[len(grid) :], strict=True))
                place: tuple[Index, ...] = index(self.place(indices, scalars, steps=grid[-1]))
                return place

            return pl.BlockSpec(shape, index_map)

        def kernel(*all_refs: Any) -> None:
            refs = dict(zip(names, all_refs, strict=False))
            rest = all_refs[len(names) :]
            indices = tuple(pl.program_id(axis) for axis in range(len(grid)))
            at = self.place(indices, refs, steps=grid[-1])
            body(self, at, refs, rest[: len(outputs)], rest[len(outputs) :])

        summed = 2 if self.keys_first else 1  # the innermost axes, which add to one output block
        semantics: list[Any] = ["parallel"] * (len(grid) - summed) + ["arbitrary"] * summed
        results: list[jax.Array] = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=count,
                grid=grid,
                in_specs=[block_spec(*spec) for _, spec in self.operands.values()],
                out_specs=[block_spec(*spec) for _, spec in outputs],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=[whole(dtype, shape) for dtype, (shape, _) in outputs],
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            interpret=self.interpret,
            name=name,
        )(*self.scalars.values(), *(array for array, _ in self.operands.values()))
        return results


def _round_up(x: int, to: int) -> int:
    return ceil_div(x, to) * to


def _heads_first(x: jax.Array, length: int) -> jax.Array:
    """`(batch, sequence, heads, features)` to `(batch, heads, length, features)`."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))).swapaxes(1, 2)


def _dot(a: Any, b: Any, dimensions: Any) -> Any:
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
