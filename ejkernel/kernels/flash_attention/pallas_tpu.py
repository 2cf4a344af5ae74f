r"""Flash attention for TPU: Pallas kernels for the forward pass, for dq, and for dk and dv.

The mathematics is that of :mod:`.xla`. How it is laid out:

* Arrays are brought to `(batch, heads, sequence, features)` and padded to whole blocks, which XLA
  does in one pass. Blocks are multiples of 128, the lanes of a register.
* The grid walks over tiles; the innermost axis visits the tiles that one output block needs, and
  sums live in VMEM from its first step to its last. The axis is only as long as the causal
  triangle or the window makes it; steps outside fetch nothing new and compute nothing.
* Lengths and the smallest and largest segment of each block are prefetched as scalars, so tiles
  beyond a length, or of other segments, are skipped as well.
* Tiles that positions leave whole are computed without comparing positions.
* The log-sum-exp and delta are rows, `(1, block_q)`: as columns they would take a whole lane
  register per number. The kernel for dk and dv works on transposed tiles, which want rows; the
  other two turn a block around once per query block.
* Query heads that share a key head read it through the index map; its gradient is summed over
  them in VMEM.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..promotion import usual_promotion
from .options import Options
from .pallas_tiles import (
    LOWEST_MAXIMUM,
    delta_of,
    sinks_gradient,
    without_empty_rows,
)
from .pallas_tpu_call import (
    LANES,
    ROWS_TIMES_COLUMNS,
    ROWS_TIMES_ROWS,
    Call,
    Key,
    Place,
    Query,
    QueryRow,
    dot,
    row_shape,
)


@usual_promotion
def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators.

    Args:
        q: Queries, `(batch, q_len, heads, head_dim)`.
        k: Keys, `(batch, kv_len, kv_heads, head_dim)`.
        v: Values, `(batch, kv_len, kv_heads, value_dim)`.
        options: The keywords of the call.
        block_q: Most queries in a tile; rounded up to a multiple of 128.
        block_k: Most keys in a tile; rounded up to a multiple of 128.
        interpret: Run on any device, slowly.

    Returns:
        `out`, `(batch, q_len, heads, value_dim)` of `q`'s dtype, and `lse`, float32,
        `(batch, heads, q_len)`, -inf for rows that attend to nothing.
    """
    batch, q_len, heads, _ = q.shape
    value_dim = v.shape[3]
    call = Call.of(q, k, options, block_q, block_k)
    tiles = call.tiles
    call.add_queries("q", q)
    call.add_keys("k", k)
    call.add_keys("v", v)
    call.add_options()
    shape = (batch, heads, tiles.padded_q_len, value_dim)
    out, lse = call.run(
        partial(_forward_body, call),
        name="flash_attention_forward",
        grid=(batch, heads, tiles.q_blocks, tiles.key_steps),
        outputs=[
            (jax.ShapeDtypeStruct(shape, q.dtype), Query(tiles.block_q, value_dim)),
            (row_shape(batch, heads, tiles.padded_q_len), QueryRow(tiles.block_q)),
        ],
        scratch=[
            pltpu.VMEM((tiles.block_q, LANES), jnp.float32),
            pltpu.VMEM((tiles.block_q, LANES), jnp.float32),
            pltpu.VMEM((tiles.block_q, value_dim), jnp.float32),
        ],
        interpret=interpret,
    )
    return out[:, :, :q_len].swapaxes(1, 2), lse[:, :, 0, :q_len]


@usual_promotion
def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """Gradients of `q`, `k`, `v`, and of `sinks` by name if there are any; none of a bias.

    Args:
        q: As in :func:`forward`, and so are `k`, `v`, `options`, blocks and `interpret`.
        out: First result of :func:`forward`.
        lse: Second result of :func:`forward`.
        dout: Gradient of the loss with respect to `out`.
        dlse: The same with respect to `lse`, or None.
    """
    delta = delta_of(out, dout, dlse)
    shared = (q, k, v, dout, without_empty_rows(lse), delta, options)
    blocks: dict[str, Any] = {"block_q": block_q, "block_k": block_k, "interpret": interpret}
    dq = _gradient_of_queries(*shared, **blocks)
    dk, dv = _gradient_of_keys(*shared, **blocks)
    named = {}
    if options.sinks is not None:
        named["sinks"] = sinks_gradient(options.sinks, lse, delta)
    return dq, dk, dv, named


