"""Numbers that are not finite stay with those who see them.

A product with a weight of zero is NaN if the other factor is NaN or infinite. So what a query does
not see, such as padding that was never written, has to be zero before it meets weights. A value
with a number that is not finite is zero there, and its key is NaN where scores are computed: those
who see it get NaN, as they should, and hiding a score hides that as well.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .options import Options


def may_hide(options: Options) -> bool:
    """True if there may be a query that does not see all keys."""
    return options.hides_anywhere or options.bias is not None or options.band[1] is not None


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
