r"""What the softmax of a row comes to: what a backward pass needs to rebuild its probabilities.

Usually that is the log-sum-exp, and `delta` of the results. Where the log-sum-exp is large, it has
too few digits: then the rows are made of statistics that a pass over the keys has found.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .finite import may_hide, zero_if_not_finite
from .layout import float32
from .options import Options

# As shift of a query that sees nothing: whatever its scores, their exponentials are zero.
NOTHING_SEEN = 1e30


class Rows(NamedTuple):
    """What the softmax of a row comes to, each `(batch, heads, q_len)`.

    The probability of a score is `exp(score - shift) * share`; a row that sees no key has no share.
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
    shift = lax.select(empty, lax.full_like(lse, NOTHING_SEEN), lse)
    zeros, ones = lax.full_like(lse, 0), lax.full_like(lse, 1)
    return Rows(shift, lax.select(empty, zeros, ones), lax.select(empty, zeros, delta))


def sinks_gradient(sinks: jax.Array, rows: Rows) -> jax.Array:
    """The gradient of the sinks, `(heads,)`."""
    logits = lax.broadcast_in_dim(float32(sinks), rows.shift.shape, (1,))
    weight = lax.mul(lax.exp(lax.sub(logits, rows.shift)), rows.share)
    return lax.neg(lax.reduce_sum(lax.mul(weight, rows.delta), (0, 2)))


def with_shares(
    rows: Rows, dout: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The shifts of the rows, and `delta` and `dout` multiplied by the shares, in float32.

    Whoever sees something that is not finite has a log-sum-exp or a `delta` that is not. So it is
    enough to let such rows have NaN for their shift, as long as hidden scores weigh nothing all the
    same. `dout` is finite then.
    """
    shift, share, delta = rows
    delta = lax.mul(delta, share)
    dout = lax.mul(float32(dout), lax.broadcast_in_dim(share, dout.shape, (0, 2, 1)))
    if may_hide(options):
        bad = lax.bitwise_not(lax.bitwise_and(lax.is_finite(shift), lax.is_finite(delta)))
        shift = lax.select(bad, lax.full_like(shift, jnp.nan), shift)
        delta = lax.select(bad, lax.full_like(delta, 0), delta)
        dout = zero_if_not_finite(dout)
    return shift, delta, dout


# Up to here a log-sum-exp has as many digits behind the point as float32 has for a probability.
_LARGE = 64.0


def is_large(shift: jax.Array) -> jax.Array:
    """True where a shift by the log-sum-exp of a row says too little about its probabilities."""
    size = lax.abs(shift)
    return lax.bitwise_and(lax.gt(size, np.float32(_LARGE)), lax.ne(size, np.float32(NOTHING_SEEN)))


class Statistics(NamedTuple):
    """What rows add up to over some keys; the totals are relative to the largest score.

    Where no key was met, the total is zero. `weighted` is the sum of what each weight adds to the
    loss.
    """

    largest: jax.Array
    total: jax.Array
    weighted: jax.Array


def exact_rows(
    rows: Rows, found: Statistics, sinks: jax.Array | None, dlse: jax.Array | None
) -> Rows:
    """The rows by what was found of them; as before where nothing was, or they are not finite."""
    largest, total, weighted = found
    shift, missing = largest, lax.eq(total, np.float32(0))
    if sinks is not None:
        logits = lax.broadcast_in_dim(float32(sinks), largest.shape, (1,))
        shift = lax.max(largest, logits)
        shrink = lax.exp(lax.sub(largest, shift))
        weighted = lax.mul(weighted, shrink)
        total = lax.add(lax.mul(total, shrink), lax.exp(lax.sub(logits, shift)))
    share = lax.div(lax.full_like(total, 1), lax.select(missing, lax.full_like(total, 1), total))
    delta = lax.mul(weighted, share)
    if dlse is not None:
        delta = lax.sub(delta, float32(dlse))
    finite = lax.bitwise_and(lax.is_finite(rows.shift), lax.is_finite(rows.delta))
    empty = lax.eq(rows.share, np.float32(0))
    as_before = lax.bitwise_or(lax.bitwise_or(missing, lax.bitwise_not(finite)), empty)
    exact = Rows(shift, share, delta)
    return Rows(*(lax.select(as_before, x, y) for x, y in zip(rows, exact, strict=True)))
