r"""Flash attention for GPU: Pallas kernels that JAX lowers to Triton, forward, dq, and dk with dv.

One more finds the statistics of rows with large scores again: `xla/large_scores.py`.

The mathematics is that of `xla/forward.py` and `xla/backward.py`. How it is laid out:

* Arrays are read where they are, `(batch, sequence, heads, features)`; what a block has beyond the
  ends of a sequence or of a feature dimension is masked when it is loaded. Only `dout` is copied,
  multiplied by the shares of its rows.
* One program computes one output block and loops over the tiles that it needs. Causality, windows,
  lengths and segments shorten the loop. Tiles that positions and lengths leave whole have a loop of
  their own, in which no position is compared, and no regard paid to numbers that are not finite:
  whoever is there sees them.
* The program for dk and dv works on transposed tiles, and loops over the query heads that share
  its key head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...promotion import usual_promotion
from ..options import Options
from ..passes import Gradients, Results
from ..rows import (
    NOTHING_SEEN,
    Rows,
    Statistics,
    exact_rows,
    is_large,
    sinks_gradient,
    softmax_statistics,
    with_shares,
)
from ..tiles import HIDDEN_SCORE, LOWEST_MAXIMUM, Index, finite_part, keys_that_stay_apart, shown
from .call import Call, Place, key_block, load, padded, queries_of_group, query_block, store


@usual_promotion
def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    num_warps: int = 4,
    num_stages: int = 2,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators.

    Args:
        q: Queries, `(batch, q_len, heads, head_dim)`.
        k: Keys, `(batch, kv_len, kv_heads, head_dim)`.
        v: Values, `(batch, kv_len, kv_heads, value_dim)`.
        options: The keywords of the call.
        block_q: Queries in a tile; rounded up to a power of two.
        block_k: Keys in a tile; rounded up to a power of two.
        num_warps: Warps that share a program.
        num_stages: Tiles that are loaded ahead, and the one at hand.
        interpret: Run on any device, slowly.

    Returns:
        `out`, `(batch, q_len, heads, value_dim)` of `q`'s dtype, and `lse`, float32,
        `(batch, heads, q_len)`, -inf for rows that attend to nothing.
    """
    batch, q_len, heads, _ = q.shape
    value_dim = v.shape[3]
    call = Call.of(q, k, options, block_q, block_k)
    tiles = call.tiles
    call.add("q", q, query_block(tiles, q))
    call.add("k", k, call.all_keys(k))
    call.add("v", v, call.all_keys(v))
    call.add_options()
    out_shape = jax.ShapeDtypeStruct((batch, q_len, heads, value_dim), q.dtype)

    def body(at: Place, refs: dict[str, Any], outputs: Any) -> None:
        q_tile = load(refs["q"], (q_len - at.i * tiles.block_q, q.shape[3]))
        rows = tiles.block_q

        def add_keys(j: Index, state: Any, *, masked: bool) -> Any:
            largest, total, weighted = state
            k_tile, v_tile = call.key_tile(refs["k"], j, k), call.key_tile(refs["v"], j, v)
            visible = call.visible(at, refs, at.i, j) if masked else None
            if masked:
                k_tile, v_tile = keys_that_stay_apart(k_tile, v_tile)
            scores, _ = call.scores(at, refs, at.i, j, q_tile, k_tile)
            scores = shown(scores, visible, HIDDEN_SCORE)
            largest, total, shrink, weights = _add_to_softmax(scores, largest, total, axis=1)
            product = plgpu.dot(weights.astype(v_tile.dtype), v_tile)
            return largest, total, shrink[:, None] * weighted + product

        start = (
            jnp.full((rows,), LOWEST_MAXIMUM, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, padded(value_dim)), jnp.float32),
        )
        largest, total, weighted = call.over_keys(at, refs, add_keys, start)
        real = total != 0.0  # a row that sees no key gives nothing, sink or not
        if "sinks" in refs:
            sink = plgpu.load(refs["sinks"].at[at.head])
            with_sink = jnp.maximum(largest, sink)
            shrink = jnp.exp(largest - with_sink)
            total = shrink * total + jnp.exp(sink - with_sink)
            weighted = shrink[:, None] * weighted
            largest = with_sink
        if "q_lengths" in refs:
            row = at.i * tiles.block_q + lax.broadcasted_iota(jnp.int32, (rows,), 0)
            real &= row < plgpu.load(refs["q_lengths"].at[at.batch])
        share = jnp.where(real, 1.0 / jnp.where(real, total, 1.0), 0.0)
        lse = jnp.where(real, largest + jnp.log(jnp.where(real, total, 1.0)), -jnp.inf)
        out_ref, lse_ref = outputs
        left = q_len - at.i * tiles.block_q
        # What does not exist may be NaN.
        store(out_ref, jnp.where(real[:, None], weighted * share[:, None], 0.0), (left, value_dim))
        store(lse_ref, lse, (left,))

    out, lse = call.run(
        body,
        name="flash_attention_forward",
        grid=(tiles.q_blocks, heads, batch),
        outputs=[
            (out_shape, query_block(tiles, out_shape)),
            (
                jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32),
                pl.BlockSpec((None, None, tiles.block_q), lambda i, h, b: (b, h, i)),
            ),
        ],
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
    )
    return out, lse


