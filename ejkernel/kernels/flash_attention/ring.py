r"""Ring attention: the sequence is shared out to the devices of a mesh axis.

Each device keeps its own queries, and the keys and values go round: after as many steps as there
are devices every query has met every key, and no device ever held more than two shares. What a
device has after a step is exact attention to the keys met so far; two such results,
:math:`(o_1, l_1)` and :math:`(o_2, l_2)` with their log-sum-exps, make

.. math::
    l = \log(e^{l_1} + e^{l_2}), \qquad o = e^{l_1 - l} o_1 + e^{l_2 - l} o_2 .

In the backward pass the gradients of the keys and values travel along with them, each device
adding its part, and are at home when the round is over. A share that a device's queries do not see,
because it lies in their future or outside of their window, costs nothing but its passage.

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

from ..dtypes import accumulation_dtype
from ..promotion import usual_promotion
from .backward import Gradients, partial_gradients
from .forward import forward
from .layout import block, filled, loop, set_block
from .options import Options
from .rows import sinks_gradient, softmax_statistics


@usual_promotion
def ring_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sequence_axis: str,
    block_q: int,
    block_k: int,
    block_heads: int | None = None,
    **keywords: Any,
) -> tuple[jax.Array, jax.Array]:
    """As `forward`, with the sequence shared out over `sequence_axis`."""
    options = Options(**keywords)
    ring = _Ring.of(sequence_axis)
    dtype = accumulation_dtype(q.dtype)

    def step(t: Any, state: Any) -> Any:
        share, out, lse = state
        owner = ring.owner(t)
        own = ring.options(options, share, owner, q.shape[1], k.shape[1]).replace(sinks=None)
        met = forward(
            q,
            share.k,
            share.v,
            block_q=block_q,
            block_k=block_k,
            block_heads=block_heads,
            out_dtype=dtype,
            **vars(own),
        )
        return ring.passed_on(share), *_joined((out, lse), met)

    share = _Share(k, v, options.kv_segment_ids)
    out = filled(q, v.shape[-1], 0.0, dtype)
    lse = lax.transpose(lax.squeeze(filled(q, 1, -jnp.inf, dtype), (3,)), (0, 2, 1))
    _, out, lse = loop(0, ring.size, step, (share, out, lse))
    if options.sinks is not None:
        out, lse = _with_sinks(out, lse, options.sinks)
    return out.astype(q.dtype), lse


@usual_promotion
def ring_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    *,
    sequence_axis: str,
    block_q: int,
    block_k: int,
    block_heads: int | None = None,
    dlse: jax.Array | None = None,
    differentiate_bias: bool = True,
    **keywords: Any,
) -> Gradients:
    """As `backward`, with the sequence shared out over `sequence_axis`."""
    options = Options(**keywords)
    ring = _Ring.of(sequence_axis)
    rows = softmax_statistics(out, lse, dout, dlse)

    def step(t: Any, state: Any) -> Any:
        share, dk, dv, dq, by_keyword = state
        owner = ring.owner(t)
        new = partial_gradients(
            q,
            share.k,
            share.v,
            rows,
            dout,
            options=ring.options(options, share, owner, q.shape[1], k.shape[1]),
            block_q=block_q,
            block_k=block_k,
            block_heads=block_heads,
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
    start: Any = (_Share(k, v, options.kv_segment_ids), *zeros, by_keyword)
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
    def of(axis: str) -> _Ring:
        return _Ring(axis, lax.axis_size(axis), lax.axis_index(axis))

    def owner(self, step: jax.Array) -> jax.Array:
        """Whose share is here after so many steps."""
        return lax.rem(self.here - step + self.size, np.int32(self.size))

    def passed_on(self, tree: Any) -> Any:
        """What arrives from the device before, when everyone passes theirs on."""
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, to_next), tree)

    def options(
        self, options: Options, share: _Share, owner: jax.Array, q_len: int, k_len: int
    ) -> Options:
        """The options as they are for this device's queries against one share of the keys."""

        def columns(x: jax.Array | None) -> jax.Array | None:
            return x if x is None or x.shape[3] == 1 else block(x, owner, k_len, 3)

        return options.replace(
            bias=columns(options.bias),
            mask=columns(options.mask),
            kv_segment_ids=share.segment_ids,
            first_query=self.here * q_len,
            first_key=owner * k_len,
        )


def _joined(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Attention to the keys of both."""
    lse = jnp.logaddexp(one[1], other[1])
    # Where neither saw anything, -inf - -inf would be NaN.
    finite = jnp.where(jnp.isneginf(lse), 0.0, lse)
    parts = [out * _by_row(jnp.exp(part - finite)) for out, part in (one, other)]
    return parts[0] + parts[1], lse


def _with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same with one more logit per head in the denominator."""
    joint = jnp.logaddexp(lse, sinks.astype(lse.dtype)[None, :, None])
    joint = jnp.where(jnp.isneginf(lse), lse, joint)
    shrink = jnp.exp(lse - jnp.where(jnp.isneginf(lse), 0.0, joint))
    return out * _by_row(shrink), joint


def _by_row(x: jax.Array) -> jax.Array:
    """`(batch, heads, q_len)` as a factor of `(batch, q_len, heads, d)`."""
    return x.swapaxes(1, 2)[..., None]


def _with_part(whole: jax.Array, part: jax.Array, owner: jax.Array) -> jax.Array:
    """A bias gradient with that of one share's columns added; if it has none, the sum."""
    if whole.shape == part.shape:
        return whole + part
    return set_block(whole, owner, block(whole, owner, part.shape[3], 3) + part, 3)
