r"""Ring attention: the sequence is shared out to the devices of a mesh axis.

Each device keeps its own queries, and the keys and values go round: after as many steps as there
are devices every query has met every key, and no device ever held more than two shares. What a
device has after a step is exact attention to the keys met so far: the largest score :math:`m` of a
query, the sum :math:`l` of its weights and that of the weighted values :math:`a`, both relative to
:math:`m`. Two such results make

.. math::
    m = \max(m_1, m_2), \qquad l = e^{m_1 - m} l_1 + e^{m_2 - m} l_2, \qquad
    a = e^{m_1 - m} a_1 + e^{m_2 - m} a_2 .

In the backward pass the gradients of the keys and values travel along with them, each device
adding its part, and are at home when the round is over. A share that a device's queries do not see,
because it lies in their future or outside of their window, costs nothing but its passage. Where a
log-sum-exp is large (`large_scores`), there is a round before that in which the statistics of the
rows are found again.

Runs inside `shard_map`. The local arrays are shares of equal length in the order of the axis;
lengths, windows and dropout count positions of the whole sequence; `bias` and `mask` hold the
device's own queries against the keys of the whole sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...dtypes import accumulation_dtype
from ...promotion import usual_promotion
from ..options import Options
from ..passes import Gradients, Results
from ..rows import Statistics, exact_rows, is_large, sinks_gradient, softmax_statistics
from .backward import partial_gradients
from .forward import partial_forward
from .large_scores import statistics
from .layout import block, filled, loop, set_span


@usual_promotion
def ring_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: Options,
    **blocks: Any,
) -> tuple[jax.Array, jax.Array]:
    """As `forward`, with the sequence shared out over `sequence_axis`."""
    ring = _Ring.of(options.sequence_axis)
    dtype = accumulation_dtype(q.dtype)

    def step(t: Any, state: Any) -> Any:
        share, met = state
        own = ring.options(options, share, ring.owner(t), q, k).replace(sinks=None)
        out, (largest, total) = partial_forward(q, share.k, share.v, own, apart=True, **blocks)
        here = Statistics(largest, total, out * _by_row(total))
        return ring.passed_on(share), _joined(met, here)

    share = _Share(k, v, options.kv_segment_ids)
    one = lax.transpose(lax.squeeze(filled(q, 1, 0.0, dtype), (3,)), (0, 2, 1))
    start = Statistics.before(one, filled(q, v.shape[-1], 0.0, dtype))
    _, met = loop(0, ring.size, step, (share, start))
    empty = jnp.isneginf(met.largest)
    if options.sinks is not None:
        sinks = jnp.broadcast_to(options.sinks.astype(dtype)[None, :, None], empty.shape)
        sink = Statistics(sinks, jnp.ones_like(sinks), jnp.zeros_like(met.weighted))
        met = _joined(met, sink)
    total = jnp.where(empty, 1.0, met.total)
    lse = jnp.where(empty, -jnp.inf, met.largest + jnp.log(total))
    return (met.weighted / _by_row(total)).astype(q.dtype), lse


@usual_promotion
def ring_backward(
    results: Results, options: Options, *, differentiate_bias: bool = True, **blocks: Any
) -> Gradients:
    """As `backward`, with the sequence shared out over `sequence_axis`."""
    q, k, v, out, lse, dout, dlse = results
    ring = _Ring.of(options.sequence_axis)
    rows = softmax_statistics(out, lse, dout, dlse)

    def collect(t: Any, state: Any) -> Any:
        share, met = state
        own = ring.options(options, share, ring.owner(t), q, k)
        here = statistics(q, share.k, share.v, rows, dout, own, **blocks)
        return ring.passed_on(share), _joined(met, here)

    share = _Share(k, v, options.kv_segment_ids)
    steps = ring.size * ring.largest(jnp.any(is_large(rows.shift)).astype(jnp.int32))
    start: Any = (share, Statistics.before(lax.full_like(rows.delta, 0)))
    share, found = loop(0, steps, collect, start)
    rows = exact_rows(rows, found, options.sinks, dlse)

    def step(t: Any, state: Any) -> Any:
        share, dk, dv, dq, by_keyword = state
        owner = ring.owner(t)
        new = partial_gradients(
            q,
            share.k,
            share.v,
            rows,
            dout,
            ring.options(options, share, owner, q, k),
            **blocks,
            differentiate_bias=differentiate_bias,
            dtype=lse.dtype,
        )
        if "bias" in by_keyword:
            by_keyword = {"bias": _with_part(by_keyword["bias"], new.by_keyword["bias"], owner)}
        travelling = ring.passed_on((share, dk + new.dk, dv + new.dv))
        return *travelling, dq + new.dq, by_keyword

    by_keyword = {}
    if options.bias is not None and differentiate_bias:
        by_keyword["bias"] = lax.full_like(options.bias, 0, lse.dtype)
    zeros = tuple(lax.full_like(x, 0, lse.dtype) for x in (k, v, q))
    start = (share, *zeros, by_keyword)
    _, dk, dv, dq, by_keyword = loop(0, ring.size, step, start)
    if options.sinks is not None:
        by_keyword = {**by_keyword, "sinks": sinks_gradient(options.sinks, rows)}
    return Gradients(dq, dk, dv, by_keyword)


class _Share(NamedTuple):
    """What goes round."""

    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array | None


class _Ring(NamedTuple):
    axis: str
    size: int
    here: jax.Array

    @staticmethod
    def of(axis: str | None) -> _Ring:
        assert axis is not None
        return _Ring(axis, lax.axis_size(axis), lax.axis_index(axis))

    def owner(self, step: jax.Array) -> jax.Array:
        """Whose share is here after so many steps."""
        return lax.rem(self.here - step + self.size, np.int32(self.size))

    def passed_on(self, tree: Any) -> Any:
        """What arrives from the device before, when everyone passes theirs on."""
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, to_next), tree)

    def largest(self, x: jax.Array) -> jax.Array:
        """The largest on any device, of other rings too: what all do together, all have to do."""
        # One by one, because JAX does not take axes along which x varies together with others.
        for axis in sorted({self.axis, *jax.sharding.get_abstract_mesh().manual_axes}, key=str):
            x = lax.pmax(x, axis)
        return x

    def options(
        self, options: Options, share: _Share, owner: jax.Array, q: jax.Array, k: jax.Array
    ) -> Options:
        """The options as they are for this device's queries against one share of the keys."""

        def columns(x: jax.Array | None) -> jax.Array | None:
            return x if x is None or x.shape[3] == 1 else block(x, owner, k.shape[1], 3)

        return options.replace(
            bias=columns(options.bias),
            mask=columns(options.mask),
            kv_segment_ids=share.segment_ids,
            first_query=self.here * q.shape[1],
            first_key=owner * k.shape[1],
        )


def _joined(one: Statistics, other: Statistics) -> Statistics:
    """Over the keys of both."""
    largest = jnp.maximum(one.largest, other.largest)
    # Where neither saw anything, -inf - -inf would be NaN.
    shift = jnp.where(jnp.isneginf(largest), 0.0, largest)
    total, weighted = jnp.zeros_like(one.total), jnp.zeros_like(one.weighted)
    for part in (one, other):
        shrink = jnp.exp(part.largest - shift)
        total += shrink * part.total
        weighted += (_by_row(shrink) if weighted.ndim == 4 else shrink) * part.weighted
    return Statistics(largest, total, weighted)


def _by_row(x: jax.Array) -> jax.Array:
    """`(batch, heads, q_len)` as a factor of `(batch, q_len, heads, d)`."""
    return x.swapaxes(1, 2)[..., None]


def _with_part(whole: jax.Array, part: jax.Array, owner: jax.Array) -> jax.Array:
    """A bias gradient with that of one share's columns added; if it has none, the sum."""
    if whole.shape == part.shape:
        return whole + part
    size = part.shape[3]
    return set_span(whole, owner * size, block(whole, owner, size, 3) + part, 3)
