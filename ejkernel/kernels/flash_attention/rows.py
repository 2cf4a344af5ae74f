r"""What the softmax of a row comes to, and what the backward pass needs of it."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax

from .layout import scalar

NOTHING_SEEN = 1e30
"""As shift of a query that sees nothing: whatever its scores, their exponentials are zero."""


class Rows(NamedTuple):
    """One number for every query and head, each `(batch, heads, q_len)`.

    The probability of a score is `exp(score - shift) * share`; `delta` is what the module
    `backward` says.
    """

    shift: jax.Array
    share: jax.Array
    delta: jax.Array


def softmax_statistics(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> Rows:
    """By the log-sum-exp of the forward pass; a query that sees nothing adds nothing."""
    out, dout = (lax.convert_element_type(x, lse.dtype) for x in (out, dout))
    delta = lax.transpose(lax.reduce_sum(lax.mul(dout, out), (3,)), (0, 2, 1))
    if dlse is not None:
        delta = lax.sub(delta, lax.convert_element_type(dlse, lse.dtype))
    empty = lax.eq(lse, scalar(-float("inf"), lse))
    shift = lax.select(empty, lax.full_like(lse, NOTHING_SEEN), lse)
    return Rows(shift, lax.full_like(lse, 1), lax.select(empty, lax.full_like(delta, 0), delta))


def sinks_gradient(sinks: jax.Array, rows: Rows) -> jax.Array:
    """The gradient of the sinks, `(heads,)`."""
    weight = lax.mul(lax.exp(lax.sub(as_logits(sinks, rows.shift), rows.shift)), rows.share)
    return lax.neg(lax.reduce_sum(lax.mul(weight, rows.delta), (0, 2)))


def as_logits(sinks: jax.Array, like: jax.Array) -> jax.Array:
    """`(heads,)` as one more score for every row, `(batch, heads, q_len)`."""
    return lax.broadcast_in_dim(lax.convert_element_type(sinks, like.dtype), like.shape, (1,))
