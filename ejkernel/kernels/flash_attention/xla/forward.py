r"""The forward pass in plain JAX: tiles and an online softmax.

Walking over the key blocks, every query row keeps three numbers: the largest score so far
:math:`m`, the sum :math:`l = \sum_j e^{s_j - m}` and the output :math:`a = \sum_j e^{s_j - m} v_j`.
A new block with scores :math:`s'` replaces them by

.. math::
    m' = \max(m, \max_j s'_j), \quad
    l' = e^{m - m'} l + \sum_j e^{s'_j - m'}, \quad
    a' = e^{m - m'} a + \sum_j e^{s'_j - m'} v_j ,

and at the end :math:`o = a / l`, while :math:`\mathrm{lse} = m + \log l` is kept for the backward.
A sink joins at the end, as one more key without a value. Dropout touches :math:`a` and not
:math:`l`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...dtypes import accumulation_dtype
from ...promotion import usual_promotion
from ..finite import keys_that_stay_apart, may_hide
from ..options import Options
from ..scalars import Index, scalar, times
from .diagonal import Strip, strips
from .layout import counting, filled, from_rows, loop, pad, product, span, to_rows
from .slices import Slice, Slices
from .tile import Tile, padded
from .tiling import Needed, Tiling


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, **keywords: Any
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators.

    Args:
      q: queries, `(batch, q_len, q_heads, head_dim)`.
      k: keys, `(batch, k_len, kv_heads, head_dim)`; `kv_heads` divides `q_heads`.
      v: values, `(batch, k_len, kv_heads, value_dim)`.
      block_q: most queries in a tile.
      block_k: most keys in a tile.
      block_heads: most key heads in a tile, those of all examples counted; None: all.
      **keywords: `causal`, `softmax_scale` and the other fields of `Options`.

    Returns:
      `out`, `(batch, q_len, q_heads, value_dim)`, and `lse`, `(batch, q_heads, q_len)`, in
      float32 (float64 for float64), -inf for a query that sees no key.
    """
    # Where a gradient is asked for, JAX traces first what a function computes and then what it
    # computes for the gradient. Here they are the same, so the second time costs nothing.
    arrays = {name: x for name, x in keywords.items() if isinstance(x, jax.Array)}
    rest = tuple((name, x) for name, x in keywords.items() if name not in arrays)
    out, lse = _traced_once(q, k, v, arrays, rest)
    return out, lse


@partial(jax.jit, static_argnums=4, inline=True)
@usual_promotion
def _traced_once(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    arrays: dict[str, Any],
    rest: tuple[tuple[str, Any], ...],
) -> tuple[jax.Array, jax.Array]:
    keywords = dict(rest)
    blocks = {name: keywords.pop(name, None) for name in ("block_q", "block_k", "block_heads")}
    options = Options(**arrays, **keywords)
    out, (lse,) = _forward(q, k, v, options, **blocks, out_dtype=q.dtype, apart=False)
    return out, lse


