"""Single numbers: indices that may be known while tracing or not, and constants for arrays.

Written with `jax.lax`, as everything that an attention is traced of: see `xla/layout.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

Index: TypeAlias = int | jax.Array


def int32(index: Index) -> Any:
    """The number as an operand of `lax`."""
    return np.int32(index) if isinstance(index, int) else index


def _either(known: Callable[..., int], traced: Callable[..., jax.Array]) -> Callable[..., Index]:
    """A function of indices: of Python's, or in `lax` if any of them is traced."""

    def run(*indices: Index) -> Index:
        if all(isinstance(index, int) for index in indices):
            return known(*indices)
        return traced(*map(int32, indices))

    return run


minus = _either(operator.neg, lax.neg)
smaller = _either(min, lax.min)
larger = _either(max, lax.max)
quotient = _either(operator.floordiv, lax.div)  # how many whole blocks fit into `index >= 0`
clamp = _either(lambda low, index, high: min(max(low, index), high), lax.clamp)
_sum = _either(operator.add, lax.add)
_product = _either(operator.mul, lax.mul)


def times(index: Index, size: int) -> Index:
    """Their product."""
    return index if size == 1 else _product(index, size)


def plus(index: Index, other: Index) -> Index:
    """Their sum."""
    return index if isinstance(other, int) and other == 0 else _sum(index, other)


def ceil_div(a: int, b: int) -> int:
    """How many blocks of `b` cover `a`."""
    return -(-a // b)


def scalar(value: float, like: jax.Array) -> Any:
    """The number as an operand of `lax`, for an array of float32 or float64."""
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
