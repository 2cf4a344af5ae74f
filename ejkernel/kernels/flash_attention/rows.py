r"""What the softmax of a row comes to: what a backward pass needs to rebuild its probabilities.

Usually that is the log-sum-exp, and `delta` of the results. Where the log-sum-exp is large, it has
too few digits: then the rows are made of statistics that a pass over the keys has found. All is in
the dtype of the log-sum-exp, float32 or float64.

Numbers that are not finite stay with those who see them. A product with a weight of zero is NaN if
the other factor is NaN or infinite. So what a query does not see, such as padding that was never
written, has to be zero before it meets weights. A value with a number that is not finite is zero
there, and its key is NaN where scores are computed: those who see it get NaN, as they should, and
hiding a score hides that as well.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .options import Options
from .scalars import scalar

NOTHING_SEEN = 1e30
"""As shift of a query that sees nothing: whatever its scores, their exponentials are zero."""


class Rows(NamedTuple):
    """One number for every query and head, each `(batch, heads, q_len)`.

    The probability of a score is `exp(score - shift) * share`; a row that sees no key has no share.
    `delta` is what the module `backward` says.
    """

    shift: jax.Array
    share: jax.Array
    delta: jax.Array


def zero_if_not_finite(x: jax.Array, counts: jax.Array | None = None) -> jax.Array:
    """The array with zeros for NaN and infinity, and for everything that does not count."""
    good = lax.is_finite(x)
    if counts is not None:
        good = lax.bitwise_and(good, lax.broadcast_in_dim(counts, x.shape, range(x.ndim)))
    return lax.select(good, x, lax.full_like(x, 0))


def keys_that_stay_apart(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys to compute scores with, and values to be weighted: see above."""
    bad = lax.reduce_or(lax.bitwise_not(lax.is_finite(v)), (3,))
    of_keys = lax.broadcast_in_dim(bad, k.shape, (0, 1, 2))
    return lax.select(of_keys, lax.full_like(k, jnp.nan), k), zero_if_not_finite(v)


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
    zeros, ones = lax.full_like(lse, 0), lax.full_like(lse, 1)
    return Rows(shift, lax.select(empty, zeros, ones), lax.select(empty, zeros, delta))


def sinks_gradient(sinks: jax.Array, rows: Rows) -> jax.Array:
    """The gradient of the sinks, `(heads,)`."""
    weight = lax.mul(lax.exp(lax.sub(_as_logits(sinks, rows.shift), rows.shift)), rows.share)
    return lax.neg(lax.reduce_sum(lax.mul(weight, rows.delta), (0, 2)))


def _as_logits(sinks: jax.Array, like: jax.Array) -> jax.Array:
    """`(heads,)` as one more score for every row, `(batch, heads, q_len)`."""
    return lax.broadcast_in_dim(lax.convert_element_type(sinks, like.dtype), like.shape, (1,))


def apart(shift: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Shift and `delta` of rows such that those who see what is not finite have NaN.

    Whoever does has a log-sum-exp or a `delta` that is not finite. So it is enough to let such rows
    have NaN for their shift, as long as hidden scores weigh nothing all the same.
    """
    bad = lax.bitwise_not(lax.bitwise_and(lax.is_finite(shift), lax.is_finite(delta)))
    shift = lax.select(bad, lax.full_like(shift, jnp.nan), shift)
    return shift, lax.select(bad, lax.full_like(delta, 0), delta)


def with_shares(
    rows: Rows, dout: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The shifts of the rows, and `delta` and `dout` multiplied by the shares.

    Where anything may be hidden, rows are `apart` and `dout` is finite.
    """
    shift, share, delta = rows
    delta = lax.mul(delta, share)
    dout = lax.convert_element_type(dout, share.dtype)
    dout = lax.mul(dout, lax.broadcast_in_dim(share, dout.shape, (0, 2, 1)))
    if options.may_hide:
        shift, delta = apart(shift, delta)
        dout = zero_if_not_finite(dout)
    return shift, delta, dout


# Up to here a log-sum-exp has as many digits behind the point as float32 has for a probability.
_LARGE = 64.0


def is_large(shift: jax.Array) -> jax.Array:
    """True where a shift by the log-sum-exp of a row says too little about its probabilities."""
    size = lax.abs(shift)
    seeing = lax.ne(size, scalar(NOTHING_SEEN, size))
    return lax.bitwise_and(lax.gt(size, scalar(_LARGE, size)), seeing)


class Statistics(NamedTuple):
    """What rows add up to over some keys; the totals are relative to the largest score.

    Where no key was met, the total is zero. `weighted` is the sum of what each weight adds to the
    loss.
    """

    largest: jax.Array
    total: jax.Array
    weighted: jax.Array

    @staticmethod
    def before(zeros: jax.Array, weighted: jax.Array | None = None) -> Statistics:
        """Those of rows that have met no key; `weighted` are zeros of another shape, if any."""
        lowest = lax.full_like(zeros, -float("inf"))
        return Statistics(lowest, zeros, zeros if weighted is None else weighted)


def exact_rows(
    rows: Rows, found: Statistics, sinks: jax.Array | None, dlse: jax.Array | None
) -> Rows:
    """The rows by what was found of them; as before where nothing was, or they are not finite."""
    largest, total, weighted = found
    shift, missing = largest, lax.eq(total, scalar(0, total))
    if sinks is not None:
        logits = _as_logits(sinks, largest)
        shift = lax.max(largest, logits)
        shrink = lax.exp(lax.sub(largest, shift))
        weighted = lax.mul(weighted, shrink)
        total = lax.add(lax.mul(total, shrink), lax.exp(lax.sub(logits, shift)))
    share = lax.div(lax.full_like(total, 1), lax.select(missing, lax.full_like(total, 1), total))
    delta = lax.mul(weighted, share)
    if dlse is not None:
        delta = lax.sub(delta, lax.convert_element_type(dlse, delta.dtype))
    finite = lax.bitwise_and(lax.is_finite(rows.shift), lax.is_finite(rows.delta))
    empty = lax.eq(rows.share, scalar(0, rows.share))
    as_before = lax.bitwise_or(lax.bitwise_or(missing, lax.bitwise_not(finite)), empty)
    exact = Rows(shift, share, delta)
    return Rows(*(lax.select(as_before, x, y) for x, y in zip(rows, exact, strict=True)))
