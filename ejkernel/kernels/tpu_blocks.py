"""Blocks of arrays in TPU kernels, and the sums that a grid adds up in scratch memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def keep(mask: jax.Array, block: jax.Array) -> jax.Array:
    """The block, with zeros where the mask is false.

    Masks have the layout of 32-bit arrays; older TPUs cannot select narrower ones with them.
    """
    return jnp.where(mask, block.astype(jnp.float32), 0.0).astype(block.dtype)


def keep_inside(block: jax.Array, axis: int, step: Any, size: int) -> jax.Array:
    """The block of a step along an axis, with zeros behind the end of its array.

    What a block holds beyond its array is undefined.
    """
    length = block.shape[axis]
    if size % length == 0:
        return block
    return keep(lax.broadcasted_iota(jnp.int32, block.shape, axis) < size - step * length, block)


def clear(is_first: Any, *sums: Any) -> None:
    """Set sums to zero in the first step that adds to them."""
    from jax.experimental import pallas as pl

    @pl.when(is_first)
    def _() -> None:
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)
