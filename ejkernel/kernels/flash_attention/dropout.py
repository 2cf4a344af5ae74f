r"""Which weights are dropped: a hash of the key and of the weight's own coordinates.

Nothing depends on how the work is cut into blocks, on the device or on the implementation: the same
key drops the same weights everywhere, forward and backward, without a mask in memory.

The key's words and the coordinates of a row (batch entry, head, query) are taken up one after the
other into a state of 64 bits, two numbers of 32 bits, by steps each of which can be undone. With
:math:`h` a mixing function ("lowbias32") and all arithmetic modulo :math:`2^{32}`:

.. math::
    a \leftarrow h(a \oplus \text{word}), \qquad
    b \leftarrow h(b + a), \qquad
    a \leftarrow a \oplus b .

A weight is kept if :math:`h_b(a + j) \ge \lfloor 2^{32} \, \text{rate} \rfloor`, with :math:`j` the
key's position and :math:`h_b` the same function with :math:`b` taken up halfway: per weight it is
one operation more than a hash of :math:`a` alone, and two rows have the same mask only if both
numbers are the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
    first, second = jnp.uint32(0), jnp.uint32(0x9E3779B9)
    words = [key[i] for i in range(key.shape[0])]
    *row, kv = (jnp.asarray(x).astype(jnp.uint32) for x in (batch, head, query, kv))
    for word in (*words, *row):
        first = _mix(first ^ word)
        second = _mix(second + first)
        first = first ^ second
    keep: jax.Array = _mix(first + kv, second) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))
    return keep


def _mix(x: jax.Array, halfway: jax.Array | None = None) -> jax.Array:
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    if halfway is not None:
        x = x ^ halfway
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return jnp.bitwise_xor(x, x >> jnp.uint32(16))
