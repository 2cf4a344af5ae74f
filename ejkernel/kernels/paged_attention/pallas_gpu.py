"""Paged attention for GPU: Pallas kernels that JAX lowers to Triton.

One program has the queries of one sequence that share a key head, and a share of the sequence's
keys. It looks up the page of each key in the page table and loads the keys where they are, so pages
may have any size. A GPU wants more programs than there are sequences and key heads: keys are shared
out to `num_key_splits` programs, whose results are put together afterwards by their log-sum-exps.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, Limit, Supports

from ..limits import STAGES, WARPS
from ..sizes import next_power_of_two
from .arguments import HIDDEN_SCORE, LOWEST_MAXIMUM, SHORT_TYPES, Arguments
from .ragged import block_q_for, in_blocks
from .reference import implementation, ragged_implementation

_SMALLEST_BLOCK = 16  # of Triton's matrix products
_MOST_ROWS = 128
_SHARE = Limit(minimum=1, maximum=1024)
_MOST_FEATURES = 256


@dataclasses.dataclass(frozen=True)
class PagedAttentionGpuConfig:
    """How a sequence's keys are shared out, and how the kernel is launched.

    Args:
      block_k: keys that a program loads at a time.
      num_key_splits: programs that share the keys of a sequence.
      num_warps: of a program.
      num_stages: blocks that are loaded ahead, and the one at hand.
    """

    block_k: Annotated[int, _SHARE] = 64
    num_key_splits: Annotated[int, _SHARE] = 8
    num_warps: Annotated[int, WARPS] = 4
    num_stages: Annotated[int, STAGES] = 2

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> PagedAttentionGpuConfig:
        """Two programs for each of about 128 multiprocessors, no split below two blocks."""
        q, k_pages, _, table = inv.args[:4]
        wanted = -(-256 // (q.shape[0] * k_pages.shape[2]))
        longest = k_pages.shape[1] * table.shape[1]
        return cls(num_key_splits=max(1, min(wanted, longest // 128, 32)))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[PagedAttentionGpuConfig]:
        splits = cls.heuristic(inv).num_key_splits
        return [
            cls(block_k, num_key_splits, num_warps)
            for num_key_splits in sorted({max(1, splits // 2), splits, splits * 2})
            for block_k, num_warps in ((32, 2), (64, 4), (128, 4))
        ]


@dataclasses.dataclass(frozen=True)
class RaggedPagedAttentionGpuConfig(PagedAttentionGpuConfig):
    """The same, and how many queries of a prompt a program has.

    Args:
      block_q: tokens; times the query heads of a key head, at most 128.
    """

    block_q: Annotated[int, Limit(minimum=1, maximum=_MOST_ROWS)] = 16

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> RaggedPagedAttentionGpuConfig:
        """64 query rows; for single tokens alone keys are shared out as in `paged_attention`."""
        (rows, heads, _), kv_heads = inv.args[0].shape, inv.args[1].shape[2]
        block_q = block_q_for(rows, inv.args[3].shape[0], max(1, 64 * kv_heads // heads))
        alone = PagedAttentionGpuConfig.heuristic(inv)
        return cls(num_key_splits=alone.num_key_splits if block_q == 1 else 1, block_q=block_q)

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Any]:
        first = cls.heuristic(inv)
        launches = ((32, 2), (64, 4), (128, 4))
        splits = sorted({first.num_key_splits, 2 * first.num_key_splits})
        return [
            dataclasses.replace(first, block_k=keys, num_key_splits=count, num_warps=warps)
            for count in splits
            for keys, warps in launches
        ]

    def unfit(self, inv: Invocation[Any, Any]) -> str | None:
        (rows, heads, _), kv_heads = inv.args[0].shape, inv.args[1].shape[2]
        group = heads // kv_heads
        if min(self.block_q, rows) * group <= _MOST_ROWS:
            return None
        return f"block_q={self.block_q} of {group} heads are more than {_MOST_ROWS} query rows"


def attend(call: Arguments, cfg: PagedAttentionGpuConfig) -> jax.Array:
    """What `paged_attention_reference` gives."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    batch, tokens, heads, head_dim = call.q.shape
    pages, page_size, kv_heads, value_dim = call.v_pages.shape
    group, per_sequence = heads // kv_heads, call.page_table.shape[1]
    rows = tokens * group
    block_rows, q_width, v_width = _block(rows), _block(head_dim), _block(value_dim)
    block = _block(cfg.block_k)
    splits = max(1, min(cfg.num_key_splits, -(-per_sequence * page_size // block)))

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, table_ref, lengths_ref, ends_ref, *scale_refs, out_ref, lse_ref = refs
        split, sequence = pl.program_id(0), pl.program_id(2)
        length, end = (plgpu.load(ref.at[sequence]) for ref in (lengths_ref, ends_ref))
        k_scale_ref = scale_refs.pop(0) if call.k_scale is not None else None
        v_scale_ref = scale_refs.pop(0) if call.v_scale is not None else None
        row = lax.broadcasted_iota(jnp.int32, (block_rows, block), 0)
        position = end - tokens + lax.div(row, jnp.int32(group))
        q_mask = _inside((block_rows, q_width), rows, head_dim)
        q_rows = plgpu.load(q_ref, mask=q_mask, other=0.0)

        def add_keys(j: Any, state: Any) -> Any:
            largest, total, weighted = state
            key = j * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
            # What no query sees is not loaded: it may be another sequence's, or NaN.
            seen = call.seen(key, length, end)
            page = plgpu.load(table_ref.at[lax.div(key, jnp.int32(page_size))], mask=seen, other=0)
            slot = lax.rem(key, jnp.int32(page_size))

            def tile(ref: Any, features: int, width: int) -> Any:
                shape = (block, width)
                feature = lax.broadcasted_iota(jnp.int32, shape, 1)
                rows_of_pages = (jnp.broadcast_to(x[:, None], shape) for x in (page, slot))
                mask = seen[:, None] & (feature < features)
                if ref.dtype.itemsize > 1:
                    return plgpu.load(ref.at[*rows_of_pages, feature], mask=mask, other=0.0)
                other = jnp.zeros((), ref.dtype)
                found = plgpu.load(ref.at[*rows_of_pages, feature], mask=mask, other=other)
                return found.astype(jnp.float32).astype(q_rows.dtype)

            def factor(ref: Any) -> Any:
                place = (page, slot)[: ref.ndim]
                if not place:
                    return plgpu.load(ref)
                return plgpu.load(ref.at[*place], mask=seen, other=0.0)[None, :]

            scores = plgpu.dot(q_rows, tile(k_ref, head_dim, q_width).T) * call.softmax_scale
            if k_scale_ref is not None:
                scores = scores * factor(k_scale_ref)
            column = j * block + lax.broadcasted_iota(jnp.int32, (block_rows, block), 1)
            scores = jnp.where(
                call.visible(column, position, length), call.capped(scores, _tanh), HIDDEN_SCORE
            )
            before, largest = largest, jnp.maximum(largest, jnp.max(scores, axis=1))
            shrink = jnp.exp(before - largest)
            weights = jnp.exp(scores - largest[:, None])
            total = shrink * total + jnp.sum(weights, axis=1)
            v_tile = tile(v_ref, value_dim, v_width)
            if v_scale_ref is not None:
                weights = weights * factor(v_scale_ref)
            product = plgpu.dot(weights.astype(v_tile.dtype), v_tile)
            return largest, total, shrink[:, None] * weighted + product

        first = call.first_block(end, block)
        stop = lax.div(length + (block - 1), jnp.int32(block))
        # Blocks in use are shared out evenly, so that short sequences keep all programs busy.
        share = lax.div(stop - first + (splits - 1), jnp.int32(splits))
        begin = first + split * share
        start = (
            jnp.full((block_rows,), LOWEST_MAXIMUM, jnp.float32),
            jnp.zeros((block_rows,), jnp.float32),
            jnp.zeros((block_rows, v_width), jnp.float32),
        )
        largest, total, weighted = lax.fori_loop(
            begin, jnp.minimum(begin + share, stop), add_keys, start
        )
        real = total > 0.0
        total = jnp.where(real, total, 1.0)
        out_mask = _inside((block_rows, v_width), rows, value_dim)
        plgpu.store(out_ref, (weighted / total[:, None]).astype(out_ref.dtype), mask=out_mask)
        lse = jnp.where(real, largest + jnp.log(total), HIDDEN_SCORE)
        plgpu.store(lse_ref, lse, mask=lax.broadcasted_iota(jnp.int32, (block_rows,), 0) < rows)

    def cache(width: int) -> Any:
        return pl.BlockSpec((pages, page_size, None, width), lambda s, h, b: (0, 0, h, 0))

    def scale_spec(scale: jax.Array) -> Any:
        size = scale.shape[:-1]
        return pl.BlockSpec((*size, None), lambda s, h, b: (*(0,) * len(size), h))

    scales = [x.astype(jnp.float32) for x in (call.k_scale, call.v_scale) if x is not None]
    # Parts stay in float32 until they are put together.
    parts = jax.ShapeDtypeStruct((splits, batch, kv_heads, rows, value_dim), jnp.float32)
    out, lse = pl.pallas_call(
        kernel,
        grid=(splits, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((None, None, block_rows, q_width), lambda s, h, b: (b, h, 0, 0)),
            cache(q_width),
            cache(v_width),
            pl.BlockSpec((None, per_sequence), lambda s, h, b: (b, 0)),
            *[pl.BlockSpec((batch,), lambda s, h, b: (0,))] * 2,
            *map(scale_spec, scales),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, block_rows, v_width), lambda s, h, b: (s, b, h, 0, 0)),
            pl.BlockSpec((None, None, None, block_rows), lambda s, h, b: (s, b, h, 0)),
        ],
        out_shape=[parts, jax.ShapeDtypeStruct(parts.shape[:-1], jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=cfg.num_warps, num_stages=cfg.num_stages),
        name="paged_attention",
    )(
        *(call.rows_of_key_heads(), call.k_pages, call.v_pages, call.page_table),
        *(call.lengths, call.ends, *scales),
    )
    return call.from_rows(_joined(out, lse, call.sink_rows()))


def _joined(out: jax.Array, lse: jax.Array, sink: jax.Array | None) -> jax.Array:
    """The parts of all splits, weighted by their shares of the denominator."""
    largest = jnp.max(lse, axis=0)
    if sink is not None:
        largest = jnp.maximum(largest, sink)
    weights = jnp.where(lse <= LOWEST_MAXIMUM, 0.0, jnp.exp(lse - largest))
    total = jnp.sum(weights, axis=0)
    empty = total == 0.0
    if sink is not None:
        total = total + jnp.exp(sink - largest)
    weighted = jnp.einsum("sbhr,sbhrd->bhrd", weights, out)
    return jnp.where(empty[..., None], 0.0, weighted / jnp.where(empty, 1.0, total)[..., None])


def _block(size: int) -> int:
    return max(_SMALLEST_BLOCK, next_power_of_two(size))


def _inside(shape: tuple[int, int], rows: int, columns: int) -> Any:
    """Which elements of a block exist."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    return (row < rows) & (column < columns)


def _tanh(x: Any) -> Any:
    # Triton lowers tanh to a library call per element; this is two instructions more than exp.
    positive = jnp.exp(-2.0 * jnp.abs(x))
    return jnp.sign(x) * (1.0 - positive) / (1.0 + positive)


def _rows_fit(inv: Invocation[Any, Any]) -> str | None:
    """Few enough query rows of a key head that all are in the registers of a program."""
    (_, tokens, heads, _), kv_heads = inv.args[0].shape, inv.args[1].shape[2]
    if tokens * heads // kv_heads <= _MOST_ROWS:
        return None
    return (
        f"q has {tokens} tokens of {heads // kv_heads} heads for each key head, and at most "
        f"{_MOST_ROWS} rows are supported"
    )


def _features_fit(inv: Invocation[Any, Any]) -> str | None:
    """A head_dim and a value_dim whose tiles fit into the shared memory of a multiprocessor."""
    for name, pages in (("head_dim", inv.args[1]), ("value_dim", inv.args[2])):
        if pages.shape[3] > _MOST_FEATURES:
            return f"{name} is {pages.shape[3]}, and at most {_MOST_FEATURES} are supported"
    return None


PALLAS_GPU = implementation(
    attend,
    name="triton",
    devices=("gpu",),
    config=PagedAttentionGpuConfig,
    supports=Supports(dtypes=("float32", "bfloat16", "float16"), rules=(_rows_fit, _features_fit)),
)


def _group_fits(inv: Invocation[Any, Any]) -> str | None:
    """At most 128 query heads for a key head."""
    group = inv.args[0].shape[1] // inv.args[1].shape[2]
    return None if group <= _MOST_ROWS else f"{group} query heads share a key head, at most 128 may"


RAGGED_PALLAS_GPU = ragged_implementation(
    in_blocks(attend),
    name="triton",
    devices=("gpu",),
    config=RaggedPagedAttentionGpuConfig,
    supports=Supports(
        dtypes=("float32", "bfloat16", "float16", *SHORT_TYPES), rules=(_group_fits, _features_fit)
    ),
)
