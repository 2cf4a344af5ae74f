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

In float32 a large :math:`\mathrm{lse}` says little about a probability: of 10,000 the last digit
stands for 0.001, and a bias of :math:`-10^9` leaves nothing of the logarithm of a sum. Where there
are such rows, :math:`m_i = \max_j s_{ij}`, :math:`l_i = \sum_j e^{s_{ij} - m_i}` and
:math:`\delta_i = \sum_j z_{ij} p_{ij} \, \mathrm{do}_i \cdot v_j` are found again first, from
scores that are rounded as they are here (`statistics`); then :math:`p_{ij} =
e^{s_{ij} - m_i} / l_i`. The division is left to :math:`\mathrm{do}_i` and :math:`\delta_i`, of
which all that follows is a multiple, so no tile has more to do.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..promotion import usual_promotion
from .finite import may_hide, zero_if_not_finite
from .layout import (
    Index,
    as_row,
    filled,
    float32,
    from_rows,
    loop,
    pad,
    product,
    set_span,
    span,
    times,
    to_rows,
)
from .options import Options
from .rows import (
    NOTHING_SEEN,
    Rows,
    Statistics,
    exact_rows,
    is_large,
    sinks_gradient,
    softmax_statistics,
    with_shares,
)
from .slices import Slice, Slices
from .tile import Tile, bias_gradient, padded, zero_bias_gradient
from .tiling import Needed, Tiling


class Gradients(NamedTuple):
    """Gradients of the arrays of a call; those of keywords by name."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    by_keyword: dict[str, jax.Array]


@usual_promotion
def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    *,
    block_q: int,
    block_k: int,
    block_heads: int | None = None,
    dlse: jax.Array | None = None,
    differentiate_bias: bool = True,
    **keywords: Any,
) -> Gradients:
    """Gradients of the inputs of `forward`, from its results and the gradients of those.

    The other arguments are as in `forward`; only the blocks may differ from those used there.

    Args:
      out: first result of `forward`.
      lse: second result of `forward`.
      dout: gradient of the loss with respect to `out`.
      dlse: gradient of the loss with respect to `lse`; None: zero.
      differentiate_bias: whether the gradient of the bias, if there is one, is needed.

    Returns:
      The gradients, each with the shape and dtype of its input; of `bias` and `sinks` in float32.
    """
    options = Options(**keywords)
    rows = softmax_statistics(out, lse, dout, dlse)
    blocks: dict[str, Any] = {"block_q": block_q, "block_k": block_k, "block_heads": block_heads}
    large = lax.reduce_or(is_large(rows.shift), (0, 1, 2))
    found = statistics(q, k, v, rows, dout, options=options, **blocks, only_if=large)
    rows = exact_rows(rows, found, options.sinks, dlse)
    gradients = partial_gradients(
        q,
        k,
        v,
        rows,
        dout,
        options=options,
        **blocks,
        differentiate_bias=differentiate_bias,
    )
    if options.sinks is not None:
        gradients.by_keyword["sinks"] = sinks_gradient(options.sinks, rows)
    return gradients


class _Clean(NamedTuple):
    """The arrays of a call, padded, in which what does not count is zero, and its rows.

    The last three are those of `with_shares`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    shift: jax.Array  # (batch, kv_heads, 1, rows of a tile)
    delta: jax.Array  # (batch, kv_heads, 1, rows of a tile)

    @staticmethod
    def of(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        dout: jax.Array,
        rows: Rows,
        options: Options,
        tiling: Tiling,
    ) -> _Clean:
        shift, delta, dout = with_shares(rows, dout, options)
        if may_hide(options):
            k, v, q = (zero_if_not_finite(x) for x in (k, v, q))
            # A query that sees nothing may hold anything.
            shares = lax.broadcast_in_dim(rows.share, q.shape, (0, 2, 1))
            q = lax.select(lax.eq(shares, np.float32(0)), lax.full_like(q, 0), q)
        q_len, k_len = tiling.padded_q_len, tiling.padded_k_len
        return _Clean(
            pad(q, q_len, 1),
            pad(k, k_len, 1),
            pad(v, k_len, 1),
            pad(dout, q_len, 1),
            as_row(pad(shift, q_len, 2, NOTHING_SEEN), tiling.group),
            as_row(pad(delta, q_len, 2), tiling.group),
        )


def _weights(scores: jax.Array, shift: jax.Array, *, masked: bool) -> jax.Array:
    """`exp(scores - shift)`, zero where a score is hidden, whatever the row's shift is."""
    weights = lax.exp(lax.sub(scores, shift))
    return _zero_where_hidden(weights, scores) if masked else weights


