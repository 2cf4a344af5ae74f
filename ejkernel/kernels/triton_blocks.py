"""Blocks of arrays in Triton kernels, masked only where an axis is not made of whole blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def part(first: Any, size: int, end: Any) -> tuple[Any, jax.Array | None]:
    """A slice of an axis, and which of its elements lie before `end`; None: all of them.

    `first` is taken to be a multiple of `size` where `end` is a number known while tracing.
    """
    piece = pl.ds(first, size)
    if isinstance(end, int) and end % size == 0:
        return piece, None
    return piece, first + jnp.arange(size) < end


def joint(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """The mask of a block from those of its rows and columns."""
    if rows is None:
        return None if columns is None else columns[None, :]
    return rows[:, None] if columns is None else rows[:, None] & columns[None, :]


def load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """A block, with zeros where it is masked."""
    shape = None if mask is None else tuple(ref.shape)
    if mask is not None and mask.shape != shape:
        mask = jnp.broadcast_to(mask, shape)
    loaded: jax.Array = plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)
    return loaded


def store(ref: Any, block: jax.Array, mask: jax.Array | None) -> None:
    """Write a block, except where it is masked."""
    if mask is not None and mask.shape != block.shape:
        mask = jnp.broadcast_to(mask, block.shape)
    plgpu.store(ref, block.astype(ref.dtype), mask=mask)


def erf(x: jax.Array) -> jax.Array:
    """The error function, made of what Pallas lowers to Triton.

    Abramowitz and Stegun, 7.1.26: its largest error, 1.5e-7, is about that of a float32.
    """
    z = jnp.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = 0.254829592 + t * (
        -0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))
    )
    result: jax.Array = jnp.where(x < 0, -1.0, 1.0) * (1.0 - t * series * jnp.exp(-z * z))
    return result
