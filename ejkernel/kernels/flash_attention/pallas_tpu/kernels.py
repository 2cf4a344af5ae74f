r"""Flash attention for TPU: Pallas kernels for the forward pass, for dq, and for dk and dv.

One more finds the statistics of the rows again, if there are large scores: `xla/large_scores.py`.

The mathematics is that of `xla/forward.py` and `xla/backward.py`. How it is laid out:

* Arrays are brought to `(batch, heads, sequence, features)` and padded to whole blocks, which XLA
  does in one pass. Blocks are multiples of 128, the lanes of a register.
* The grid walks over tiles; the innermost axis visits the tiles that one output block needs, and
  sums live in VMEM from its first step to its last. The axis is only as long as the causal
  triangle or the window makes it; steps outside fetch nothing new and compute nothing.
* Lengths and the smallest and largest segment of each block are prefetched as scalars, so tiles
  beyond a length, or of other segments, are skipped as well.
* Tiles that positions, lengths and segments leave whole are computed without comparing anything,
  and without regard to numbers that are not finite: whoever is there sees them.
* The shift and delta of queries are rows, `(1, block_q)`: as columns they would take a whole lane
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

from ...promotion import usual_promotion
from ..options import Options
from ..passes import Gradients, Results
from ..rows import (
    Rows,
    Statistics,
    exact_rows,
    is_large,
    sinks_gradient,
    softmax_statistics,
    with_shares,
)
from ..tiles import HIDDEN_SCORE, LOWEST_MAXIMUM, finite_part, keys_that_stay_apart, shown
from .call import (
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
    results: Results,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    interpret: bool = False,
) -> Gradients:
    """Gradients of `q`, `k`, `v`, and of `sinks` by name if there are any; none of a bias.

    The other arguments are as in `forward`; the blocks may differ from those used there.
    """
    q, k, v, out, lse, dout, dlse = results
    blocks: dict[str, Any] = {"block_q": block_q, "block_k": block_k, "interpret": interpret}
    rows = softmax_statistics(out, lse, dout, dlse)
    # The kernels for queries and keys turn tiles differently, which may round differently.
    found = lax.cond(
        jnp.any(is_large(rows.shift)),
        lambda: [_statistics(q, k, v, dout, options, turned=x, **blocks) for x in (False, True)],
        lambda: [Statistics(*[jnp.zeros_like(rows.shift)] * 3)] * 2,
    )
    of_queries, of_keys = (exact_rows(rows, x, options.sinks, dlse) for x in found)
    dq = _gradient_of_queries(q, k, v, dout, of_queries, options, **blocks)
    shift, delta, shared = with_shares(of_keys, dout, options)
    shared = shared.astype(dout.dtype)
    dk, dv = _gradient_of_keys(q, k, v, shared, shift, delta, options, **blocks)
    named = {}
    if options.sinks is not None:
        named["sinks"] = sinks_gradient(options.sinks, of_queries)
    return Gradients(dq, dk, dv, named)


def _statistics(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    options: Options,
    *,
    turned: bool,
    block_q: int,
    block_k: int,
    interpret: bool,
) -> Statistics:
    call = Call.of(q, k, options, block_q, block_k, turned=turned)
    tiles = call.tiles
    call.add_queries("q", q)
    call.add_keys("k", k)
    call.add_keys("v", v)
    call.add_queries("dout", dout)
    call.add_options()
    batch, q_len, heads, _ = q.shape
    row = (row_shape(batch, heads, tiles.padded_q_len), QueryRow(tiles.block_q))
    sums = (1, tiles.block_q) if turned else (tiles.block_q, LANES)
    found = call.run(
        partial(_statistics_body, call),
        name="flash_attention_statistics",
        grid=(batch, heads, tiles.q_blocks, tiles.key_steps),
        outputs=[row] * 3,
        scratch=[pltpu.VMEM(sums, jnp.float32)] * 3,
        interpret=interpret,
    )
    return Statistics(*(x[:, :, 0, :q_len] for x in found))


def _gradient_of_queries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    rows: Rows,
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
    for name, row in rows._asdict().items():
        call.add_query_rows(name, row)
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
    shift: jax.Array,
    delta: jax.Array,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    call = Call.of(q, k, options, block_q, block_k, keys_first=True, turned=True)
    tiles = call.tiles
    call.add_queries("q", q)
    call.add_keys("k", k)
    call.add_keys("v", v)
    call.add_queries("dout", dout)
    call.add_query_rows("shift", shift)
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
    _start_softmax(at, *scratch)

    def add_keys(*, masked: bool) -> None:
        k, v = refs["k"][0, 0], refs["v"][0, 0]
        visible = call.visible(at, refs) if masked else None
        if masked:
            k, v = keys_that_stay_apart(k, v)
        scores, _ = call.scores(refs, refs["q"][0, 0], k)
        scores = shown(scores, visible, HIDDEN_SCORE)
        shrink, weights = _add_to_softmax(scores, largest_ref, total_ref, axis=1)
        product = dot(weights.astype(v.dtype), v, ROWS_TIMES_COLUMNS)
        weighted_ref[...] = shrink * weighted_ref[...] + product

    call.visit(at, refs, add_keys)

    @pl.when(at.is_last)
    def finish() -> None:
        largest, total, weighted = largest_ref[...], total_ref[...], weighted_ref[...]
        real = total != 0.0  # a row that sees no key gives nothing, sink or not
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
        share_of_all = jnp.broadcast_to(share[:, :1], weighted.shape)
        # What does not exist may be NaN.
        out = jnp.where(share_of_all == 0.0, 0.0, weighted * share_of_all)
        out_ref[0, 0] = out.astype(out_ref.dtype)
        lse = jnp.where(real, largest + jnp.log(jnp.where(real, total, 1.0)), -jnp.inf)
        lse_ref[0, 0] = lse.T[:1]


def _start_softmax(at: Place, largest_ref: Any, total_ref: Any, weighted_ref: Any) -> None:
    @pl.when(at.is_first)
    def start() -> None:
        largest_ref[...] = jnp.full_like(largest_ref, LOWEST_MAXIMUM)
        total_ref[...] = jnp.zeros_like(total_ref)
        weighted_ref[...] = jnp.zeros_like(weighted_ref)


def _add_to_softmax(scores: Any, largest_ref: Any, total_ref: Any, *, axis: int) -> tuple[Any, Any]:
    """Add a tile to the sums of its queries; by what earlier sums shrink, and the tile's weights.

    Keys are along `axis`.
    """
    before = _once(largest_ref, axis)
    largest = jnp.maximum(before, jnp.max(scores, axis=axis, keepdims=True))
    shrink = jnp.exp(before - largest)
    weights = jnp.exp(scores - largest)
    total = shrink * _once(total_ref, axis) + jnp.sum(weights, axis=axis, keepdims=True)
    largest_ref[...] = jnp.broadcast_to(largest, largest_ref.shape)
    total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
    return shrink, weights


def _once(ref: Any, axis: int) -> Any:
    """The sums of queries: a row, or one of the equal columns."""
    return ref[:, :1] if axis == 1 else ref[...]


def _statistics_body(
    call: Call, at: Place, refs: dict[str, Any], outputs: Any, scratch: Any
) -> None:
    largest_ref, total_ref, weighted_ref = scratch
    axis = 0 if call.turned else 1
    _start_softmax(at, *scratch)

    def add_keys(*, masked: bool) -> None:
        visible = call.visible(at, refs) if masked else None
        scores, _ = call.scores(refs, refs["q"][0, 0], refs["k"][0, 0])
        scores = shown(scores, visible, HIDDEN_SCORE)
        shrink, weights = _add_to_softmax(scores, largest_ref, total_ref, axis=axis)
        dout, v = refs["dout"][0, 0], refs["v"][0, 0]
        dweights = dot(*((v, dout) if call.turned else (dout, v)), ROWS_TIMES_ROWS)
        added = jnp.sum(shown(weights * dweights, visible), axis=axis, keepdims=True)
        weighted = shrink * _once(weighted_ref, axis) + added
        weighted_ref[...] = jnp.broadcast_to(weighted, weighted_ref.shape)

    call.visit(at, refs, add_keys)

    @pl.when(at.is_last)
    def finish() -> None:
        for row_ref, sum_ref in zip(outputs, scratch, strict=True):
            row_ref[0, 0] = sum_ref[...] if call.turned else sum_ref[...].T[:1]


def _query_gradient_body(
    call: Call, at: Place, refs: dict[str, Any], outputs: Any, scratch: Any
) -> None:
    (dq_ref,) = outputs
    shift_ref, delta_ref, sum_ref = scratch

    @pl.when(at.is_first)
    def start() -> None:
        for column_ref, name in ((shift_ref, "shift"), (delta_ref, "delta")):
            column_ref[...] = jnp.broadcast_to(refs[name][0, 0], column_ref.shape[::-1]).T
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add_keys(*, masked: bool) -> None:
        k, v = refs["k"][0, 0], refs["v"][0, 0]
        visible = call.visible(at, refs) if masked else None
        scores, slope = call.scores(refs, refs["q"][0, 0], k)
        weights = jnp.exp(scores - shift_ref[:, :1])
        dweights = dot(refs["dout"][0, 0], v, ROWS_TIMES_ROWS)
        dscores = weights * (dweights - delta_ref[:, :1])
        if slope is not None:
            dscores *= slope
        if masked:
            dscores, k = shown(dscores, visible), finite_part(k)
        sum_ref[...] += dot(dscores.astype(k.dtype), k, ROWS_TIMES_COLUMNS)

    call.visit(at, refs, add_keys)

    @pl.when(at.is_last)
    def finish() -> None:
        share = jnp.broadcast_to(refs["share"][0, 0], shift_ref.shape[::-1]).T[:, :1]
        share = jnp.broadcast_to(share, sum_ref.shape)
        dq = call.options.softmax_scale * share * sum_ref[...]
        # What does not exist may be NaN.
        dq_ref[0, 0] = jnp.where(share == 0.0, 0.0, dq).astype(dq_ref.dtype)


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
        visible = call.visible(at, refs) if masked else None
        scores, slope = call.scores(refs, q, refs["k"][0, 0])
        weights = shown(jnp.exp(scores - refs["shift"][0, 0]), visible)
        v_sum_ref[...] += dot(weights.astype(dout.dtype), dout, ROWS_TIMES_COLUMNS)
        dweights = dot(refs["v"][0, 0], dout, ROWS_TIMES_ROWS)
        dscores = weights * (dweights - refs["delta"][0, 0])
        if slope is not None:
            dscores *= slope
        if masked:
            dscores, q = shown(dscores, visible), finite_part(q)
        k_sum_ref[...] += dot(dscores.astype(q.dtype), q, ROWS_TIMES_COLUMNS)

    call.visit(at, refs, add_queries)

    @pl.when(at.is_last)
    def finish() -> None:
        dk_ref[0, 0] = (call.options.softmax_scale * k_sum_ref[...]).astype(dk_ref.dtype)
        dv_ref[0, 0] = v_sum_ref[...].astype(dv_ref.dtype)
