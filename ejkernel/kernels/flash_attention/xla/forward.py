r"""The forward pass in plain JAX: tiles and an online softmax.

Walking over the key blocks, every query row keeps three numbers: the largest score so far
:math:`m`, the sum :math:`l = \sum_j e^{s_j - m}` and the output :math:`a = \sum_j e^{s_j - m} v_j`.
A new block with scores :math:`s'` replaces them by

.. math::
    m' = \max(m, \max_j s'_j), \quad
    l' = e^{m - m'} l + \sum_j e^{s'_j - m'}, \quad
    a' = e^{m - m'} a + \sum_j e^{s'_j - m'} v_j ,

and at the end :math:`o = a / l`, while :math:`\mathrm{lse} = m + \log l` is stored for the
backward pass. A sink joins at the end, as one more key without a value. Dropout touches :math:`a`
and not :math:`l`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops.core.invocation import StaticPart, split

from ...dtypes import accumulation_dtype
from ...promotion import usual_promotion
from ..options import Options
from ..rows import Statistics, keys_that_stay_apart
from ..scalars import Index, scalar, times
from ..tiles import Tiles
from .layout import counting, filled, from_rows, loop, pad, product, span, to_rows
from .needed import Needed, strips, tiles_of
from .scores import Scores, over_keys, padded, zero_if_lowest
from .slices import Slice, Slices


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, options: Options, **blocks: Any
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators.

    Args:
      q: queries, `(batch, q_len, q_heads, head_dim)`.
      k: keys, `(batch, k_len, kv_heads, head_dim)`; `kv_heads` divides `q_heads`.
      v: values, `(batch, k_len, kv_heads, value_dim)`.
      options: the keywords of the call.
      block_q: most queries in a tile.
      block_k: most keys in a tile.
      block_heads: most key heads in a tile, those of all examples counted; None: all.

    Returns:
      `out`, `(batch, q_len, q_heads, value_dim)`, and `lse`, `(batch, q_heads, q_len)`, in
      float32 (float64 for float64), -inf for a query that sees no key.
    """
    # Where a gradient is asked for, JAX traces first what a function computes and then what it
    # computes for the gradient. Here they are the same, so the second time costs nothing.
    arrays, fixed = split((q, k, v, options))
    out, lse = _traced_once(fixed, tuple(blocks.items()), *arrays)
    return out, lse


@partial(jax.jit, static_argnums=(0, 1), inline=True)
@usual_promotion
def _traced_once(
    fixed: StaticPart, blocks: tuple[tuple[str, Any], ...], *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    q, k, v, options = fixed.merge(arrays)
    out, (lse,) = partial_forward(q, k, v, options, apart=False, **dict(blocks))
    return out, lse


def partial_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: Options,
    *,
    apart: bool,
    block_heads: int | None = None,
    **blocks: int,
) -> tuple[jax.Array, list[jax.Array]]:
    """Attention to these keys, and its log-sum-exp; with `apart` what joins it with that to others.

    Then the output is not rounded, and instead of the log-sum-exp there are the largest score of a
    query and the sum of its weights, relative to that; -inf and one for a query that sees no key.
    """
    dtype = accumulation_dtype(q.dtype)
    tiles = tiles_of(q, k, **blocks)
    options = padded(options, tiles)
    slices = Slices.of(q, k, block_heads)
    q = pad(q, tiles.padded_q_len, 1)
    k, v = pad(k, tiles.padded_kv_len, 1), pad(v, tiles.padded_kv_len, 1)
    # The log-sum-exp travels as one more array of rows, with a single feature.
    results = (
        filled(q, v.shape[-1], 0.0, dtype if apart else q.dtype),
        *(filled(q, 1, 0.0, dtype) for _ in range(2 if apart else 1)),
    )

    def attend(part: Slice, results: _Results) -> _Results:
        return _attend(q, k, v, results, part, part.options(options), tiles)

    out, *rows = slices.each(attend, results)
    rows = [lax.transpose(lax.squeeze(x, (3,)), (0, 2, 1)) for x in rows]
    return span(out, 0, tiles.q_len, 1), [span(x, 0, tiles.q_len, 2) for x in rows]


