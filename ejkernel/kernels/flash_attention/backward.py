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
scores that are rounded as they are here (`_statistics_of_large_scores`); then :math:`p_{ij} =
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
from .slices import Slice, Slices
from .tile import Tile, bias_gradient, padded, zero_bias_gradient
from .tiling import Needed, Tiling

# As shift of a query that sees nothing: whatever its scores, their exponentials are zero.
_NOTHING_SEEN = 1e30


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
    rows = _statistics_of_large_scores(q, k, v, rows, dout, dlse, options=options, **blocks)
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


class Rows(NamedTuple):
    """What the softmax of a row comes to, each `(batch, heads, q_len)`.

    The probability of a score is `exp(score - shift) * share`.
    """

    shift: jax.Array
    share: jax.Array
    delta: jax.Array


def softmax_statistics(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> Rows:
    """By the log-sum-exp of the forward pass; a query that sees nothing adds nothing."""
    delta = lax.reduce_sum(lax.mul(float32(dout), float32(out)), (3,))
    delta = lax.transpose(delta, (0, 2, 1))
    if dlse is not None:
        delta = lax.sub(delta, float32(dlse))
    empty = lax.eq(lse, np.float32(-np.inf))
    shift = lax.select(empty, lax.full_like(lse, _NOTHING_SEEN), lse)
    return Rows(shift, lax.full_like(lse, 1), lax.select(empty, lax.full_like(delta, 0), delta))


def sinks_gradient(sinks: jax.Array, rows: Rows) -> jax.Array:
    """The gradient of the sinks, `(heads,)`."""
    logits = lax.broadcast_in_dim(float32(sinks), rows.shift.shape, (1,))
    weight = lax.mul(lax.exp(lax.sub(logits, rows.shift)), rows.share)
    return lax.neg(lax.reduce_sum(lax.mul(weight, rows.delta), (0, 2)))


class _Clean(NamedTuple):
    """The arrays of a call, padded, in which what does not count is zero, and its rows.

    `dout` and `delta` have been multiplied by the shares. Whoever sees something that is not finite
    has a log-sum-exp or a `delta` that is not. So it is enough to let such rows have NaN for their
    shift; hidden scores are zero all the same: `_weights`.
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
        shift, share, delta = rows
        delta = lax.mul(delta, share)
        dout = lax.mul(float32(dout), lax.broadcast_in_dim(share, dout.shape, (0, 2, 1)))
        if may_hide(options):
            # A query that sees nothing may hold anything.
            unseen = lax.eq(shift, np.float32(_NOTHING_SEEN))
            bad = lax.bitwise_not(lax.bitwise_and(lax.is_finite(shift), lax.is_finite(delta)))
            shift = lax.select(bad, lax.full_like(shift, jnp.nan), shift)
            delta = lax.select(bad, lax.full_like(delta, 0), delta)
            k, v, q, dout = (zero_if_not_finite(x) for x in (k, v, q, dout))
            q, dout = (_zero_rows(x, unseen) for x in (q, dout))
        q_len, k_len = tiling.padded_q_len, tiling.padded_k_len
        return _Clean(
            pad(q, q_len, 1),
            pad(k, k_len, 1),
            pad(v, k_len, 1),
            pad(dout, q_len, 1),
            as_row(pad(shift, q_len, 2, _NOTHING_SEEN), tiling.group),
            as_row(pad(delta, q_len, 2), tiling.group),
        )


def _zero_rows(x: jax.Array, where: jax.Array) -> jax.Array:
    """A `(batch, q_len, heads, d)` array with zeros where `(batch, heads, q_len)` is True."""
    rows = lax.broadcast_in_dim(where, x.shape, (0, 2, 1))
    return lax.select(rows, lax.full_like(x, 0), x)


def _weights(scores: jax.Array, shift: jax.Array, *, masked: bool) -> jax.Array:
    """`exp(scores - shift)`, zero where a score is hidden, whatever the row's shift is."""
    weights = lax.exp(lax.sub(scores, shift))
    return _zero_where_hidden(weights, scores) if masked else weights


def _zero_where_hidden(x: jax.Array, scores: jax.Array) -> jax.Array:
    return lax.select(lax.eq(scores, np.float32(-np.inf)), lax.full_like(x, 0), x)


# Up to here a log-sum-exp has as many digits behind the point as float32 has for a probability.
_LARGE = 64.0


def _statistics_of_large_scores(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    options: Options,
    block_q: int,
    block_k: int,
    block_heads: int | None,
) -> Rows:
    """The statistics of the rows, found anew if any log-sum-exp is large.

    They are in the same blocks and by the same products as in the backward pass, so that the two
    round alike: a key that has all the weight then has a probability of exactly one, and a gradient
    of exactly zero, however large its score is.
    """
    tiling = Tiling.of(q, k, block_q, block_k)
    size = lax.abs(rows.shift)
    is_large = lax.bitwise_and(
        lax.gt(size, np.float32(_LARGE)), lax.ne(size, np.float32(_NOTHING_SEEN))
    )
    large = lax.reduce_or(is_large, (0, 1, 2))
    clean = _Clean.of(q, k, v, dout, rows, options, tiling)
    padded_options = padded(options, tiling)
    slices = Slices.of(q, k, block_heads)
    start = tuple(lax.full_like(clean.shift, x) for x in (-jnp.inf, 0.0, 0.0))

    def collect(part: Slice, state: _Statistics) -> _Statistics:
        own = part.options(padded_options)
        new = _statistics(clean, part, own, tiling)
        return tuple(part.set_rows(x, y) for x, y in zip(state, new, strict=True))

    found = slices.each(collect, start, only_if=large)
    largest, total, weighted = (_by_query(x, tiling) for x in found)
    shift, missing = largest, lax.eq(total, np.float32(0))
    if options.sinks is not None:
        logits = lax.broadcast_in_dim(float32(options.sinks), largest.shape, (1,))
        shift = lax.max(largest, logits)
        shrink = lax.exp(lax.sub(largest, shift))
        weighted = lax.mul(weighted, shrink)
        total = lax.add(lax.mul(total, shrink), lax.exp(lax.sub(logits, shift)))
    share = lax.div(lax.full_like(total, 1), lax.select(missing, lax.full_like(total, 1), total))
    delta = lax.mul(weighted, share)
    if dlse is not None:
        delta = lax.sub(delta, float32(dlse))
    # Rows of NaN and rows that see nothing stay as they were.
    as_before = lax.bitwise_or(
        lax.bitwise_or(missing, lax.ne(rows.shift, rows.shift)),
        lax.eq(rows.shift, np.float32(_NOTHING_SEEN)),
    )
    as_before = lax.bitwise_or(
        as_before, lax.broadcast_in_dim(lax.bitwise_not(large), as_before.shape, ())
    )
    exact = Rows(shift, share, delta)
    return Rows(*(lax.select(as_before, x, y) for x, y in zip(rows, exact, strict=True)))


_Statistics = tuple[jax.Array, ...]


def _statistics(clean: _Clean, part: Slice, options: Options, tiling: Tiling) -> _Statistics:
    """Of one slice: the largest score of each row, and relative to it the sum of the weights and
    the sum of what each weight adds to the loss."""
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
    start = tuple(lax.full_like(like, x) for x in (-jnp.inf, 0.0, 0.0))

    def of_block(j: Index, state: _Statistics) -> _Statistics:
        here = times(j, tiling.block_k)
        k_block = lax.mul(float32(to_rows(span(k, here, tiling.block_k, 1), group=1)), scale)
        v_block = float32(to_rows(span(v, here, tiling.block_k, 1), group=1))

        def add(i: Index, state: _Statistics, *, masked: bool) -> _Statistics:
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
            return tuple(set_span(x, there, y, 3) for x, y in zip(state, new, strict=True))

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
