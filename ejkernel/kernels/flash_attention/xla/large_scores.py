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

import jax
from jax import lax

from ..options import Options
from ..rows import Rows, Statistics
from ..scalars import Index, scalar, times
from .layout import as_row, from_row, loop, pad, product, span, to_rows
from .needed import Needed, tiles_of
from .scores import Scores, over_keys, padded, weighted
from .slices import Slice, Slices


def statistics(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    dout: jax.Array,
    options: Options,
    *,
    only_if: jax.Array | None = None,
    block_heads: int | None = None,
    **blocks: int,
) -> Statistics:
    """The statistics of the rows over these keys; as if there were none, unless `only_if`.

    A tile computes the products of the backward pass. Nothing is multiplied by its weights but
    numbers of the same row and key: so nothing has to be cleaned, as it is for that pass.
    """
    tiles = tiles_of(q, k, **blocks)
    options = padded(options, tiles)
    like = as_row(pad(rows.shift, tiles.padded_q_len, 2), tiles.group)

    def collect(part: Slice, state: Statistics) -> Statistics:
        # Were nothing to depend on the loop's counter, XLA would compute it in front of the loop,
        # and so in every call.
        arrays, _ = lax.optimization_barrier(((q, k, v, dout), part.head))
        q_part, dout_part = (pad(part.queries(arrays[n]), tiles.padded_q_len, 1) for n in (0, 3))
        k_part, v_part = (pad(part.keys(arrays[n]), tiles.padded_kv_len, 1) for n in (1, 2))
        scores = Scores(tiles, part.options(options), keys_in_front=True)
        needed = Needed.of(tiles, scores.options)

        def rows_of(x: jax.Array, start: Index, size: int, group: int) -> jax.Array:
            return lax.convert_element_type(to_rows(span(x, start, size, 1), group), like.dtype)

        def add_block(i: Index, state: Statistics) -> Statistics:
            start = times(i, tiles.block_q)
            q_block, dout_block = (
                rows_of(x, start, tiles.block_q, tiles.group) for x in (q_part, dout_part)
            )
            begin, whole, end = needed.keys_seen_by(i)
            masked = whole is not end

            def add_tile(j: Index, met: Statistics) -> Statistics:
                k_block, v_block = (
                    rows_of(x, times(j, tiles.block_k), tiles.block_k, 1) for x in (k_part, v_part)
                )
                scaled = lax.mul(k_block, scalar(options.softmax_scale, k_block))
                tile, _ = scores.apply(product(scaled, q_block, 3, 3), i, j, masked=masked)
                d_weights = scores.dropped(product(v_block, dout_block, 3, 3), i, j)

                def weigh(weights: jax.Array) -> jax.Array:
                    more = weighted(weights, d_weights, masked=masked)
                    return over_keys(lax.reduce_sum, more, 2)

                return scores.add_to_softmax(met, tile, weigh)

            one = lax.transpose(lax.slice_in_dim(q_block, 0, 1, axis=3), (0, 1, 3, 2))
            new = loop(begin, end, add_tile, Statistics.before(lax.full_like(one, 0)))
            first = times(start, tiles.group)
            return Statistics(
                *(part.set_rows(x, y, first) for x, y in zip(state, new, strict=True))
            )

        return loop(0, tiles.q_blocks, add_block, state)

    start = Statistics.before(lax.full_like(like, 0))
    found = Slices.of(q, k, block_heads).each(collect, start, only_if=only_if)
    return Statistics(*(from_row(x, tiles.group, tiles.q_len) for x in found))
