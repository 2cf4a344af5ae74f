"""Blocks of arrays in Triton kernels, masked only where an axis is not made of whole blocks.

Pallas takes long to import, so functions import it when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .limits import TritonBlocks


def part(first: Any, size: int, end: Any) -> tuple[Any, jax.Array | None]:
    """A slice of an axis, and which of its elements lie before `end`; None: all of them.

    `first` is taken to be a multiple of `size` where `end` is a number known while tracing.
    """
    from jax.experimental import pallas as pl

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
    from jax.experimental.pallas import triton as plgpu

    shape = None if mask is None else tuple(ref.shape)
    if mask is not None and mask.shape != shape:
        mask = jnp.broadcast_to(mask, shape)
    loaded: jax.Array = plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)
    return loaded


def store(ref: Any, block: jax.Array, mask: jax.Array | None) -> None:
    """Write a block, except where it is masked."""
    from jax.experimental.pallas import triton as plgpu

    if mask is not None and mask.shape != block.shape:
        mask = jnp.broadcast_to(mask, block.shape)
    plgpu.store(ref, block.astype(ref.dtype), mask=mask)


def products(
    left: Callable[[Any], Any],
    rights: Sequence[Callable[[Any], Any]],
    masks: tuple[jax.Array | None, jax.Array | None],
    depth: int,
    blocks: TritonBlocks,
    *,
    steps: Any = None,
    transposed: bool = False,
    precision: Any = None,
) -> Sequence[jax.Array]:
    """A block of each product of what is on the left with something on the right, in float32.

    Args:
      left: `left(part)` is where a part of the axis that is summed over is read.
      rights: the same for the other sides.
      masks: of the rows on the left, and of the columns on the right.
      depth: the size of the axis that is summed over, `block_k` elements at a time.
      steps: how often, if not for the whole axis.
      transposed: whether the columns on the right come before that axis.
    """
    from jax.experimental.pallas import triton as plgpu

    rows, columns = masks

    def add(step: Any, sums: Sequence[jax.Array]) -> Sequence[jax.Array]:
        inner, there = part(step * blocks.block_k, blocks.block_k, depth)
        block = load(left(inner), joint(rows, there))
        mask = joint(columns, there) if transposed else joint(there, columns)
        others = [load(right(inner), mask) for right in rights]
        more = [plgpu.dot(block, o, trans_b=transposed, precision=precision) for o in others]
        return [total + product for total, product in zip(sums, more, strict=True)]

    zeros = [jnp.zeros((blocks.block_m, blocks.block_n), jnp.float32)] * len(rights)
    steps = -(-depth // blocks.block_k) if steps is None else steps
    first = 0 if isinstance(steps, int) else jnp.int32(0)
    sums: Sequence[jax.Array] = lax.fori_loop(first, steps, add, zeros)
    return sums


def compiler_params(blocks: TritonBlocks) -> Any:
    """How a kernel is launched with a config."""
    from jax.experimental.pallas import triton as plgpu

    return plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages)


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
