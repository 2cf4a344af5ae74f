"""Single numbers: indices that may be known while tracing or not, and constants beside arrays.

Written with `jax.lax`, as everything that an attention is traced of: see `xla/layout.py`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

Index: TypeAlias = int | jax.Array


def times(index: Index, size: int) -> Index:
    """Their product."""
    if isinstance(index, int):
        return index * size
    return index if size == 1 else lax.mul(index, np.int32(size))


def plus(index: Index, other: Index) -> Index:
    """Their sum."""
    if isinstance(index, int) and isinstance(other, int):
        return index + other
    if isinstance(other, int) and other == 0:
        return index
    return lax.add(int32(index), int32(other))


def minus(index: Index) -> Index:
    """The number with the other sign."""
    return -index if isinstance(index, int) else lax.neg(index)


def clamp(low: int, index: Index, high: int) -> Index:
    """The number, or the bound it is beyond."""
    if isinstance(index, int):
        return min(max(low, index), high)
    return lax.clamp(np.int32(low), index, np.int32(high))


def quotient(index: Index, size: int) -> Index:
    """How many whole blocks fit into `index >= 0`."""
    return index // size if isinstance(index, int) else lax.div(index, np.int32(size))


def smaller(index: Index, other: Index) -> Index:
    """The smaller of two."""
    if isinstance(index, int) and isinstance(other, int):
        return min(index, other)
    return lax.min(int32(index), int32(other))


def larger(index: Index, other: Index) -> Index:
    """The larger of two."""
    if isinstance(index, int) and isinstance(other, int):
        return max(index, other)
    return lax.max(int32(index), int32(other))


def int32(index: Index) -> Any:
    """The number as an operand of `lax`."""
    return np.int32(index) if isinstance(index, int) else index


def ceil_div(a: int, b: int) -> int:
    """How many blocks of `b` cover `a`."""
    return -(-a // b)


def scalar(value: float, like: jax.Array) -> Any:
    """The number as an operand of `lax`, beside an array of float32 or float64."""
    return like.dtype.type(value)


# Up to here the rounding of a capped score is below that of its exponential.
_USUAL_CAP = 256.0


def times_cap(bent: jax.Array, cap: float) -> jax.Array:
    """Scores between -1 and 1 times a soft cap, rounded as a number of their own.

    A compiler may fuse a product with what is then subtracted, in one pass and not in the other:
    of a cap of 10,000 that is a digit behind the point. No product is fused through a maximum.
    """
    capped = lax.mul(bent, scalar(cap, bent))
    return capped if cap <= _USUAL_CAP else lax.max(capped, scalar(-cap, bent))
