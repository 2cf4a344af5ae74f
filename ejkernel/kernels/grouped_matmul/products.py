"""What the implementations share: how a call and its gradients are made of two kinds of product.

The gradient of `lhs` is the grouped product of `dout` with the same matrices, transposed; that of a
matrix is the product of a group's rows with its rows of `dout`. A config has one field for each of
the three, in this order: the result, the gradient of `lhs`, the gradient of `rhs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np

from ejkernel.ops import Implementation, Invocation

from ..implementations import implementation_of
from ..sizes import next_power_of_two
from .arguments import Arguments

Config = TypeVar("Config")


def implementation(
    times_matrices: Callable[[Arguments, Any], jax.Array],
    matrix_gradients: Callable[[Arguments, jax.Array, Any], jax.Array],
    *,
    narrow: bool,
    **about: Any,
) -> Implementation[Any, jax.Array]:
    """The implementation that the two kinds of product make.

    Args:
      times_matrices: of arguments and blocks: every row times the matrix of its group.
      matrix_gradients: of arguments, the gradient of the result, and blocks.
      narrow: both sides of a product must have one dtype, as matrix units want it: where the
        result is wider than the inputs, its gradient is cast to theirs.
      about: the other fields of the `Implementation`, such as its name.
    """

    def blocks_of(cfg: Any) -> list[Any]:
        return [getattr(cfg, field.name) for field in dataclasses.fields(cfg)]

    def run(call: Arguments, cfg: Any, save: bool) -> tuple[jax.Array, None]:
        return times_matrices(call, blocks_of(cfg)[0]), None

    def backward(call: Arguments, cfg: Any, residuals: None, dout: jax.Array) -> tuple[Any, ...]:
        _, dlhs_blocks, drhs_blocks = blocks_of(cfg)
        dout = dout.astype(call.lhs.dtype) if narrow else dout
        dlhs = times_matrices(call.for_dlhs(dout), dlhs_blocks)
        return dlhs, matrix_gradients(call, dout, drhs_blocks), None

    return implementation_of(Arguments.of, run, backward, **about)


def one_at_a_time(base: Config, blocks: Iterable[Any]) -> list[Config]:
    """All blocks for each product; they share nothing, so one varies while the others stay."""
    names = [field.name for field in dataclasses.fields(base)]  # type: ignore[arg-type]
    listed = list(blocks)
    return [dataclasses.replace(base, **{name: b}) for name in names for b in listed]  # type: ignore[type-var]


def rows_for(inv: Invocation[Any, Any], *, smallest: int, largest: int) -> int:
    """The power of two that holds a group of average size, within limits."""
    lhs, _, group_sizes = inv.args
    average = max(1, lhs.shape[0] // group_sizes.shape[0])
    return min(largest, max(smallest, next_power_of_two(average)))


def no_float64_result(inv: Invocation[Any, Any]) -> str | None:
    """A preferred_element_type of at most 32 bits."""
    preferred = inv.kwargs.get("preferred_element_type")
    if preferred is not None and np.dtype(preferred).itemsize > 4:
        return f"preferred_element_type={preferred} is not supported: sums are in float32"
    return None