@usual_promotion
def backward(
    results: Results,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    num_warps: int = 4,
    num_stages: int = 2,
    interpret: bool = False,
) -> Gradients:
    """Gradients of `q`, `k`, `v`, and of `sinks` by name if there are any; none of a bias.

    The other arguments are as in `forward`; the blocks may differ from those used there.
    """
    q, k, v, out, lse, dout, dlse = results
    launch: dict[str, Any] = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "interpret": interpret,
    }
    rows = softmax_statistics(out, lse, dout, dlse)
    # The kernels for queries and keys turn tiles differently, which may round differently.
    found = _statistics(q, k, v, dout, rows.shift, options, block_q, block_k, **launch)
    of_queries, of_keys = (exact_rows(rows, x, options.sinks, dlse) for x in found)
    dq = _gradient_of_queries(q, k, v, dout, of_queries, options, block_q, block_k, **launch)
    shift, delta, shared = with_shares(of_keys, dout, options)
    arrays = (q, k, v, shared.astype(dout.dtype), shift, delta)
    dk, dv = _gradient_of_keys(*arrays, options, block_q, block_k, **launch)
    named = {}
    if options.sinks is not None:
        named["sinks"] = sinks_gradient(options.sinks, of_queries)
    return Gradients(dq, dk, dv, named)


def _add_to_softmax(
    scores: Any, largest: Any, total: Any, *, axis: int
) -> tuple[Any, Any, Any, Any]:
    """The largest scores and totals of queries with a tile added, by what earlier sums shrink, and
    the tile's weights. Keys are along `axis`."""
    before, largest = largest, jnp.maximum(largest, jnp.max(scores, axis=axis))
    shrink = jnp.exp(before - largest)
    weights = jnp.exp(scores - jnp.expand_dims(largest, axis))
    return largest, shrink * total + jnp.sum(weights, axis=axis), shrink, weights


