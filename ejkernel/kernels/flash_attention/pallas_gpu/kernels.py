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

from ...promotion import usual_promotion
from ..options import Options
from ..pallas import LOWEST_MAXIMUM, Place, Refs, gradients
from ..passes import Gradients, Results
from ..rows import NOTHING_SEEN, Rows, Statistics, is_large
from ..tiles import Index
from .call import Call, load, padded, store


@usual_promotion
def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, options: Options, **sizes: Any
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators: arrays as in `xla.forward`.

    Args:
      q, k, v: the arrays of the call.
      options: its keywords.
      block_q: queries in a tile; rounded up to a power of two.
      block_k: keys in a tile; rounded up to a power of two.
      num_warps: warps that share a program.
      num_stages: tiles that are loaded ahead, and the one at hand.
      interpret: run on any device, slowly.
    """
    batch, q_len, heads, head_dim = q.shape
    value_dim = v.shape[3]
    call = Call.of(q, k, v, options, **sizes)
    rows = call.tiles.block_q

    def body(at: Place, refs: Refs, outputs: Any) -> None:
        left = q_len - at.i * rows
        q_tile = load(refs["q"], (left, head_dim))

        def add_keys(at: Place, state: Any, *, masked: bool) -> Any:
            *met, weighted = state
            arrays = (q_tile, *call.key_tiles(at, refs))
            *met, shrink, added = call.attend(at, refs, arrays, met, masked=masked)
            return *met, shrink[:, None] * weighted + added

        start = (*_nothing_met(rows)[:2], jnp.zeros((rows, padded(value_dim)), jnp.float32))
        state = call.each_tile(at, refs, add_keys, start)
        lse, weighted, share = call.finish(at, refs, *state)
        out = jnp.where(share[:, None] == 0.0, 0.0, weighted * share[:, None])
        store(outputs[0], out, (left, value_dim))
        store(outputs[1], lse, (left,))

    out_like = jax.ShapeDtypeStruct((batch, q_len, heads, value_dim), q.dtype)
    lse_like = jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32)
    out, lse = call.run(
        body,
        name="flash_attention_forward",
        outputs=[(out_like, call.queries(out_like)), (lse_like, call.rows)],
    )
    return out, lse


def _nothing_met(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest scores and the sums of queries that have met no key."""
    zeros = jnp.zeros((rows,), jnp.float32)
    return jnp.full((rows,), LOWEST_MAXIMUM, jnp.float32), zeros, zeros


@usual_promotion
def backward(results: Results, options: Options, **sizes: Any) -> Gradients:
    """Gradients of `q`, `k`, `v`, and of `sinks` by name if there are any; none of a bias.

    The other arguments are as in `forward`; the blocks may differ from those used there.
    """
    q, k, v, _, _, dout, _ = results

    def of_keys(dout: jax.Array, rows: dict[str, jax.Array]) -> list[jax.Array]:
        turned: Any = {"keys_first": True, "turned": True}
        call = Call.of(q, k, v, options, dout=dout, rows=rows, **turned, **sizes)
        return _gradient_of_keys(call, q, k, v)

    def of_queries(rows: Rows) -> jax.Array:
        call = Call.of(q, k, v, options, dout=dout, rows=rows._asdict(), **sizes)
        return _gradient_of_queries(call, q, v)

    def statistics(rows: Rows) -> list[Statistics]:
        call = Call.of(q, k, v, options, dout=dout, rows={"shift": rows.shift}, **sizes)
        return _statistics(call, q, v, rows.shift)

    return gradients(results, options, statistics, of_queries, of_keys)


