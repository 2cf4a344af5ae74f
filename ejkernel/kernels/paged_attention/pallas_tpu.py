"""Paged attention for TPU: pages are fetched through a page table that was prefetched as scalars.

The grid walks over sequences and, innermost, over steps of some pages. The index maps look up
which pages a step needs, so the pipeline fetches the next step's pages while this one's are worked
on. Steps beyond a sequence's end stay on its last pages: nothing is fetched, nothing computed.

A page is `(page_size * kv_heads, head_dim)`, as it lies in memory, and all query heads meet all its
rows in one product; scores of a head with another head's keys are hidden. A product with few query
rows costs as much as its keys take to load, so this costs no more than one product per key head,
and needs no strided reads.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Limit, Supports

from ..dot import dot
from .arguments import HIDDEN_SCORE, LOWEST_MAXIMUM, SHORT_TYPES, Arguments
from .ragged import block_q_for, in_blocks
from .reference import implementation, ragged_implementation

_LANES = 128
_MOST_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class PagedAttentionTpuConfig:
    """How many pages a step of the grid works on, each an operand of its own."""

    pages_per_step: Annotated[int, Limit(minimum=1, maximum=64)] = 16

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> PagedAttentionTpuConfig:
        """Not measured: a step's fixed cost is about that of fetching 256 keys."""
        return cls(_pages_for(256, inv))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[PagedAttentionTpuConfig]:
        steps = {_pages_for(keys, inv) for keys in (16, 64, 128, 256, 512)}
        return [cls(step) for step in sorted(steps)]


@dataclasses.dataclass(frozen=True)
class RaggedPagedAttentionTpuConfig:
    """How many queries of a prompt, and how many pages, a step of the grid works on."""

    block_q: Annotated[int, Limit(minimum=1, maximum=_MOST_ROWS)] = 8
    pages_per_step: Annotated[int, Limit(minimum=1, maximum=64)] = 16

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> RaggedPagedAttentionTpuConfig:
        """Not measured: some 256 query rows, and steps of about as many keys."""
        return cls(_block_q_for(256, inv), _pages_for(256, inv))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[RaggedPagedAttentionTpuConfig]:
        blocks = {_block_q_for(rows, inv) for rows in (128, 256, 512)}
        steps = {_pages_for(keys, inv) for keys in (64, 128, 256)}
        return [cls(block_q, step) for block_q in sorted(blocks) for step in sorted(steps)]

    def unfit(self, inv: Invocation[Any, Any]) -> str | None:
        heads = inv.args[0].shape[1]
        if min(self.block_q, inv.args[0].shape[0]) * heads <= _MOST_ROWS:
            return None
        return f"block_q={self.block_q} of {heads} heads are more than {_MOST_ROWS} query rows"


