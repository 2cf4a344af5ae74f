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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...promotion import usual_promotion
from ..options import Options
from ..pallas import LOWEST_MAXIMUM, Place, Refs, gradients
from ..passes import Gradients, Results
from ..rows import Rows, Statistics, is_large
from .call import LANES, Call


@usual_promotion
def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, options: Options, **sizes: Any
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators: arrays as in `xla.forward`.

    Args:
      q, k, v: the arrays of the call.
      options: its keywords.
      block_q: most queries in a tile; rounded up to a multiple of 128.
      block_k: most keys in a tile; rounded up to a multiple of 128.
      interpret: run on any device, slowly.
    """
    call = Call.of(q, k, v, options, **sizes)
    rows, features = call.tiles.block_q, v.shape[3]
    out, lse = call.run(
        _forward_body,
        name="flash_attention_forward",
        outputs=[(q.dtype, call.queries(features)), (jnp.float32, call.rows)],
        scratch=[(rows, LANES), (rows, LANES), (rows, features)],
    )
    return _sequence_first(out, q), lse[:, :, 0, : q.shape[1]]


@usual_promotion
def backward(results: Results, options: Options, **sizes: Any) -> Gradients:
    """Gradients of `q`, `k`, `v`, and of `sinks` by name if there are any; none of a bias.

    The other arguments are as in `forward`; the blocks may differ from those used there.
    """
    q, k, v, _, _, dout, _ = results

    def statistics(*, turned: bool) -> Statistics:
        call = Call.of(q, k, v, options, dout=dout, turned=turned, **sizes)
        rows = call.tiles.block_q
        found = call.run(
            _statistics_body,
            name="flash_attention_statistics",
            outputs=[(jnp.float32, call.rows)] * 3,
            scratch=[(1, rows) if turned else (rows, LANES)] * 3,
        )
        return Statistics(*(x[:, :, 0, : q.shape[1]] for x in found))

    def any_statistics(rows: Rows) -> list[Statistics]:
        found: list[Statistics] = lax.cond(
            jnp.any(is_large(rows.shift)),
            lambda: [statistics(turned=turned) for turned in (False, True)],
            lambda: [Statistics(*[jnp.zeros_like(rows.shift)] * 3)] * 2,
        )
        return found

    def of_queries(rows: Rows) -> jax.Array:
        call = Call.of(q, k, v, options, dout=dout, rows=rows._asdict(), **sizes)
        size, features = call.tiles.block_q, q.shape[3]
        (dq,) = call.run(
            _query_gradient_body,
            name="flash_attention_dq",
            outputs=[(q.dtype, call.queries(features))],
            scratch=[(size, LANES), (size, LANES), (size, features)],
        )
        return _sequence_first(dq, q)

    def of_keys(dout: jax.Array, rows: dict[str, jax.Array]) -> list[jax.Array]:
        turned: Any = {"keys_first": True, "turned": True}
        call = Call.of(q, k, v, options, dout=dout, rows=rows, **turned, **sizes)
        found = call.run(
            _key_gradient_body,
            name="flash_attention_dkv",
            outputs=[(x.dtype, call.keys(x.shape[3])) for x in (k, v)],
            scratch=[(call.tiles.block_k, x.shape[3]) for x in (k, v)],
        )
        return [_sequence_first(x, k) for x in found]

    return gradients(results, options, any_statistics, of_queries, of_keys)


def _sequence_first(x: jax.Array, like: jax.Array) -> jax.Array:
    """`(batch, heads, padded length, features)` as arrays of the call are, and as long."""
    return x[:, :, : like.shape[1]].swapaxes(1, 2)


# --- bodies --------------------------------------------------------------------------------------


def _forward_body(call: Call, at: Place, refs: Refs, outputs: Any, scratch: Any) -> None:
    out_ref, lse_ref = outputs
    weighted_ref = scratch[2]
    _start_softmax(at, *scratch)

    def add_keys(*, masked: bool) -> None:
        arrays = [refs[name][0, 0] for name in ("q", "k", "v")]
        met: Any = _met(call, scratch)
        *met, shrink, added = call.attend(at, refs, arrays, met, masked=masked)
        _set_all(scratch, met)
        weighted_ref[...] = shrink * weighted_ref[...] + added

    call.visit(at, refs, add_keys)

    @pl.when(at.is_last)
    def finish() -> None:
        lse, weighted, share = call.finish(at, refs, *(ref[...] for ref in scratch))
        share = jnp.broadcast_to(share[:, :1], weighted.shape)
        out = jnp.where(share == 0.0, 0.0, weighted * share)
        out_ref[0, 0] = out.astype(out_ref.dtype)
        lse_ref[0, 0] = lse.T[:1]


def _start_softmax(at: Place, largest_ref: Any, *sum_refs: Any) -> None:
    @pl.when(at.is_first)
    def start() -> None:
        largest_ref[...] = jnp.full_like(largest_ref, LOWEST_MAXIMUM)
        for ref in sum_refs:
            ref[...] = jnp.zeros_like(ref)


def _met(call: Call, scratch: Any) -> tuple[Any, ...]:
    """The sums of queries: rows, or one of the equal columns each."""
    return tuple(ref[...] if call.turned else ref[:, :1] for ref in scratch[:2])


def _set_all(refs: Any, values: Any) -> None:
    for ref, value in zip(refs, values, strict=False):
        ref[...] = jnp.broadcast_to(value, ref.shape)


def _statistics_body(call: Call, at: Place, refs: Refs, outputs: Any, scratch: Any) -> None:
    weighted_ref = scratch[2]
    _start_softmax(at, *scratch)

    def add_keys(*, masked: bool) -> None:
        arrays = [refs[name][0, 0] for name in ("q", "k", "v", "dout")]
        met: Any = _met(call, scratch)
        *met, shrink, added = call.collect(at, refs, arrays, met, masked=masked)
        weighted = weighted_ref[...] if call.turned else weighted_ref[:, :1]
        _set_all(scratch, (*met, shrink * weighted + added))

    call.visit(at, refs, add_keys)

    @pl.when(at.is_last)
    def finish() -> None:
        for row_ref, sum_ref in zip(outputs, scratch, strict=True):
            row_ref[0, 0] = sum_ref[...] if call.turned else sum_ref[...].T[:1]


def _query_gradient_body(call: Call, at: Place, refs: Refs, outputs: Any, scratch: Any) -> None:
    (dq_ref,) = outputs
    shift_ref, delta_ref, sum_ref = scratch

    @pl.when(at.is_first)
    def start() -> None:
        for column_ref, name in ((shift_ref, "shift"), (delta_ref, "delta")):
            column_ref[...] = jnp.broadcast_to(refs[name][0, 0], column_ref.shape[::-1]).T
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add_keys(*, masked: bool) -> None:
        q, k, v, dout = (refs[name][0, 0] for name in ("q", "k", "v", "dout"))
        weights = call.weights(at, refs, q, k, shift_ref[:, :1], masked=masked)
        ds, k = call.d_scores(weights, v, dout, delta_ref[:, :1], k, masked=masked)
        sum_ref[...] += call.dot(ds, k)

    call.visit(at, refs, add_keys)

    @pl.when(at.is_last)
    def finish() -> None:
        share = jnp.broadcast_to(refs["share"][0, 0], shift_ref.shape[::-1]).T[:, :1]
        share = jnp.broadcast_to(share, sum_ref.shape)
        dq = call.options.softmax_scale * share * sum_ref[...]
        # What does not exist may be NaN.
        dq_ref[0, 0] = jnp.where(share == 0.0, 0.0, dq).astype(dq_ref.dtype)


def _key_gradient_body(call: Call, at: Place, refs: Refs, outputs: Any, scratch: Any) -> None:
    dk_ref, dv_ref = outputs
    k_sum_ref, v_sum_ref = scratch

    @pl.when(at.is_first)
    def start() -> None:
        for ref in scratch:
            ref[...] = jnp.zeros_like(ref)

    def add_queries(*, masked: bool) -> None:
        q, k, v, dout = (refs[name][0, 0] for name in ("q", "k", "v", "dout"))
        weights = call.weights(at, refs, q, k, refs["shift"][0, 0], masked=masked)
        v_sum_ref[...] += call.dot(weights[0].astype(dout.dtype), dout)
        ds, q = call.d_scores(weights, v, dout, refs["delta"][0, 0], q, masked=masked)
        k_sum_ref[...] += call.dot(ds, q)

    call.visit(at, refs, add_queries)

    @pl.when(at.is_last)
    def finish() -> None:
        dk_ref[0, 0] = (call.options.softmax_scale * k_sum_ref[...]).astype(dk_ref.dtype)
        dv_ref[0, 0] = v_sum_ref[...].astype(dv_ref.dtype)