_Results = tuple[jax.Array, ...]  # the output, and the log-sum-exp or its two parts


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    results: _Results,
    part: Slice,
    options: Options,
    tiles: Tiles,
) -> _Results:
    """Fill in the results of one slice; the options are its own."""
    scores = Scores(tiles, options, keys_in_front=False)
    needed = Needed.of(tiles, options)
    cut = strips(tiles, options)
    # Every query block reads all keys and values, so they are brought into tile layout only once.
    q, k_rows, v_rows = part.queries(q), to_rows(part.keys(k), 1), to_rows(part.keys(v), 1)
    if options.may_hide:
        k_rows, v_rows = keys_that_stay_apart(k_rows, v_rows)
    dtype = accumulation_dtype(q.dtype)

    def attend_block(i: Index, results: _Results) -> _Results:
        here = times(i, tiles.block_q)
        q_block = to_rows(span(q, here, tiles.block_q, 1), tiles.group)
        q_block = lax.convert_element_type(q_block, dtype)
        q_block = lax.mul(q_block, scalar(options.softmax_scale, q_block))

        def keys(start: Index, size: int) -> tuple[jax.Array, ...]:
            blocks = (span(x, start, size, 2) for x in (k_rows, v_rows))
            return tuple(lax.convert_element_type(x, dtype) for x in blocks)

        def add_keys(j: Index, softmax: Statistics, *, masked: bool) -> Statistics:
            k_block, v_block = keys(times(j, tiles.block_k), tiles.block_k)
            tile, _ = scores.apply(product(q_block, k_block, 3, 3), i, j, masked=masked)
            return scores.add_to_softmax(
                softmax, tile, lambda weights: product(scores.dropped(weights, i, j), v_block, 3, 2)
            )

        def meet_own_keys(strip: tuple[int, int]) -> Statistics:
            (first, end), group = strip, tiles.group
            q_strip = lax.slice_in_dim(q_block, first * group, end * group, axis=2)
            k_strip, v_strip = keys(here, end)
            return _first_met(
                scores.on_diagonal(product(q_strip, k_strip, 3, 3), end - first), v_strip
            )

        if cut is None:
            begin, whole, end = needed.keys_seen_by(i)
            one, zeros = (filled(q_block, n, 0.0, dtype) for n in (1, v_rows.shape[-1]))
            softmax = Statistics.before(one, zeros)
            if whole is not begin:
                softmax = loop(begin, whole, partial(add_keys, masked=False), softmax)
            softmax = loop(whole, end, partial(add_keys, masked=True), softmax)
        else:
            met = zip(*(meet_own_keys(strip) for strip in cut), strict=True)
            softmax = Statistics(*(lax.concatenate(x, 2) for x in met))
            earlier = times(i, tiles.block_q // tiles.block_k)
            softmax = loop(0, earlier, partial(add_keys, masked=False), softmax)
        new = _finish(softmax, tiles, options, i, apart=len(results) == 3)
        return tuple(
            part.set(x, from_rows(y, tiles.group), here) for x, y in zip(results, new, strict=True)
        )

    return loop(0, tiles.q_blocks, attend_block, results)


def _first_met(tile: jax.Array, v_block: jax.Array) -> Statistics:
    """The online softmax after the first keys, where each row sees at least one of them."""
    largest = over_keys(lax.reduce_max, tile, 3)
    weights = lax.exp(lax.sub(tile, largest))
    total = over_keys(lax.reduce_sum, weights, 3)
    return Statistics(largest, total, product(weights, v_block, 3, 2))


def _finish(
    softmax: Statistics, tiles: Tiles, options: Options, i: Index, *, apart: bool
) -> _Results:
    """The output and the log-sum-exp, or its parts; zeros and -inf where no key was met."""
    largest, total, weighted = softmax
    empty = lax.eq(total, scalar(0, total))
    if options.q_lengths is not None:
        row = counting(tiles.block_q * tiles.group).reshape(-1, 1) // np.int32(tiles.group)
        row = row + times(i, tiles.block_q) + options.first_query
        empty = empty | (row >= options.q_lengths.reshape(-1, 1, 1, 1))
        weighted = jnp.where(empty, 0.0, weighted)
        largest = jnp.where(empty, -jnp.inf, largest)
    if options.sinks is not None:
        sinks = _sink_rows(lax.convert_element_type(options.sinks, total.dtype), tiles)
        joint = jnp.maximum(zero_if_lowest(largest), sinks)
        shrink = lax.exp(lax.sub(largest, joint))
        weighted = lax.mul(weighted, shrink)
        total = lax.add(lax.mul(total, shrink), lax.exp(lax.sub(sinks, joint)))
        largest = jnp.where(empty, -jnp.inf, joint)
    total = lax.select(empty, lax.full_like(total, 1), total)
    out = lax.div(weighted, total)
    return (out, largest, total) if apart else (out, lax.add(largest, lax.log(total)))


def _sink_rows(sinks: jax.Array, tiles: Tiles) -> jax.Array:
    """`(heads,)` as `(1, kv_heads, rows, 1)`."""
    grouped = sinks.reshape(-1, 1, tiles.group)
    wide = jnp.broadcast_to(grouped, (grouped.shape[0], tiles.block_q, tiles.group))
    return wide.reshape(1, -1, tiles.block_q * tiles.group, 1)