def _block_q_for(query_rows: int, inv: Invocation[Any, Any]) -> int:
    """Tokens of a block with about so many query rows."""
    rows, heads, _ = inv.args[0].shape
    return block_q_for(rows, inv.args[3].shape[0], max(1, query_rows // heads))


def _pages_for(keys: int, inv: Invocation[Any, Any]) -> int:
    """Pages that hold about so many keys."""
    page_size, per_sequence = inv.args[1].shape[1], inv.args[3].shape[1]
    return int(max(1, min(keys // page_size, per_sequence, 16)))


def attend(
    call: Arguments, cfg: PagedAttentionTpuConfig | RaggedPagedAttentionTpuConfig
) -> jax.Array:
    """What `paged_attention_reference` gives."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch, tokens, heads, head_dim = call.q.shape
    pages, page_size, kv_heads, _ = call.k_pages.shape
    value_dim = call.v_pages.shape[3]
    group, columns, rows = heads // kv_heads, page_size * kv_heads, tokens * heads
    most_pages = call.page_table.shape[1]
    per_step = min(cfg.pages_per_step, most_pages)
    if (
        call.window is not None and call.causal
    ):  # a window and the tokens themselves touch so many pages at most
        most_pages = min(most_pages, (call.window + tokens + page_size - 2) // page_size + 1)
    steps = -(-most_pages // per_step)

    def kernel(table: Any, lengths_ref: Any, ends_ref: Any, q_ref: Any, *refs: Any) -> None:
        del table
        given: list[Any]
        *given, out_ref, largest_ref, total_ref, weighted_ref = refs
        k_refs: Any
        k_refs, v_refs, k_scales, v_scales = (  # one for each page of a step
            [given.pop(0) for _ in range(per_step)] if array is not None else [None] * per_step
            for array in (call.k_pages, call.v_pages, call.k_scale, call.v_scale)
        )
        sink_ref = given.pop() if given else None
        b, step = pl.program_id(0), pl.program_id(1)
        length, end = lengths_ref[b], ends_ref[b]
        first_key = (call.first_block(end, page_size) + step * per_step) * page_size

        @pl.when(step == 0)
        def start() -> None:
            largest_ref[...] = jnp.full_like(largest_ref, LOWEST_MAXIMUM)
            total_ref[...] = jnp.zeros_like(total_ref)
            weighted_ref[...] = jnp.zeros_like(weighted_ref)

        def scores_of(i: int, begin: Any) -> Any:
            scores = dot(q_ref[0], _widened(k_refs[i][0], q_ref.dtype), (1, 1))
            if (scale_ref := k_scales[i]) is not None:
                scores = scores * scale_ref[0]
            scores = call.capped(scores * call.softmax_scale)
            row = lax.broadcasted_iota(jnp.int32, scores.shape, 0)
            column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            key = key_of_column(scores, begin)
            position = end - tokens + lax.div(row, jnp.int32(heads))
            visible = call.visible(key, position, length)
            if kv_heads > 1:
                head = lax.rem(row, jnp.int32(heads))
                visible &= lax.rem(column, jnp.int32(kv_heads)) == lax.div(head, jnp.int32(group))
            return jnp.where(visible, scores, HIDDEN_SCORE)

        def key_of_column(block: Any, begin: Any) -> Any:
            column = lax.broadcasted_iota(jnp.int32, block.shape, 1)
            return begin + lax.div(column, jnp.int32(kv_heads))

        def only_own(values: Any, begin: Any) -> Any:
            """Zeros from the sequence's end on: there may be NaN, which no weight would hide."""
            row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
            own = begin + lax.div(row, jnp.int32(kv_heads)) < length
            return jnp.where(own, values, jnp.zeros_like(values))

        @pl.when(first_key < length)
        def add_pages() -> None:
            scores = [scores_of(i, first_key + i * page_size) for i in range(per_step)]
            before = largest_ref[:, :1]
            largest = before
            for part in scores:
                largest = jnp.maximum(largest, jnp.max(part, axis=1, keepdims=True))
            shrink = jnp.exp(before - largest)
            total, weighted = shrink * total_ref[:, :1], shrink * weighted_ref[...]
            for i, (part, v_ref) in enumerate(zip(scores, v_refs, strict=True)):
                weights = jnp.exp(part - largest)
                total += jnp.sum(weights, axis=1, keepdims=True)
                if (scale_ref := v_scales[i]) is not None:
                    own = key_of_column(scale_ref[0], first_key + i * page_size) < length
                    weights = weights * jnp.where(own, scale_ref[0], 0.0)
                values = _widened(v_ref[0], q_ref.dtype)
                values = only_own(values, first_key + i * page_size)
                weighted += dot(weights.astype(values.dtype), values, (1, 0))
            largest_ref[...] = jnp.broadcast_to(largest, largest_ref.shape)
            total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
            weighted_ref[...] = weighted

        @pl.when(step == steps - 1)
        def finish() -> None:
            total, weighted = total_ref[:, :1], weighted_ref[...]
            empty = total == 0.0
            if sink_ref is not None:
                before, sink = largest_ref[:, :1], sink_ref[...]
                largest = jnp.maximum(before, sink)
                shrink = jnp.exp(before - largest)
                total, weighted = shrink * total + jnp.exp(sink - largest), shrink * weighted
            share = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
            out_ref[0] = (weighted * share).astype(out_ref.dtype)

    def page_spec(offset: int, *block: int) -> Any:
        def page_at(b: Any, step: Any, table: Any, lengths: Any, ends: Any) -> tuple[Any, ...]:
            last = lax.div(jnp.maximum(lengths[b] - 1, 0), jnp.int32(page_size))
            first = call.first_block(ends[b], page_size)
            page = jnp.minimum(first + step * per_step + offset, last)
            return table[b, page], 0, 0

        return pl.BlockSpec((1, *block), page_at)

    def row_spec(features: int) -> Any:
        return pl.BlockSpec((1, rows, features), lambda b, *_: (b, 0, 0))

    keys = call.k_pages.reshape(pages, columns, head_dim)
    values = call.v_pages.reshape(pages, columns, value_dim)
    operands = [call.q.reshape(batch, rows, head_dim), *[keys] * per_step, *[values] * per_step]
    in_specs = [
        row_spec(head_dim),
        *(page_spec(i, columns, size) for size in (head_dim, value_dim) for i in range(per_step)),
    ]
    for scale in (call.k_scale, call.v_scale):
        if scale is not None:  # one number for every column of the scores
            scale = scale[:, None] if scale.ndim == 2 else scale
            wide = jnp.broadcast_to(scale, (pages, page_size, kv_heads)).astype(jnp.float32)
            operands += [wide.reshape(pages, 1, columns)] * per_step
            in_specs += [page_spec(i, 1, columns) for i in range(per_step)]
    if call.sinks is not None:
        operands.append(jnp.tile(call.sinks.astype(jnp.float32), tokens)[:, None])
        in_specs.append(pl.BlockSpec((rows, 1), lambda *_: (0, 0)))
    out: jax.Array = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, steps),
            in_specs=in_specs,
            out_specs=row_spec(value_dim),
            scratch_shapes=[
                pltpu.VMEM((rows, size), jnp.float32) for size in (_LANES, _LANES, value_dim)
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, rows, value_dim), call.q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="paged_attention",
    )(call.page_table, call.lengths, call.ends, *operands)
    return out.reshape(batch, tokens, heads, value_dim)


def _widened(block: jax.Array, dtype: Any) -> jax.Array:
    """Numbers of 8 bits in the dtype of the queries; others as they are."""
    return block.astype(jnp.float32).astype(dtype) if block.dtype.itemsize == 1 else block


def _rows_fit(inv: Invocation[Any, Any]) -> str | None:
    """Few enough query rows of a sequence that all are in VMEM at once."""
    _, tokens, heads, _ = inv.args[0].shape
    if tokens * heads <= _MOST_ROWS:
        return None
    return f"q has {tokens} tokens of {heads} heads, and at most {_MOST_ROWS} rows are supported"


PALLAS_TPU = implementation(
    attend,
    name="pallas",
    devices=("tpu",),
    config=PagedAttentionTpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16"), rules=(_rows_fit,)),
)

RAGGED_PALLAS_TPU = ragged_implementation(
    in_blocks(attend),
    name="pallas",
    devices=("tpu",),
    config=RaggedPagedAttentionTpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16", *SHORT_TYPES)),
)