def _zero_where_hidden(x: jax.Array, scores: jax.Array) -> jax.Array:
    return lax.select(lax.eq(scores, np.float32(-np.inf)), lax.full_like(x, 0), x)


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

    They are in the same blocks and by the same products as in the backward pass, so that the two
    round alike: a key that has all the weight then has a probability of exactly one, and a gradient
    of exactly zero, however large its score is.
    """
    tiling = Tiling.of(q, k, block_q, block_k)
    clean = _Clean.of(q, k, v, dout, rows, options, tiling)
    padded_options = padded(options, tiling)
    slices = Slices.of(q, k, block_heads)
    start = Statistics(*(lax.full_like(clean.shift, x) for x in (-jnp.inf, 0.0, 0.0)))

    def collect(part: Slice, state: Statistics) -> Statistics:
        own = part.options(padded_options)
        new = _statistics(clean, part, own, tiling)
        return Statistics(*(part.set_rows(x, y) for x, y in zip(state, new, strict=True)))

    found = slices.each(collect, start, only_if=only_if)
    return Statistics(*(_by_query(x, tiling) for x in found))


def _statistics(clean: _Clean, part: Slice, options: Options, tiling: Tiling) -> Statistics:
    """Those of one slice."""
    # Were nothing to depend on the loop's counter, XLA would compute it in front of the loop, and
    # so in every call.
    clean, _ = lax.optimization_barrier((clean, part.head))
    tile = Tile(tiling, options, keys_in_front=True)
    needed = Needed.of(tiling, options)
    scale = np.float32(options.softmax_scale)
    group, rows = tiling.group, tiling.block_q * tiling.group
    q_rows = to_rows(part.queries(clean.q), group)
    dout_rows = to_rows(part.queries(clean.dout), group)
    k, v = part.keys(clean.k), part.keys(clean.v)
    like = part.rows(clean.shift)
    start = Statistics(*(lax.full_like(like, x) for x in (-jnp.inf, 0.0, 0.0)))

    def of_block(j: Index, state: Statistics) -> Statistics:
        here = times(j, tiling.block_k)
        k_block = lax.mul(float32(to_rows(span(k, here, tiling.block_k, 1), group=1)), scale)
        v_block = float32(to_rows(span(v, here, tiling.block_k, 1), group=1))

        def add(i: Index, state: Statistics, *, masked: bool) -> Statistics:
            there = times(i, rows)
            q_block = float32(span(q_rows, there, rows, 2))
            dout_block = span(dout_rows, there, rows, 2)
            scores, _ = tile.apply(product(k_block, q_block, 3, 3), i, j, masked=masked)
            dp = tile.dropped(product(v_block, dout_block, 3, 3), i, j)
            before, total, weighted = (span(x, there, rows, 3) for x in state)
            largest = lax.max(before, lax.expand_dims(lax.reduce_max(scores, (2,)), (2,)))
            shift = lax.select(
                lax.eq(largest, np.float32(-np.inf)), lax.full_like(largest, 0), largest
            )
            shrink = lax.exp(lax.sub(before, shift))
            weights = _weights(scores, shift, masked=masked)
            more = lax.mul(weights, dp)
            more = _zero_where_hidden(more, scores) if masked else more
            sums = [lax.expand_dims(lax.reduce_sum(x, (2,)), (2,)) for x in (weights, more)]
            new = (
                largest,
                lax.add(lax.mul(shrink, total), sums[0]),
                lax.add(lax.mul(shrink, weighted), sums[1]),
            )
            return Statistics(*(set_span(x, there, y, 3) for x, y in zip(state, new, strict=True)))

        begin, whole, end = needed.queries_seeing(j)
        state = loop(begin, whole, partial(add, masked=True), state)
        if whole is not end:
            state = loop(whole, end, partial(add, masked=False), state)
        return state

    return loop(0, tiling.k_blocks, of_block, start)


def _by_query(x: jax.Array, tiling: Tiling) -> jax.Array:
    """The inverse of `as_row`, without the rows that were appended."""
    batch, kv_heads, _, length = x.shape
    x = lax.reshape(x, (batch, kv_heads, length // tiling.group, tiling.group))
    x = lax.transpose(x, (0, 1, 3, 2))
    x = lax.reshape(x, (batch, kv_heads * tiling.group, length // tiling.group))
    return lax.slice_in_dim(x, 0, tiling.q_len, axis=2)


def partial_gradients(
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
    differentiate_bias: bool,
    dtype: Any = None,
) -> Gradients:
    """What these keys contribute, with the statistics of all keys: `dq`, `dk`, `dv` and `bias`.

    `dtype` is that of the gradients; None: each that of its input.
    """
    tiling = Tiling.of(q, k, block_q, block_k)
    bias_shape = None if options.bias is None else options.bias.shape
    options = padded(options, tiling)
    slices = Slices.of(q, k, block_heads)
    clean = _Clean.of(q, k, v, dout, rows, options, tiling)
    q, k, v, dout = clean.q, clean.k, clean.v, clean.dout

    zeros = [filled(x, x.shape[-1], 0.0, dtype or x.dtype) for x in (q, k, v)]
    empty = Gradients(zeros[0], zeros[1], zeros[2], {})
    if options.bias is not None and differentiate_bias:
        empty.by_keyword["bias"] = zero_bias_gradient(options.bias, tiling.group)

    def differentiate(part: Slice, sums: Gradients) -> Gradients:
        tables = {name: part.rows(x) for name, x in sums.by_keyword.items()}
        new = _differentiate(
            part.queries(q),
            part.queries(dout),
            part.rows(clean.shift),
            part.rows(clean.delta),
            part.keys(k),
            part.keys(v),
            sums._replace(by_keyword=tables),
            part,
            part.options(options),
            tiling,
        )
        return new._replace(
            dq=part.set(sums.dq, new.dq),
            by_keyword={
                name: part.set_rows(x, new.by_keyword[name]) for name, x in sums.by_keyword.items()
            },
        )

    sums = slices.each(differentiate, empty)
    by_keyword = dict(sums.by_keyword)
    if bias_shape is not None and differentiate_bias:
        by_keyword["bias"] = bias_gradient(by_keyword["bias"], bias_shape)
    return Gradients(
        _shortened(sums.dq, tiling.q_len),
        _shortened(sums.dk, tiling.k_len),
        _shortened(sums.dv, tiling.k_len),
        by_keyword,
    )


def _differentiate(
    q: jax.Array,
    dout: jax.Array,
    shift: jax.Array,
    delta: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gradients: Gradients,
    part: Slice,
    options: Options,
    tiling: Tiling,
) -> Gradients:
    """The gradients of one slice, and everything but those of keys and values is its own.

    They are filled into `gradients.dk` and `gradients.dv`, which are of all slices, and added to
    those of the bias; `gradients.dq` is not read.
    """
    tile = Tile(tiling, options, keys_in_front=True)
    needed = Needed.of(tiling, options)
    scale = np.float32(options.softmax_scale)
    # Here every key block reads all queries, so it is they that are laid out once.
    q_rows, dout_rows = to_rows(q, tiling.group), to_rows(dout, tiling.group)
    rows = tiling.block_q * tiling.group

    def differentiate_block(j: Index, gradients: Gradients) -> Gradients:
        here = times(j, tiling.block_k)
        k_block = lax.mul(float32(to_rows(span(k, here, tiling.block_k, 1), group=1)), scale)
        v_block = float32(to_rows(span(v, here, tiling.block_k, 1), group=1))

        def add_queries(i: Index, sums: Gradients, *, masked: bool) -> Gradients:
            there = times(i, rows)
            q_block = float32(span(q_rows, there, rows, 2))
            dout_block = span(dout_rows, there, rows, 2)
            # Tiles are (keys, queries) here: XLA's CPU products take up to twice as long when their
            # large operand must be transposed, and of the three that read a tile only dq would need
            # that. So dq is computed as its own transpose, where the small operand is transposed.
            scores, slope = tile.apply(product(k_block, q_block, 3, 3), i, j, masked=masked)
            p = _weights(scores, span(shift, there, rows, 3), masked=masked)
            dp = tile.dropped(product(v_block, dout_block, 3, 3), i, j)
            ds = lax.mul(p, lax.sub(dp, span(delta, there, rows, 3)))
            # Zero times what is too large for a number would be NaN.
            ds = _zero_where_hidden(ds, scores) if masked else ds
            by_keyword = {
                name: tile.add_to_bias_gradient(x, ds, i, j) for name, x in sums.by_keyword.items()
            }
            ds = ds if slope is None else lax.mul(ds, slope)
            dq_block = lax.transpose(product(k_block, ds, 2, 2), (0, 1, 3, 2))
            dv_block = product(tile.dropped(p, i, j), dout_block, 3, 2)
            return Gradients(
                dq=set_span(sums.dq, there, lax.add(span(sums.dq, there, rows, 2), dq_block), 2),
                dk=lax.add(sums.dk, product(ds, q_block, 3, 2)),
                dv=lax.add(sums.dv, dv_block),
                by_keyword=by_keyword,
            )

        begin, whole, end = needed.queries_seeing(j)
        sums = gradients._replace(dk=lax.full_like(k_block, 0), dv=lax.full_like(v_block, 0))
        sums = loop(begin, whole, partial(add_queries, masked=True), sums)
        if whole is not end:
            sums = loop(whole, end, partial(add_queries, masked=False), sums)
        return Gradients(
            dq=sums.dq,
            dk=part.set(gradients.dk, from_rows(lax.mul(sums.dk, scale), group=1), here),
            dv=part.set(gradients.dv, from_rows(sums.dv, group=1), here),
            by_keyword=sums.by_keyword,
        )

    # Every key block adds to dq, so it stays in float32 and in tile layout to the end.
    start = gradients._replace(dq=lax.full_like(q_rows, 0, jnp.float32))
    sums = loop(0, tiling.k_blocks, differentiate_block, start)
    return sums._replace(dq=from_rows(sums.dq, tiling.group))


def _shortened(x: jax.Array, length: int) -> jax.Array:
    return x if x.shape[1] == length else lax.slice_in_dim(x, 0, length, axis=1)
