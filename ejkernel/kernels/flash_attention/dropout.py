r"""Which weights are dropped: a hash of the key and of the weight's own coordinates.

Nothing depends on how the work is cut into blocks, on the device or on the implementation: the same
key drops the same weights everywhere, forward and backward, without a mask in memory.

With :math:`h` a mixing function of 32 bits ("lowbias32"), and all arithmetic modulo :math:`2^{32}`:

.. math::
    r = h(h(h(\text{words of the key}) + b) + \text{head}) + i, \qquad
    \text{keep}_{bhij} \iff h(h(r) + j) \ge \lfloor 2^{32} \, \text{rate} \rfloor .
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def keep_mask(
    rate: float,
    key: jax.Array,
    batch: jax.Array,
    head: jax.Array,
    query: jax.Array,
    kv: jax.Array,
) -> jax.Array:
    """True where a weight stays.

    Args:
      rate: share of the weights to drop, at least 0 and below 1.
      key: the words of a random key, `uint32`, one-dimensional.
      batch, head, query, kv: coordinates, integers, of shapes that broadcast against each other.

    >>> import jax.numpy as jnp
    >>> at = jnp.arange(1000)
    >>> keep = keep_mask(0.25, jnp.array([1, 2], jnp.uint32), 0, 0, 0, at)
    >>> 700 < int(keep.sum()) < 800
    True
    """
    state = jnp.uint32(0)
    for word in range(key.shape[0]):
        state = _mix(state + key[word])
    for coordinate in (batch, head, query, kv):
        state = _mix(state + jnp.asarray(coordinate).astype(jnp.uint32))
    keep: jax.Array = state >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))
    return keep


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ lax.shift_right_logical(x, jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ lax.shift_right_logical(x, jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ lax.shift_right_logical(x, jnp.uint32(16))
