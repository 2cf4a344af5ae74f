"""The grouped product as users of JAX write it: what the tuner shows the gain over."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot`; `NotImplementedError` for an offset, which it does not implement.

    >>> import jax.numpy as jnp
    >>> lhs, rhs = jnp.ones((3, 1)), jnp.array([[[1.0]], [[10.0]]])
    >>> ragged_dot(lhs, rhs, jnp.array([2, 1])).ravel().tolist()
    [1.0, 1.0, 10.0]
    """
    if group_offset is not None:
        raise NotImplementedError("jax.lax.ragged_dot has no group_offset")
    dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    return jax.lax.ragged_dot(
        lhs,
        jnp.swapaxes(rhs, 1, 2) if transpose_rhs else rhs,
        group_sizes,
        precision=precision,
        preferred_element_type=dtype,
    )