def _statistics(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    shift: jax.Array,
    options: Options,
    block_q: int,
    block_k: int,
    **launch: Any,
) -> list[Statistics]:
    """The statistics of the query blocks in which a shift is large; of the others, nothing.

    The first are by tiles as they are for the gradient of queries, the others by turned ones.

    A program that has nothing to do ends at once. A condition around the call would be cheaper by
    that, but the host would have to wait for it.
    """
    batch, q_len, heads, head_dim = q.shape
    call = Call.of(q, k, options, block_q, block_k)
    tiles = call.tiles
    row = pl.BlockSpec((None, None, tiles.block_q), lambda i, h, b: (b, h, i))
    call.add("q", q, query_block(tiles, q))
    call.add("k", k, call.all_keys(k))
    call.add("v", v, call.all_keys(v))
    call.add("dout", dout, query_block(tiles, dout))
    call.add("shift", shift, row)
    call.add_options()

    def body(at: Place, refs: dict[str, Any], outputs: Any) -> None:
        left = q_len - at.i * tiles.block_q
        large = is_large(load(refs["shift"], (left,)))
        any_large = jnp.max(large.astype(jnp.int32)) > 0
        needed = jnp.where(any_large, left, 0)  # what is not needed is not even loaded
        q_tile = load(refs["q"], (needed, head_dim))
        dout_tile = load(refs["dout"], (needed, dout.shape[3]))

        def over_keys(turned: bool) -> Any:
            own, axis = dataclasses.replace(call, turned=turned), 0 if turned else 1

            def add_keys(j: Index, state: Any, *, masked: bool) -> Any:
                largest, total, weighted = state
                k_tile, v_tile = call.key_tile(refs["k"], j, k), call.key_tile(refs["v"], j, v)
                visible = own.visible(at, refs, at.i, j) if masked else None
                scores, _ = own.scores(at, refs, at.i, j, q_tile, k_tile)
                scores = shown(scores, visible, HIDDEN_SCORE)
                largest, total, shrink, weights = _add_to_softmax(scores, largest, total, axis=axis)
                factors = (v_tile, dout_tile.T) if turned else (dout_tile, v_tile.T)
                added = jnp.sum(shown(weights * plgpu.dot(*factors), visible), axis=axis)
                return largest, total, shrink * weighted + added

            zeros = jnp.zeros((tiles.block_q,), jnp.float32)
            start = (jnp.full((tiles.block_q,), LOWEST_MAXIMUM, jnp.float32), zeros, zeros)
            return own.over_keys(at, refs, add_keys, start, only_if=any_large)

        for ref, x in zip(outputs, (*over_keys(False), *over_keys(True)), strict=True):
            store(ref, x, (left,))

    shape = jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32)
    found = call.run(
        body,
        name="flash_attention_statistics",
        grid=(tiles.q_blocks, heads, batch),
        outputs=[(shape, row)] * 6,
        **launch,
    )
    return [Statistics(*found[:3]), Statistics(*found[3:])]


def _gradient_of_queries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    rows: Rows,
    options: Options,
    block_q: int,
    block_k: int,
    **launch: Any,
) -> jax.Array:
    batch, q_len, heads, head_dim = q.shape
    call = Call.of(q, k, options, block_q, block_k)
    tiles = call.tiles
    row_block = pl.BlockSpec((None, None, tiles.block_q), lambda i, h, b: (b, h, i))
    call.add("q", q, query_block(tiles, q))
    call.add("k", k, call.all_keys(k))
    call.add("v", v, call.all_keys(v))
    call.add("dout", dout, query_block(tiles, dout))
    for name, row in rows._asdict().items():
        call.add(name, row, row_block)
    call.add_options()

    def body(at: Place, refs: dict[str, Any], outputs: Any) -> None:
        left = q_len - at.i * tiles.block_q
        q_tile = load(refs["q"], (left, head_dim))
        dout_tile = load(refs["dout"], (left, dout.shape[3]))
        shift_rows = load(refs["shift"], (left,), other=NOTHING_SEEN)
        delta_rows = load(refs["delta"], (left,))

        def add_keys(j: Index, total: Any, *, masked: bool) -> Any:
            k_tile, v_tile = call.key_tile(refs["k"], j, k), call.key_tile(refs["v"], j, v)
            visible = call.visible(at, refs, at.i, j) if masked else None
            scores, slope = call.scores(at, refs, at.i, j, q_tile, k_tile)
            weights = jnp.exp(scores - shift_rows[:, None])
            dweights = plgpu.dot(dout_tile, v_tile.T)
            dscores = weights * (dweights - delta_rows[:, None])
            if slope is not None:
                dscores *= slope
            if masked:
                dscores, k_tile = shown(dscores, visible), finite_part(k_tile)
            return total + plgpu.dot(dscores.astype(k_tile.dtype), k_tile)

        start = jnp.zeros((tiles.block_q, padded(head_dim)), jnp.float32)
        total = call.over_keys(at, refs, add_keys, start)
        share = load(refs["share"], (left,))[:, None]
        # What does not exist may be NaN.
        dq = jnp.where(share == 0.0, 0.0, options.softmax_scale * share * total)
        store(outputs[0], dq, (left, head_dim))

    (dq,) = call.run(
        body,
        name="flash_attention_dq",
        grid=(tiles.q_blocks, heads, batch),
        outputs=[(jax.ShapeDtypeStruct(q.shape, q.dtype), query_block(tiles, q))],
        **launch,
    )
    return dq


