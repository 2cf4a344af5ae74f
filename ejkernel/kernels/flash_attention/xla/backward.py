r"""The backward pass in plain JAX: the probabilities are computed again, tile by tile.

With :math:`s_{ij}` the scores, :math:`\delta_i = \sum_d \mathrm{do}_{id} \, o_{id} -
\mathrm{dlse}_i` and, where there is dropout, :math:`z_{ij}` zero or :math:`1 / (1 - \text{rate})`:

.. math::
    p_{ij} = e^{s_{ij} - \mathrm{lse}_i}, \quad
    \mathrm{ds}_{ij} = p_{ij} (z_{ij} \, \mathrm{do}_i \cdot v_j - \delta_i), \quad
    \mathrm{dv}_j = \sum_i z_{ij} \, p_{ij} \, \mathrm{do}_i .

:math:`\mathrm{ds}` is the gradient of the bias. Times the slope of the soft cap, it is that of the
scaled products:

.. math::
    \mathrm{dq}_i = \text{scale} \sum_j \mathrm{ds}_{ij} \, k_j, \quad
    \mathrm{dk}_j = \text{scale} \sum_i \mathrm{ds}_{ij} \, q_i .

A sink :math:`t` is one more key whose value is zero: :math:`\mathrm{dt} = - \sum_i e^{t -
\mathrm{lse}_i} \delta_i`.

The probabilities of rows with large scores are :math:`e^{s_{ij} - m_i} / l_i`: `large_scores`. The
division is left to :math:`\mathrm{do}_i` and :math:`\delta_i`, of which all that follows is a
multiple, so no tile has more to do.

Tiles are `(keys, queries)` here: XLA's CPU products take up to twice as long when their large
operand must be transposed, and of the three that read a tile only that of the gradient of the
queries would need it. So that one is computed as its own transpose, where the small operand is
transposed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from ...promotion import usual_promotion
from ..options import Options
from ..passes import Gradients, Results
from ..rows import (
    NOTHING_SEEN,
    Rows,
    apart,
    exact_rows,
    is_large,
    sinks_gradient,
    softmax_statistics,
    zero_if_not_finite,
)
from ..scalars import Index, scalar, times
from .large_scores import statistics
from .layout import as_row, filled, from_rows, loop, pad, product, set_span, span, to_rows
from .needed import Needed, tiles_of
from .scores import Scores, bias_gradient, padded, weighted, zero_bias_gradient
from .slices import Slice, Slices


@usual_promotion
def backward(
    results: Results, options: Options, *, differentiate_bias: bool = True, **blocks: Any
) -> Gradients:
    """Gradients of the inputs of `forward`, from its results and the gradients of those.

    Args:
      results: the arrays of the call, what `forward` made of them, and the gradients of that.
      options: those of the call.
      differentiate_bias: whether the gradient of the bias, if there is one, is needed.
      **blocks: as in `forward`; their sizes may differ from those used there.

    Returns:
      The gradients, each with the shape and dtype of its input; of `bias` and `sinks` in that of
      `lse`, which is that of the arithmetic.
    """
    q, k, v, out, lse, dout, dlse = results
    rows = softmax_statistics(out, lse, dout, dlse)
    large = lax.reduce_or(is_large(rows.shift), (0, 1, 2))
    found = statistics(q, k, v, rows, dout, options, only_if=large, **blocks)
    rows = exact_rows(rows, found, options.sinks, dlse)
    gradients = partial_gradients(
        q, k, v, rows, dout, options, differentiate_bias=differentiate_bias, **blocks
    )
    if options.sinks is not None:
        gradients.by_keyword["sinks"] = sinks_gradient(options.sinks, rows)
    return gradients


def partial_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    dout: jax.Array,
    options: Options,
    *,
    differentiate_bias: bool,
    dtype: Any = None,
    block_heads: int | None = None,
    **blocks: int,
) -> Gradients:
    """What these keys contribute, with the statistics of all keys: `dq`, `dk`, `dv` and `bias`.

    `dtype` is that of the gradients; None: each that of its input.
    """
    tiles = tiles_of(q, k, **blocks)
    lengths = (tiles.padded_q_len, tiles.padded_kv_len, tiles.padded_kv_len)
    in_tiles = (
        as_row(pad(x, tiles.padded_q_len, 2, appended), tiles.group)
        for x, appended in zip(rows, (NOTHING_SEEN, 1.0, 0.0), strict=True)
    )
    arrays = _Arrays(q, k, v, dout, *in_tiles)
    longer = padded(options, tiles)
    whole = [pad(x, length, 1) for x, length in zip((q, k, v), lengths, strict=True)]
    zeros = [filled(x, x.shape[-1], 0.0, dtype or x.dtype) for x in whole]
    empty = Gradients(zeros[0], zeros[1], zeros[2], {})
    if longer.bias is not None and differentiate_bias:
        table = zero_bias_gradient(longer.bias, tiles.group, rows.shift.dtype)
        empty.by_keyword["bias"] = table

    def differentiate(part: Slice, sums: Gradients) -> Gradients:
        tables = {name: part.rows(x) for name, x in sums.by_keyword.items()}
        scores = Scores(tiles, part.options(longer), keys_in_front=True)
        own = arrays.cleaned(part, scores)
        new = _differentiate(own, scores, sums._replace(by_keyword=tables), part)
        return new._replace(
            dq=part.set(sums.dq, new.dq),
            by_keyword={
                name: part.set_rows(x, new.by_keyword[name]) for name, x in sums.by_keyword.items()
            },
        )

    *sums, by_keyword = Slices.of(q, k, block_heads).each(differentiate, empty)
    if "bias" in by_keyword and options.bias is not None:
        by_keyword = {"bias": bias_gradient(by_keyword["bias"], options.bias.shape)}
    dq, dk, dv = (span(x, 0, y.shape[1], 1) for x, y in zip(sums, (q, k, v), strict=True))
    return Gradients(dq, dk, dv, dict(by_keyword))


class _Arrays(NamedTuple):
    """The arrays of a call, and the statistics of its rows; `(batch, kv_heads, 1, rows)`.

    Of one slice, `q` and `dout` are `(batch, kv_heads, rows, features)`, and `dout` and `delta`
    have been multiplied by the shares.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    shift: jax.Array
    share: jax.Array
    delta: jax.Array

    def cleaned(self, part: Slice, scores: Scores) -> _Arrays:
        """Those of one slice, with zero for what it does not see.

        That is done here and not in front of all slices: padding, cleaning and laying out is then
        one pass through memory, and no copy of whole arrays exists (cleaned as a whole, a causal
        call of 2048 positions took 1.14 of the time).
        """
        tiles = scores.tiles
        q, dout = (
            to_rows(pad(part.queries(x), tiles.padded_q_len, 1), tiles.group)
            for x in (self.q, self.dout)
        )
        k, v = (pad(part.keys(x), tiles.padded_kv_len, 1) for x in (self.k, self.v))
        shift, share, delta = (part.rows(x) for x in (self.shift, self.share, self.delta))
        dout = lax.mul(lax.convert_element_type(dout, shift.dtype), _by_row(share))
        delta = lax.mul(delta, share)
        if scores.options.may_hide:
            # A query that sees nothing may hold anything.
            seeing = _by_row(lax.ne(shift, scalar(NOTHING_SEEN, shift)))
            shift, delta = apart(shift, delta)
            q, dout = (zero_if_not_finite(x, counts=seeing) for x in (q, dout))
        return _Arrays(q, k, v, dout, shift, share, delta)