def partial_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, options: Options, **blocks: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention to these keys, not rounded, and what it takes to join it with that to others.

    The arguments are those of `forward`. The largest score of a query and the sum of its weights,
    relative to that, are both `(batch, q_heads, q_len)`; -inf and one for a query that sees no key.
    """
    dtype = accumulation_dtype(q.dtype)
    out, (largest, total) = _forward(q, k, v, options, **blocks, out_dtype=dtype, apart=True)
    return out, largest, total


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: Options,
    *,
    block_q: int,
    block_k: int,
    block_heads: int | None,
    out_dtype: Any,
    apart: bool,
) -> tuple[jax.Array, list[jax.Array]]:
    """The output, and the log-sum-exp, or its two parts `apart`."""
    tiling = Tiling.of(q, k, block_q, block_k)
    options = padded(options, tiling)
    slices = Slices.of(q, k, block_heads)
    q = pad(q, tiling.padded_q_len, 1)
    k, v = pad(k, tiling.padded_k_len, 1), pad(v, tiling.padded_k_len, 1)
    # The log-sum-exp travels as one more array of rows, with a single feature.
    results = (
        filled(q, v.shape[-1], 0.0, out_dtype),
        *(filled(q, 1, 0.0, accumulation_dtype(q.dtype)) for _ in range(2 if apart else 1)),
    )

    def attend(part: Slice, results: _Results) -> _Results:
        return _attend(q, k, v, results, part, part.options(options), tiling)

    out, *rows = slices.each(attend, results)
    rows = [lax.transpose(lax.squeeze(x, (3,)), (0, 2, 1)) for x in rows]
    if tiling.padded_q_len == tiling.q_len:
        return out, rows
    return (
        lax.slice_in_dim(out, 0, tiling.q_len, axis=1),
        [lax.slice_in_dim(x, 0, tiling.q_len, axis=2) for x in rows],
    )


_Results = tuple[jax.Array, ...]  # the output, and the log-sum-exp or its two parts


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    results: _Results,
    part: Slice,
    options: Options,
    tiling: Tiling,
) -> _Results:
    """Fill in the results of one slice; the options are its own."""
    tile = Tile(tiling, options, keys_in_front=False)
    needed = Needed.of(tiling, options)
    cut = strips(tiling, options)
    # Every query block reads all keys and values, so they are brought into tile layout only once.
    q, k_rows, v_rows = part.queries(q), to_rows(part.keys(k), 1), to_rows(part.keys(v), 1)
    if may_hide(options):
        k_rows, v_rows = keys_that_stay_apart(k_rows, v_rows)
    dtype = accumulation_dtype(q.dtype)

    def attend_block(i: Index, results: _Results) -> _Results:
        here = times(i, tiling.block_q)
        q_block = to_rows(span(q, here, tiling.block_q, 1), tiling.group)
        q_block = lax.convert_element_type(q_block, dtype)
        q_block = lax.mul(q_block, scalar(options.softmax_scale, q_block))

        def keys(start: Index, size: int) -> tuple[jax.Array, ...]:
            blocks = (span(x, start, size, 2) for x in (k_rows, v_rows))
            return tuple(lax.convert_element_type(x, dtype) for x in blocks)

        def add_keys(j: Index, softmax: _Softmax, *, masked: bool) -> _Softmax:
            k_block, v_block = keys(times(j, tiling.block_k), tiling.block_k)
            scores, _ = tile.apply(product(q_block, k_block, 3, 3), i, j, masked=masked)
            return softmax.add(scores, v_block, tile, i, j)

        def meet_own_keys(strip: Strip) -> _Softmax:
            (first, end), group = strip, tiling.group
            q_strip = lax.slice_in_dim(q_block, first * group, end * group, axis=2)
            k_strip, v_strip = keys(here, end)
            scores = tile.on_diagonal(product(q_strip, k_strip, 3, 3), end - first)
            return _Softmax.of(scores, v_strip)

        if cut is None:
            begin, whole, end = needed.keys_seen_by(i)
            softmax = _Softmax.start(q_block, v_rows.shape[-1])
            if whole is not begin:
                softmax = loop(begin, whole, partial(add_keys, masked=False), softmax)
            softmax = loop(whole, end, partial(add_keys, masked=True), softmax)
        else:
            softmax = _Softmax.joined([meet_own_keys(strip) for strip in cut])
            earlier = times(i, tiling.block_q // tiling.block_k)
            softmax = loop(0, earlier, partial(add_keys, masked=False), softmax)
        new = softmax.finish(tiling, options, i, apart=len(results) == 3)
        return tuple(
            part.set(x, from_rows(y, tiling.group), here) for x, y in zip(results, new, strict=True)
        )

    return loop(0, tiling.q_blocks, attend_block, results)


class _Softmax(NamedTuple):
    """The online softmax: what query rows remember of the keys they have met so far."""

    largest: jax.Array  # (batch, kv_heads, rows, 1)
    total: jax.Array  # (batch, kv_heads, rows, 1)
    weighted: jax.Array  # (batch, kv_heads, rows, value_dim)

    @staticmethod
    def start(q_block: jax.Array, value_dim: int) -> _Softmax:
        return _Softmax(
            filled(q_block, 1, -jnp.inf, q_block.dtype),
            filled(q_block, 1, 0.0, q_block.dtype),
            filled(q_block, value_dim, 0.0, q_block.dtype),
        )

    @staticmethod
    def of(scores: jax.Array, v_block: jax.Array) -> _Softmax:
        """After the first keys, where each row sees at least one of them."""
        largest = _over_keys(lax.reduce_max, scores)
        weights = lax.exp(lax.sub(scores, largest))
        total = _over_keys(lax.reduce_sum, weights)
        return _Softmax(largest, total, product(weights, v_block, 3, 2))

    @staticmethod
    def joined(parts: Sequence[_Softmax]) -> _Softmax:
        """That of rows which follow each other."""
        return _Softmax(*(lax.concatenate(x, 2) for x in zip(*parts, strict=True)))

    def add(
        self, scores: jax.Array, v_block: jax.Array, tile: Tile, i: Index, j: Index
    ) -> _Softmax:
        largest = lax.max(self.largest, _over_keys(lax.reduce_max, scores))
        # A row that has met nothing but -inf is shifted by nothing: -inf - -inf would be NaN.
        shift = _finite(largest) if tile.may_hide_all_of_a_first_tile else largest
        shrink = lax.exp(lax.sub(self.largest, shift))
        weights = lax.exp(lax.sub(scores, shift))
        total = lax.add(lax.mul(shrink, self.total), _over_keys(lax.reduce_sum, weights))
        values = product(tile.dropped(weights, i, j), v_block, 3, 2)
        return _Softmax(largest, total, lax.add(lax.mul(shrink, self.weighted), values))

    def finish(self, tiling: Tiling, options: Options, i: Index, *, apart: bool) -> _Results:
        """The output and the log-sum-exp, or its parts; zeros and -inf where no key was met."""
        largest, total, weighted = self
        empty = lax.eq(total, scalar(0, total))
        if options.q_lengths is not None:
            row = counting(tiling.block_q * tiling.group).reshape(-1, 1) // np.int32(tiling.group)
            row = row + times(i, tiling.block_q) + options.first_query
            empty = empty | (row >= options.q_lengths.reshape(-1, 1, 1, 1))
            weighted = jnp.where(empty, 0.0, weighted)
            largest = jnp.where(empty, -jnp.inf, largest)
        if options.sinks is not None:
            sinks = _sink_rows(lax.convert_element_type(options.sinks, total.dtype), tiling)
            joint = jnp.maximum(_finite(largest), sinks)
            shrink = lax.exp(lax.sub(largest, joint))
            weighted = lax.mul(weighted, shrink)
            total = lax.add(lax.mul(total, shrink), lax.exp(lax.sub(sinks, joint)))
            largest = jnp.where(empty, -jnp.inf, joint)
        total = lax.select(empty, lax.full_like(total, 1), total)
        out = lax.div(weighted, total)
        return (out, largest, total) if apart else (out, lax.add(largest, lax.log(total)))


def _over_keys(reduce: Any, scores: jax.Array) -> jax.Array:
    return lax.expand_dims(reduce(scores, (3,)), (3,))


def _finite(x: jax.Array) -> jax.Array:
    zeros = lax.full_like(x, 0)
    return lax.select(lax.eq(x, scalar(-jnp.inf, x)), zeros, x)


def _sink_rows(sinks: jax.Array, tiling: Tiling) -> jax.Array:
    """`(heads,)` as `(1, kv_heads, rows, 1)`."""
    grouped = sinks.reshape(-1, 1, tiling.group)
    wide = jnp.broadcast_to(grouped, (grouped.shape[0], tiling.block_q, tiling.group))
    return wide.reshape(1, -1, tiling.block_q * tiling.group, 1)