def _gradient_of_queries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    interpret: bool,
) -> jax.Array:
    call = Call.of(q, k, options, block_q, block_k)
    tiles = call.tiles
    call.add_queries("q", q)
    call.add_keys("k", k)
    call.add_keys("v", v)
    call.add_queries("dout", dout)
    call.add_query_rows("lse", lse)
    call.add_query_rows("delta", delta)
    call.add_options()
    batch, q_len, heads, head_dim = q.shape
    shape = (batch, heads, tiles.padded_q_len, head_dim)
    (dq,) = call.run(
        partial(_query_gradient_body, call),
        name="flash_attention_dq",
        grid=(batch, heads, tiles.q_blocks, tiles.key_steps),
        outputs=[(jax.ShapeDtypeStruct(shape, q.dtype), Query(tiles.block_q, head_dim))],
        scratch=[
            pltpu.VMEM((tiles.block_q, LANES), jnp.float32),
            pltpu.VMEM((tiles.block_q, LANES), jnp.float32),
            pltpu.VMEM((tiles.block_q, head_dim), jnp.float32),
        ],
        interpret=interpret,
    )
    return dq[:, :, :q_len].swapaxes(1, 2)


def _gradient_of_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    call = Call.of(q, k, options, block_q, block_k, keys_first=True)
    tiles = call.tiles
    call.add_queries("q", q)
    call.add_keys("k", k)
    call.add_keys("v", v)
    call.add_queries("dout", dout)
    call.add_query_rows("lse", lse)
    call.add_query_rows("delta", delta)
    call.add_options()
    batch, kv_len, kv_heads, head_dim = k.shape
    value_dim = v.shape[3]
    length = tiles.padded_kv_len
    dk, dv = call.run(
        partial(_key_gradient_body, call),
        name="flash_attention_dkv",
        grid=(batch, kv_heads, tiles.k_blocks, call.group, tiles.query_steps),
        outputs=[
            (
                jax.ShapeDtypeStruct((batch, kv_heads, length, features), like.dtype),
                Key(tiles.block_k, features),
            )
            for like, features in ((k, head_dim), (v, value_dim))
        ],
        scratch=[
            pltpu.VMEM((tiles.block_k, head_dim), jnp.float32),
            pltpu.VMEM((tiles.block_k, value_dim), jnp.float32),
        ],
        interpret=interpret,
    )
    return dk[:, :, :kv_len].swapaxes(1, 2), dv[:, :, :kv_len].swapaxes(1, 2)


# --- bodies --------------------------------------------------------------------------------------


