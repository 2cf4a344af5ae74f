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
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from ...promotion import usual_promotion
from ..options import Options
from ..passes import Gradients, Results
from ..rows import Rows, sinks_gradient, softmax_statistics
from ..scalars import Index, scalar, times
from .large_scores import exact_statistics
from .layout import filled, from_rows, loop, pad, product, set_span, span
from .slices import Slice
from .sweep import SliceSweep, Sweep, Tiled, weighted
from .tile import bias_gradient, zero_bias_gradient


@usual_promotion
def backward(
    results: Results,
    *,
    block_q: int,
    block_k: int,
    block_heads: int | None = None,
    differentiate_bias: bool = True,
    **keywords: Any,
) -> Gradients:
    """Gradients of the inputs of `forward`, from its results and the gradients of those.

    The other arguments are as in `forward`; only the blocks may differ from those used there.

    Args:
      results: the arrays of the call, what `forward` made of them, and the gradients of that.
      differentiate_bias: whether the gradient of the bias, if there is one, is needed.

    Returns:
      The gradients, each with the shape and dtype of its input; of `bias` and `sinks` in that of
      `lse`, which is that of the arithmetic.
    """
    q, k, v, out, lse, dout, dlse = results
    options = Options(**keywords)
    cut: dict[str, Any] = {
        "options": options,
        "block_q": block_q,
        "block_k": block_k,
        "block_heads": block_heads,
    }
    rows = softmax_statistics(out, lse, dout, dlse)
    rows = exact_statistics(q, k, v, rows, dout, dlse, **cut)
    gradients = partial_gradients(q, k, v, rows, dout, differentiate_bias=differentiate_bias, **cut)
    if options.sinks is not None:
        gradients.by_keyword["sinks"] = sinks_gradient(options.sinks, rows)
    return gradients


def partial_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    dout: jax.Array,
    *,
    options: Options,
    differentiate_bias: bool,
    dtype: Any = None,
    **blocks: Any,
) -> Gradients:
    """What these keys contribute, with the statistics of all keys: `dq`, `dk`, `dv` and `bias`.

    `dtype` is that of the gradients; None: each that of its input. `blocks` as in `Sweep.of`.
    """
    sweep = Sweep.of(q, k, v, dout, rows, options=options, **blocks)
    tiling = sweep.tiling
    whole = (pad(q, tiling.padded_q_len, 1), *(pad(x, tiling.padded_k_len, 1) for x in (k, v)))
    zeros = [filled(x, x.shape[-1], 0.0, dtype or x.dtype) for x in whole]
    empty = Gradients(zeros[0], zeros[1], zeros[2], {})
    if sweep.options.bias is not None and differentiate_bias:
        empty.by_keyword["bias"] = zero_bias_gradient(
            sweep.options.bias, tiling.group, rows.shift.dtype
        )

    def differentiate(part: Slice, sums: Gradients) -> Gradients:
        tables = {name: part.rows(x) for name, x in sums.by_keyword.items()}
        new = _differentiate(sweep.over(part), sums._replace(by_keyword=tables), part)
        return new._replace(
            dq=part.set(sums.dq, new.dq),
            by_keyword={
                name: part.set_rows(x, new.by_keyword[name]) for name, x in sums.by_keyword.items()
            },
        )

    sums = sweep.slices.each(differentiate, empty)
    by_keyword = dict(sums.by_keyword)
    if options.bias is not None and differentiate_bias:
        by_keyword["bias"] = bias_gradient(by_keyword["bias"], options.bias.shape)
    return Gradients(
        _shortened(sums.dq, tiling.q_len),
        _shortened(sums.dk, tiling.k_len),
        _shortened(sums.dv, tiling.k_len),
        by_keyword,
    )


def _differentiate(sweep: SliceSweep, gradients: Gradients, part: Slice) -> Gradients:
    """The gradients of one slice.

    Those of keys and values are filled into `gradients.dk` and `gradients.dv`, which are of all
    slices; that of the bias is added to; `gradients.dq` is not read.
    """
    tile = sweep.tile
    tiling = tile.tiling

    def differentiate_block(j: Index, gradients: Gradients) -> Gradients:
        keys = sweep.keys(j)

        def add_queries(tiled: Tiled, sums: Gradients) -> Gradients:
            i, start = tiled.i, tiled.start
            p = lax.exp(tiled.scores)
            delta = span(sweep.delta, start, sweep.rows, 3)
            ds = weighted(p, lax.sub(tiled.d_weights, delta), masked=tiled.masked)
            by_keyword = {
                name: tile.add_to_bias_gradient(x, ds, i, j) for name, x in sums.by_keyword.items()
            }
            ds = ds if tiled.slope is None else lax.mul(ds, tiled.slope)
            dq_block = lax.transpose(product(keys.scaled, ds, 2, 2), (0, 1, 3, 2))
            dq_block = lax.add(span(sums.dq, start, sweep.rows, 2), dq_block)
            return Gradients(
                dq=set_span(sums.dq, start, dq_block, 2),
                dk=lax.add(sums.dk, product(ds, tiled.q, 3, 2)),
                dv=lax.add(sums.dv, product(tile.dropped(p, i, j), tiled.dout, 3, 2)),
                by_keyword=by_keyword,
            )

        zeros = [lax.full_like(x, 0) for x in (keys.scaled, keys.values)]
        sums = gradients._replace(dk=zeros[0], dv=zeros[1])
        sums = sweep.each_tile(keys, add_queries, sums, shift=sweep.shift)
        dk = lax.mul(sums.dk, scalar(tile.options.softmax_scale, sums.dk))
        here = times(j, tiling.block_k)
        return sums._replace(
            dk=part.set(gradients.dk, from_rows(dk, group=1), here),
            dv=part.set(gradients.dv, from_rows(sums.dv, group=1), here),
        )

    # Every key block adds to dq, so it stays in tile layout, and unrounded, to the end.
    start = gradients._replace(dq=lax.full_like(sweep.q, 0, sweep.shift.dtype))
    sums = loop(0, tiling.k_blocks, differentiate_block, start)
    return sums._replace(dq=from_rows(sums.dq, tiling.group))


def _shortened(x: jax.Array, length: int) -> jax.Array:
    return x if x.shape[1] == length else lax.slice_in_dim(x, 0, length, axis=1)