def _statistics(call: Call, q: jax.Array, v: jax.Array, shift: jax.Array) -> list[Statistics]:
    """The statistics of the query blocks in which a shift is large; of the others, nothing.

    The first are by tiles as they are for the gradient of queries, the others by turned ones.

    A program that has nothing to do ends at once. A condition around the call would be cheaper by
    that, but the host would have to wait for it.
    """
    (_, q_len, _, head_dim), value_dim = q.shape, v.shape[3]
    tiles = call.tiles

    def body(at: Place, refs: Refs, outputs: Any) -> None:
        left = q_len - at.i * tiles.block_q
        large = is_large(load(refs["shift"], (left,)))
        any_large = jnp.max(large.astype(jnp.int32)) > 0
        needed = jnp.where(any_large, left, 0)  # what is not needed is not even loaded
        q_tile = load(refs["q"], (needed, head_dim))
        dout_tile = load(refs["dout"], (needed, value_dim))

        def over_keys(turned: bool) -> Any:
            own = dataclasses.replace(call, turned=turned)

            def add_keys(at: Place, state: Any, *, masked: bool) -> Any:
                *met, weighted = state
                arrays = (q_tile, *call.key_tiles(at, refs), dout_tile)
                *met, shrink, added = own.collect(at, refs, arrays, met, masked=masked)
                return *met, shrink * weighted + added

            start = _nothing_met(tiles.block_q)
            return own.each_tile(at, refs, add_keys, start, only_if=any_large)

        for ref, x in zip(outputs, (*over_keys(False), *over_keys(True)), strict=True):
            store(ref, x, (left,))

    outputs = [(shift, call.rows)] * 6
    found = call.run(body, name="flash_attention_statistics", outputs=outputs)
    return [Statistics(*found[:3]), Statistics(*found[3:])]


def _gradient_of_queries(call: Call, q: jax.Array, v: jax.Array) -> jax.Array:
    (_, q_len, _, head_dim), value_dim = q.shape, v.shape[3]
    tiles = call.tiles

    def body(at: Place, refs: Refs, outputs: Any) -> None:
        left = q_len - at.i * tiles.block_q
        q_tile = load(refs["q"], (left, head_dim))
        dout_tile = load(refs["dout"], (left, value_dim))
        shift = load(refs["shift"], (left,), other=NOTHING_SEEN)
        delta = load(refs["delta"], (left,))

        def add_keys(at: Place, total: Any, *, masked: bool) -> Any:
            k_tile, v_tile = call.key_tiles(at, refs)
            weights = call.weights(at, refs, q_tile, k_tile, shift[:, None], masked=masked)
            ds, k_tile = call.d_scores(
                weights, v_tile, dout_tile, delta[:, None], k_tile, masked=masked
            )
            return total + call.dot(ds, k_tile)

        start = jnp.zeros((tiles.block_q, padded(head_dim)), jnp.float32)
        total = call.each_tile(at, refs, add_keys, start)
        share = load(refs["share"], (left,))[:, None]
        # What does not exist may be NaN.
        dq = jnp.where(share == 0.0, 0.0, call.options.softmax_scale * share * total)
        store(outputs[0], dq, (left, head_dim))

    (dq,) = call.run(body, name="flash_attention_dq", outputs=[(q, call.queries(q))])
    return dq


def _gradient_of_keys(call: Call, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    q_len, kv_len, features = q.shape[1], k.shape[1], (k.shape[3], v.shape[3])
    tiles = call.tiles

    def body(at: Place, refs: Refs, outputs: Any) -> None:
        left = kv_len - at.j * tiles.block_k
        k_tile, v_tile = (
            load(refs[name], (left, size)) for name, size in zip("kv", features, strict=True)
        )

        def add_head(member: Index, sums: Any) -> Any:
            def add_queries(at: Place, sums: Any, *, masked: bool) -> Any:
                dk, dv = sums
                start = at.i * tiles.block_q
                part, real = pl.ds(start, tiles.block_q), q_len - start
                q_tile, dout_tile = (
                    load(refs[name].at[part, member, :], (real, size))
                    for name, size in zip(("q", "dout"), features, strict=True)
                )
                shift = load(refs["shift"].at[member, part], (real,), other=NOTHING_SEEN)
                delta = load(refs["delta"].at[member, part], (real,))
                weights = call.weights(at, refs, q_tile, k_tile, shift[None, :], masked=masked)
                dv += call.dot(weights[0].astype(dout_tile.dtype), dout_tile)
                ds, q_tile = call.d_scores(
                    weights, v_tile, dout_tile, delta[None, :], q_tile, masked=masked
                )
                return dk + call.dot(ds, q_tile), dv

            head = at._replace(head=at.kv_head * tiles.group + member)
            return call.each_tile(head, refs, add_queries, sums)

        sums = tuple(jnp.zeros((tiles.block_k, padded(size)), jnp.float32) for size in features)
        if tiles.group == 1:
            dk, dv = add_head(jnp.int32(0), sums)
        else:
            dk, dv = lax.fori_loop(0, tiles.group, add_head, sums)
        store(outputs[0], call.options.softmax_scale * dk, (left, features[0]))
        store(outputs[1], dv, (left, features[1]))

    outputs = [(x, call.keys(x)) for x in (k, v)]
    return call.run(body, name="flash_attention_dkv", outputs=outputs)