def _forward_body(call: Call, at: Place, refs: dict[str, Any], outputs: Any, scratch: Any) -> None:
    out_ref, lse_ref = outputs
    largest_ref, total_ref, weighted_ref = scratch

    @pl.when(at.is_first)
    def start() -> None:
        largest_ref[...] = jnp.full_like(largest_ref, LOWEST_MAXIMUM)
        total_ref[...] = jnp.zeros_like(total_ref)
        weighted_ref[...] = jnp.zeros_like(weighted_ref)

    def add_keys(*, masked: bool) -> None:
        scores, _ = call.scores(at, refs, refs["q"][0, 0], refs["k"][0, 0], masked=masked)
        v = refs["v"][0, 0]
        before = largest_ref[:, :1]
        largest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(before - largest)
        weights = jnp.exp(scores - largest)
        total = shrink * total_ref[:, :1] + jnp.sum(weights, axis=1, keepdims=True)
        largest_ref[...] = jnp.broadcast_to(largest, largest_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        product = dot(weights.astype(v.dtype), v, ROWS_TIMES_COLUMNS)
        weighted_ref[...] = shrink * weighted_ref[...] + product

    call.visit(at, add_keys)

    @pl.when(at.is_last)
    def finish() -> None:
        largest, total, weighted = largest_ref[...], total_ref[...], weighted_ref[...]
        real = total > 0.0  # a row that sees no key gives nothing, sink or not
        if "sinks" in refs:
            sink = refs["sinks"][at.head]
            with_sink = jnp.maximum(largest, sink)
            shrink = jnp.exp(largest - with_sink)
            total = shrink * total + jnp.exp(sink - with_sink)
            weighted = shrink[:, :1] * weighted
            largest = with_sink
        if "q_lengths" in refs:
            row = at.i * call.tiles.block_q + lax.broadcasted_iota(jnp.int32, total.shape, 0)
            real &= row < refs["q_lengths"][at.batch]
        share = jnp.where(real, 1.0 / jnp.where(real, total, 1.0), 0.0)
        out_ref[0, 0] = (weighted * share[:, :1]).astype(out_ref.dtype)
        lse = jnp.where(real, largest + jnp.log(jnp.where(real, total, 1.0)), -jnp.inf)
        lse_ref[0, 0] = lse.T[:1]


def _query_gradient_body(
    call: Call, at: Place, refs: dict[str, Any], outputs: Any, scratch: Any
) -> None:
    (dq_ref,) = outputs
    lse_ref, delta_ref, sum_ref = scratch

    @pl.when(at.is_first)
    def start() -> None:
        for column_ref, name in ((lse_ref, "lse"), (delta_ref, "delta")):
            column_ref[...] = jnp.broadcast_to(refs[name][0, 0], column_ref.shape[::-1]).T
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add_keys(*, masked: bool) -> None:
        k, v = refs["k"][0, 0], refs["v"][0, 0]
        scores, slope = call.scores(at, refs, refs["q"][0, 0], k, masked=masked)
        weights = jnp.exp(scores - lse_ref[:, :1])
        dweights = dot(refs["dout"][0, 0], v, ROWS_TIMES_ROWS)
        dscores = weights * (dweights - delta_ref[:, :1])
        if slope is not None:
            dscores *= slope
        sum_ref[...] += dot(dscores.astype(k.dtype), k, ROWS_TIMES_COLUMNS)

    call.visit(at, add_keys)

    @pl.when(at.is_last)
    def finish() -> None:
        dq_ref[0, 0] = (call.options.softmax_scale * sum_ref[...]).astype(dq_ref.dtype)


def _key_gradient_body(
    call: Call, at: Place, refs: dict[str, Any], outputs: Any, scratch: Any
) -> None:
    dk_ref, dv_ref = outputs
    k_sum_ref, v_sum_ref = scratch

    @pl.when(at.is_first)
    def start() -> None:
        k_sum_ref[...] = jnp.zeros_like(k_sum_ref)
        v_sum_ref[...] = jnp.zeros_like(v_sum_ref)

    def add_queries(*, masked: bool) -> None:
        q, dout = refs["q"][0, 0], refs["dout"][0, 0]
        scores, slope = call.scores(at, refs, q, refs["k"][0, 0], masked=masked)
        weights = jnp.exp(scores - refs["lse"][0, 0])
        v_sum_ref[...] += dot(weights.astype(dout.dtype), dout, ROWS_TIMES_COLUMNS)
        dweights = dot(refs["v"][0, 0], dout, ROWS_TIMES_ROWS)
        dscores = weights * (dweights - refs["delta"][0, 0])
        if slope is not None:
            dscores *= slope
        k_sum_ref[...] += dot(dscores.astype(q.dtype), q, ROWS_TIMES_COLUMNS)

    call.visit(at, add_queries)

    @pl.when(at.is_last)
    def finish() -> None:
        dk_ref[0, 0] = (call.options.softmax_scale * k_sum_ref[...]).astype(dk_ref.dtype)
        dv_ref[0, 0] = v_sum_ref[...].astype(dv_ref.dtype)
