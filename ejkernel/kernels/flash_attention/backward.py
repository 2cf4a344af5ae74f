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
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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

# As log-sum-exp of a query that sees nothing: whatever its scores, their exponentials are zero.
_NOTHING_SEEN = 1e30


class Gradients(NamedTuple):
    """Gradients of the arrays of a call; those of keywords by name."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    by_keyword: dict[str, jax.Array]


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
    lse, delta = softmax_statistics(out, lse, dout, dlse)
    gradients = partial_gradients(
        q,
        k,
        v,
        lse,
        delta,
        dout,
        options=options,
        block_q=block_q,
        block_k=block_k,
        block_heads=block_heads,
        differentiate_bias=differentiate_bias,
    )
    if options.sinks is not None:
        gradients.by_keyword["sinks"] = sinks_gradient(options.sinks, lse, delta)
    return gradients


def softmax_statistics(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`lse` and `delta`, `(batch, heads, q_len)`; a query that sees nothing adds nothing."""
    delta = lax.reduce_sum(lax.mul(float32(dout), float32(out)), (3,))
    delta = lax.transpose(delta, (0, 2, 1))
    if dlse is not None:
        delta = lax.sub(delta, float32(dlse))
    empty = lax.eq(lse, np.float32(-np.inf))
    lse = lax.select(empty, lax.full_like(lse, _NOTHING_SEEN), lse)
    return lse, lax.select(empty, lax.full_like(delta, 0), delta)


def sinks_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the sinks, `(heads,)`, from the results of `softmax_statistics`."""
    weight = jnp.exp(float32(sinks)[None, :, None] - lse)
    return -jnp.sum(weight * delta, axis=(0, 2))


def partial_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
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
    q, dout = pad(q, tiling.padded_q_len, 1), pad(dout, tiling.padded_q_len, 1)
    k, v = pad(k, tiling.padded_k_len, 1), pad(v, tiling.padded_k_len, 1)
    lse, delta = pad(lse, tiling.padded_q_len, 2, _NOTHING_SEEN), pad(delta, tiling.padded_q_len, 2)
    lse, delta = as_row(lse, tiling.group), as_row(delta, tiling.group)

    zeros = [filled(x, x.shape[-1], 0.0, dtype or x.dtype) for x in (q, k, v)]
    empty = Gradients(zeros[0], zeros[1], zeros[2], {})
    if options.bias is not None and differentiate_bias:
        empty.by_keyword["bias"] = zero_bias_gradient(options.bias, tiling.group)

    def differentiate(part: Slice, sums: Gradients) -> Gradients:
        tables = {name: part.rows(x) for name, x in sums.by_keyword.items()}
        new = _differentiate(
            part.queries(q),
            part.queries(dout),
            part.rows(lse),
            part.rows(delta),
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
    lse: jax.Array,
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
            dout_block = float32(span(dout_rows, there, rows, 2))
            # Tiles are (keys, queries) here: XLA's CPU products take up to twice as long when their
            # large operand must be transposed, and of the three that read a tile only dq would need
            # that. So dq is computed as its own transpose, where the small operand is transposed.
            scores, slope = tile.apply(product(k_block, q_block, 3, 3), i, j, masked=masked)
            p = lax.exp(lax.sub(scores, span(lse, there, rows, 3)))
            dp = tile.dropped(product(v_block, dout_block, 3, 3), i, j)
            ds = lax.mul(p, lax.sub(dp, span(delta, there, rows, 3)))
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
