r"""Rows whose log-sum-exp says little: their statistics are found again, from the scores.

In float32 the last digit of 10,000 stands for 0.001, and a bias of :math:`-10^9` leaves nothing of
the logarithm of a sum: no probability can be rebuilt from :math:`s_{ij} - \mathrm{lse}_i`. Nor from
the largest score of the forward pass and the sum relative to it, for the same score is rounded in
another way there: 0.06 more or less where scores are a million. So where there is such a row, a
sweep with the very products of the backward pass finds

.. math::
    m_i = \max_j s_{ij}, \quad
    l_i = \sum_j e^{s_{ij} - m_i}, \quad
    \delta_i = \sum_j z_{ij} p_{ij} \, \mathrm{do}_i \cdot v_j, \quad
    p_{ij} = e^{s_{ij} - m_i} / l_i .

A key that has all the weight then has a probability of exactly one, and a gradient of exactly zero,
however large its score is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..options import Options
from ..rows import Rows, Statistics, exact_rows, is_large
from ..scalars import Index, scalar, times
from .layout import as_row, from_row, loop, pad, product, span, to_rows
from .slices import Slice, Slices
from .sweep import weighted
from .tile import Tile, padded
from .tiling import Needed, Tiling


def exact_statistics(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    dout: jax.Array,
    dlse: jax.Array | None,
    **cut: Any,
) -> Rows:
    """The statistics of the rows, found anew if any log-sum-exp is large.

    `cut` has the options and blocks of `Sweep.of`.
    """
    large = lax.reduce_or(is_large(rows.shift), (0, 1, 2))
    found = statistics(q, k, v, rows, dout, only_if=large, **cut)
    return exact_rows(rows, found, cut["options"].sinks, dlse)


def statistics(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    dout: jax.Array,
    *,
    options: Options,
    block_q: int,
    block_k: int,
    block_heads: int | None,
    only_if: jax.Array | None = None,
) -> Statistics:
    """The statistics of the rows over these keys; as if there were none, unless `only_if`.

    A tile computes the products of the backward pass. Nothing is multiplied by its weights but
    numbers of the same row and key: so nothing has to be cleaned, as it is for that pass.
    """
    tiling = Tiling.of(q, k, block_q, block_k)
    options = padded(options, tiling)
    like = as_row(pad(rows.shift, tiling.padded_q_len, 2), tiling.group)

    def collect(part: Slice, state: Statistics) -> Statistics:
        # Were nothing to depend on the loop's counter, XLA would compute it in front of the loop,
        # and so in every call.
        arrays, _ = lax.optimization_barrier(((q, k, v, dout), part.head))
        q_part, dout_part = (pad(part.queries(arrays[n]), tiling.padded_q_len, 1) for n in (0, 3))
        k_part, v_part = (pad(part.keys(arrays[n]), tiling.padded_k_len, 1) for n in (1, 2))
        tile = Tile(tiling, part.options(options), keys_in_front=True)
        needed = Needed.of(tiling, tile.options)

        def rows_of(x: jax.Array, start: Index, size: int, group: int) -> jax.Array:
            return lax.convert_element_type(to_rows(span(x, start, size, 1), group), like.dtype)

        def add_block(i: Index, state: Statistics) -> Statistics:
            start = times(i, tiling.block_q)
            q_block, dout_block = (
                rows_of(x, start, tiling.block_q, tiling.group) for x in (q_part, dout_part)
            )
            begin, whole, end = needed.keys_seen_by(i)

            def add_tile(j: Index, met: Statistics) -> Statistics:
                k_block, v_block = (
                    rows_of(x, times(j, tiling.block_k), tiling.block_k, 1)
                    for x in (k_part, v_part)
                )
                scaled = lax.mul(k_block, scalar(options.softmax_scale, k_block))
                scores, _ = tile.apply(
                    product(scaled, q_block, 3, 3), i, j, masked=whole is not end
                )
                d_weights = tile.dropped(product(v_block, dout_block, 3, 3), i, j)
                return _with_tile(met, scores, d_weights, tile, masked=whole is not end)

            one = lax.transpose(lax.slice_in_dim(q_block, 0, 1, axis=3), (0, 1, 3, 2))
            new = loop(begin, end, add_tile, _nothing_met(one))
            first = times(start, tiling.group)
            return Statistics(
                *(part.set_rows(x, y, first) for x, y in zip(state, new, strict=True))
            )

        return loop(0, tiling.q_blocks, add_block, state)

    found = Slices.of(q, k, block_heads).each(collect, _nothing_met(like), only_if=only_if)
    return Statistics(*(from_row(x, tiling.group, tiling.q_len) for x in found))


def _with_tile(
    met: Statistics, scores: jax.Array, d_weights: jax.Array, tile: Tile, *, masked: bool
) -> Statistics:
    """The statistics of some rows with those of a tile added."""
    before, total, d_total = met
    largest = lax.max(before, _over_keys(lax.reduce_max, scores))
    shift = largest
    if tile.may_hide_all_of_a_first_tile:
        # A row that has met nothing but -inf is shifted by nothing: -inf - -inf would be NaN.
        hidden = lax.eq(largest, scalar(-jnp.inf, largest))
        shift = lax.select(hidden, lax.full_like(largest, 0), largest)
    shrink = lax.exp(lax.sub(before, shift))
    weights = lax.exp(lax.sub(scores, shift))
    more = weighted(weights, d_weights, masked=masked)
    return Statistics(
        largest,
        lax.add(lax.mul(shrink, total), _over_keys(lax.reduce_sum, weights)),
        lax.add(lax.mul(shrink, d_total), _over_keys(lax.reduce_sum, more)),
    )


def _nothing_met(like: jax.Array) -> Statistics:
    zeros = lax.full_like(like, 0)
    return Statistics(lax.full_like(like, -jnp.inf), zeros, zeros)


def _over_keys(reduce: Any, tile: jax.Array) -> jax.Array:
    return lax.expand_dims(reduce(tile, (2,)), (2,))
