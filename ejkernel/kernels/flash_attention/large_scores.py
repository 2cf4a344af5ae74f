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

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layout import Index, from_row, loop, scalar, set_span, span
from .rows import Rows, Statistics, exact_rows, is_large
from .slices import Slice
from .sweep import SliceSweep, Sweep, Tiled, weighted


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
    only_if: jax.Array | None = None,
    **cut: Any,
) -> Statistics:
    """The statistics of the rows over these keys; as if there were none, unless `only_if`."""
    sweep = Sweep.of(q, k, v, dout, rows, **cut)

    def collect(part: Slice, state: Statistics) -> Statistics:
        # Were nothing to depend on the loop's counter, XLA would compute it in front of the loop,
        # and so in every call.
        arrays, _ = lax.optimization_barrier((sweep.arrays, part.head))
        new = _statistics(dataclasses.replace(sweep, arrays=arrays).over(part))
        return Statistics(*(part.set_rows(x, y) for x, y in zip(state, new, strict=True)))

    found = sweep.slices.each(collect, _nothing_met(sweep.arrays.rows.shift), only_if=only_if)
    tiling = sweep.tiling
    return Statistics(*(from_row(x, tiling.group, tiling.q_len) for x in found))


def _statistics(sweep: SliceSweep) -> Statistics:
    """Of one slice: the largest score of each row, and relative to it the sum of the weights and
    the sum of what each weight adds to the loss."""

    def add_tile(tiled: Tiled, state: Statistics) -> Statistics:
        before, total, d_total = (span(x, tiled.start, sweep.rows, 3) for x in state)
        largest = lax.max(before, _over_keys(lax.reduce_max, tiled.scores))
        # A row that has met nothing but -inf is shifted by nothing: -inf - -inf would be NaN.
        hidden = lax.eq(largest, scalar(-jnp.inf, largest))
        shift = lax.select(hidden, lax.full_like(largest, 0), largest)
        shrink = lax.exp(lax.sub(before, shift))
        weights = lax.exp(lax.sub(tiled.scores, shift))
        more = weighted(weights, tiled.d_weights, masked=tiled.masked)
        new = Statistics(
            largest,
            lax.add(lax.mul(shrink, total), _over_keys(lax.reduce_sum, weights)),
            lax.add(lax.mul(shrink, d_total), _over_keys(lax.reduce_sum, more)),
        )
        return Statistics(
            *(set_span(x, tiled.start, y, 3) for x, y in zip(state, new, strict=True))
        )

    def add_block(j: Index, state: Statistics) -> Statistics:
        return sweep.each_tile(sweep.keys(j), add_tile, state)

    return loop(0, sweep.tile.tiling.k_blocks, add_block, _nothing_met(sweep.shift))


def _nothing_met(like: jax.Array) -> Statistics:
    return Statistics(*(lax.full_like(like, x) for x in (-jnp.inf, 0.0, 0.0)))


def _over_keys(reduce: Any, tile: jax.Array) -> jax.Array:
    return lax.expand_dims(reduce(tile, (2,)), (2,))