def _by_row(x: jax.Array) -> jax.Array:
    """`(batch, kv_heads, 1, rows)` as a factor of `(batch, kv_heads, rows, features)`."""
    return lax.transpose(x, (0, 1, 3, 2))


def _differentiate(arrays: _Arrays, scores: Scores, gradients: Gradients, part: Slice) -> Gradients:
    """The gradients of one slice.

    Those of keys and values are filled into `gradients.dk` and `gradients.dv`, which are of all
    slices; that of the bias is added to; `gradients.dq` is not read.
    """
    tiles, options = scores.tiles, scores.options
    needed = Needed.of(tiles, options)
    size, dtype = tiles.block_q * tiles.group, arrays.shift.dtype

    def key_block(x: jax.Array, start: Index) -> jax.Array:
        x = to_rows(span(x, start, tiles.block_k, 1), group=1)
        x = zero_if_not_finite(x) if options.may_hide else x
        return lax.convert_element_type(x, dtype)

    def differentiate_block(j: Index, gradients: Gradients) -> Gradients:
        first_key = times(j, tiles.block_k)
        k, v = key_block(arrays.k, first_key), key_block(arrays.v, first_key)
        scaled = lax.mul(k, scalar(options.softmax_scale, k))

        def add_queries(i: Index, sums: Gradients, *, masked: bool) -> Gradients:
            start = times(i, size)
            q = lax.convert_element_type(span(arrays.q, start, size, 2), dtype)
            dout = span(arrays.dout, start, size, 2)
            shift, delta = (span(x, start, size, 3) for x in (arrays.shift, arrays.delta))
            tile, slope = scores.apply(product(scaled, q, 3, 3), i, j, masked=masked, shift=shift)
            d_weights = scores.dropped(product(v, dout, 3, 3), i, j)
            p = lax.exp(tile)
            ds = weighted(p, lax.sub(d_weights, delta), masked=masked)
            by_keyword = {
                name: scores.add_to_bias_gradient(x, ds, i, j)
                for name, x in sums.by_keyword.items()
            }
            ds = ds if slope is None else lax.mul(ds, slope)
            dq_block = lax.transpose(product(scaled, ds, 2, 2), (0, 1, 3, 2))
            dq_block = lax.add(span(sums.dq, start, size, 2), dq_block)
            return Gradients(
                dq=set_span(sums.dq, start, dq_block, 2),
                dk=lax.add(sums.dk, product(ds, q, 3, 2)),
                dv=lax.add(sums.dv, product(scores.dropped(p, i, j), dout, 3, 2)),
                by_keyword=by_keyword,
            )

        sums = gradients._replace(dk=lax.full_like(k, 0), dv=lax.full_like(v, 0))
        begin, whole, end = needed.queries_seeing(j)
        sums = loop(begin, whole, partial(add_queries, masked=True), sums)
        if whole is not end:
            sums = loop(whole, end, partial(add_queries, masked=False), sums)
        dk = lax.mul(sums.dk, scalar(options.softmax_scale, sums.dk))
        return sums._replace(
            dk=part.set(gradients.dk, from_rows(dk, group=1), first_key),
            dv=part.set(gradients.dv, from_rows(sums.dv, group=1), first_key),
        )

    # Every key block adds to dq, so it stays in tile layout, and unrounded, to the end.
    start = gradients._replace(dq=lax.full_like(arrays.q, 0, dtype))
    sums = loop(0, tiles.k_blocks, differentiate_block, start)
    return sums._replace(dq=from_rows(sums.dq, tiles.group))
