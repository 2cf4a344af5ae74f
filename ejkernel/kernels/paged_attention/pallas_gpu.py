"""Paged attention for GPU: Pallas kernels that JAX lowers to Triton.

One program has the queries of one sequence that share a key head, and a share of the sequence's
keys. It looks up the page of each key in the page table and loads the keys where they are, so pages
may have any size. A GPU wants more programs than there are sequences and key heads: keys are shared
out to `num_key_splits` programs, whose results are put together afterwards by their log-sum-exps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..promotion import usual_promotion
from .hidden import hidden_score, lowest_maximum

_SMALLEST_BLOCK = 16  # of Triton's matrix products
_HIDDEN_SCORE = hidden_score()
_LOWEST_MAXIMUM = lowest_maximum()


@usual_promotion
def forward(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    softmax_scale: float,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    block_k: int = 64,
    num_key_splits: int = 8,
    num_warps: int = 4,
    num_stages: int = 2,
    interpret: bool = False,
) -> jax.Array:
    """What `paged_attention_reference` gives; a program loads `block_k` keys at a time."""
    batch, tokens, heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k_pages.shape
    value_dim = v_pages.shape[3]
    group = heads // kv_heads
    rows = tokens * group
    block_rows, q_width, v_width = _block(rows), _block(head_dim), _block(value_dim)
    block = _block(block_k)
    longest = page_table.shape[1] * page_size
    splits = max(1, min(num_key_splits, -(-longest // block)))

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, table_ref, lengths_ref, out_ref, lse_ref = refs
        split, sequence = pl.program_id(0), pl.program_id(2)
        length = plgpu.load(lengths_ref.at[sequence])
        row = lax.broadcasted_iota(jnp.int32, (block_rows, block), 0)
        position = length - tokens + lax.div(row, jnp.int32(group))
        q_mask = _inside((block_rows, q_width), rows, head_dim)
        q_rows = plgpu.load(q_ref, mask=q_mask, other=0.0)

        def add_keys(j: Any, state: Any) -> Any:
            largest, total, weighted = state
            key = j * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
            # What no query sees is not loaded: it may be another sequence's, or NaN.
            seen = key < length
            if window is not None:
                seen &= key >= length - tokens - window
            page = plgpu.load(table_ref.at[lax.div(key, jnp.int32(page_size))], mask=seen, other=0)
            slot = lax.rem(key, jnp.int32(page_size))

            def tile(ref: Any, features: int, width: int) -> Any:
                shape = (block, width)
                feature = lax.broadcasted_iota(jnp.int32, shape, 1)
                rows_of_pages = (jnp.broadcast_to(x[:, None], shape) for x in (page, slot))
                mask = seen[:, None] & (feature < features)
                return plgpu.load(ref.at[*rows_of_pages, feature], mask=mask, other=0.0)

            scores = plgpu.dot(q_rows, tile(k_ref, head_dim, q_width).T) * softmax_scale
            if logits_soft_cap is not None:
                scores = logits_soft_cap * _tanh(scores / logits_soft_cap)
            column = j * block + lax.broadcasted_iota(jnp.int32, (block_rows, block), 1)
            visible = column <= position
            if window is not None:
                visible &= column >= position - window
            scores = jnp.where(visible, scores, _HIDDEN_SCORE)
            before, largest = largest, jnp.maximum(largest, jnp.max(scores, axis=1))
            shrink = jnp.exp(before - largest)
            weights = jnp.exp(scores - largest[:, None])
            total = shrink * total + jnp.sum(weights, axis=1)
            v_tile = tile(v_ref, value_dim, v_width)
            product = plgpu.dot(weights.astype(v_tile.dtype), v_tile)
            return largest, total, shrink[:, None] * weighted + product

        first = jnp.int32(0)
        if window is not None:
            first = lax.div(jnp.maximum(length - tokens - window, 0), jnp.int32(block))
        end = lax.div(length + (block - 1), jnp.int32(block))
        # Blocks in use are shared out evenly, so that short sequences keep all programs busy.
        share = lax.div(end - first + (splits - 1), jnp.int32(splits))
        begin = first + split * share
        start = (
            jnp.full((block_rows,), _LOWEST_MAXIMUM, jnp.float32),
            jnp.zeros((block_rows,), jnp.float32),
            jnp.zeros((block_rows, v_width), jnp.float32),
        )
        largest, total, weighted = lax.fori_loop(
            begin, jnp.minimum(begin + share, end), add_keys, start
        )
        real = total > 0.0
        total = jnp.where(real, total, 1.0)
        out_mask = _inside((block_rows, v_width), rows, value_dim)
        plgpu.store(out_ref, (weighted / total[:, None]).astype(out_ref.dtype), mask=out_mask)
        lse = jnp.where(real, largest + jnp.log(total), _HIDDEN_SCORE)
        plgpu.store(lse_ref, lse, mask=lax.broadcasted_iota(jnp.int32, (block_rows,), 0) < rows)

    def cache(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((pages, page_size, None, width), lambda s, h, b: (0, 0, h, 0))

    by_head = q.reshape(batch, tokens, kv_heads, group, head_dim).swapaxes(1, 2)
    # Parts stay in float32 until they are put together.
    parts = jax.ShapeDtypeStruct((splits, batch, kv_heads, rows, value_dim), jnp.float32)
    out, lse = pl.pallas_call(
        kernel,
        grid=(splits, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((None, None, block_rows, q_width), lambda s, h, b: (b, h, 0, 0)),
            cache(q_width),
            cache(v_width),
            pl.BlockSpec((None, page_table.shape[1]), lambda s, h, b: (b, 0)),
            pl.BlockSpec((batch,), lambda s, h, b: (0,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, block_rows, v_width), lambda s, h, b: (s, b, h, 0, 0)),
            pl.BlockSpec((None, None, None, block_rows), lambda s, h, b: (s, b, h, 0)),
        ],
        out_shape=[parts, jax.ShapeDtypeStruct(parts.shape[:-1], jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="paged_attention",
    )(
        by_head.reshape(batch, kv_heads, rows, head_dim),
        k_pages,
        v_pages,
        # Whatever stands in the table, nothing outside of the cache is read.
        jnp.clip(page_table, 0, pages - 1).astype(jnp.int32),
        jnp.clip(lengths, 0, longest).astype(jnp.int32),
    )
    joined = _joined(out, lse, _sink_rows(sinks, kv_heads, tokens)).astype(q.dtype)
    joined = joined.reshape(batch, kv_heads, tokens, group, value_dim).swapaxes(1, 2)
    return joined.reshape(batch, tokens, heads, value_dim)


def _joined(out: jax.Array, lse: jax.Array, sink: jax.Array | None) -> jax.Array:
    """The parts of all splits, weighted by their shares of the denominator."""
    largest = jnp.max(lse, axis=0)
    if sink is not None:
        largest = jnp.maximum(largest, sink)
    weights = jnp.where(lse <= _LOWEST_MAXIMUM, 0.0, jnp.exp(lse - largest))
    total = jnp.sum(weights, axis=0)
    empty = total == 0.0
    if sink is not None:
        total = total + jnp.exp(sink - largest)
    weighted = jnp.einsum("sbhr,sbhrd->bhrd", weights, out)
    return jnp.where(empty[..., None], 0.0, weighted / jnp.where(empty, 1.0, total)[..., None])


def _sink_rows(sinks: jax.Array | None, kv_heads: int, tokens: int) -> jax.Array | None:
    """`(kv_heads, rows)`: the sink of each row of a program."""
    if sinks is None:
        return None
    return jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1), (1, tokens))


def _block(size: int) -> int:
    return max(_SMALLEST_BLOCK, pl.next_power_of_2(size))


def _inside(shape: tuple[int, int], rows: int, columns: int) -> Any:
    """Which elements of a block exist."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    return (row < rows) & (column < columns)


def _tanh(x: Any) -> Any:
    # Triton lowers tanh to a library call per element; this is two instructions more than exp.
    positive = jnp.exp(-2.0 * jnp.abs(x))
    return jnp.sign(x) * (1.0 - positive) / (1.0 + positive)