def _gradient_of_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    shift: jax.Array,
    delta: jax.Array,
    options: Options,
    block_q: int,
    block_k: int,
    **launch: Any,
) -> tuple[jax.Array, jax.Array]:
    batch, q_len = q.shape[:2]
    _, kv_len, kv_heads, head_dim = k.shape
    value_dim = v.shape[3]
    call = Call.of(q, k, options, block_q, block_k, keys_first=True)
    tiles, group = call.tiles, call.group
    rows = pl.BlockSpec((None, group, tiles.padded_q_len), lambda j, h, b: (b, h, 0))
    call.add("q", q, queries_of_group(tiles, group, q))
    call.add("k", k, key_block(tiles, k))
    call.add("v", v, key_block(tiles, v))
    call.add("dout", dout, queries_of_group(tiles, group, dout))
    call.add("shift", shift, rows)
    call.add("delta", delta, rows)
    call.add_options()

    def body(at: Place, refs: dict[str, Any], outputs: Any) -> None:
        left = kv_len - at.j * tiles.block_k
        k_tile = load(refs["k"], (left, head_dim))
        v_tile = load(refs["v"], (left, value_dim))

        def add_head(member: Index, sums: Any) -> Any:
            head = Place(at.batch, at.kv_head * group + member, at.kv_head, at.i, at.j)

            def add_queries(i: Index, sums: Any, *, masked: bool) -> Any:
                dk, dv = sums
                start = i * tiles.block_q
                part, real = pl.ds(start, tiles.block_q), q_len - start
                q_tile = load(refs["q"].at[part, member, :], (real, head_dim))
                dout_tile = load(refs["dout"].at[part, member, :], (real, value_dim))
                shift_rows = load(refs["shift"].at[member, part], (real,), other=NOTHING_SEEN)
                delta_rows = load(refs["delta"].at[member, part], (real,))
                visible = call.visible(head, refs, i, at.j) if masked else None
                scores, slope = call.scores(head, refs, i, at.j, q_tile, k_tile)
                weights = shown(jnp.exp(scores - shift_rows[None, :]), visible)
                dv += plgpu.dot(weights.astype(dout_tile.dtype), dout_tile)
                dweights = plgpu.dot(v_tile, dout_tile.T)
                dscores = weights * (dweights - delta_rows[None, :])
                if slope is not None:
                    dscores *= slope
                if masked:
                    dscores, q_tile = shown(dscores, visible), finite_part(q_tile)
                return dk + plgpu.dot(dscores.astype(q_tile.dtype), q_tile), dv

            return call.over_queries(at, refs, add_queries, sums)

        sums = (
            jnp.zeros((tiles.block_k, padded(head_dim)), jnp.float32),
            jnp.zeros((tiles.block_k, padded(value_dim)), jnp.float32),
        )
        if group == 1:
            dk, dv = add_head(jnp.int32(0), sums)
        else:
            dk, dv = lax.fori_loop(0, group, add_head, sums)
        store(outputs[0], options.softmax_scale * dk, (left, head_dim))
        store(outputs[1], dv, (left, value_dim))

    dk, dv = call.run(
        body,
        name="flash_attention_dkv",
        grid=(tiles.k_blocks, kv_heads, batch),
        outputs=[(jax.ShapeDtypeStruct(x.shape, x.dtype), key_block(tiles, x)) for x in (k, v)],
        **launch,
    )
    return dk, dv
