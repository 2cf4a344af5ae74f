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

from ejkernel.ops import Invocation, Limit

from .arguments import Arguments

Config = TypeVar("Config")
BLOCKS = ("block_m", "block_n", "block_k")
PRODUCTS = ("forward", "dlhs", "drhs")


def passes_of(
    times_matrices: Callable[[Arguments, Any], jax.Array],
    matrix_gradients: Callable[[Arguments, jax.Array, Any], jax.Array],
    *,
    narrow: bool,
) -> tuple[Callable[..., jax.Array], Callable[..., Any], Callable[..., Any]]:
    """`forward`, `forward_with_residuals` and `backward`, made of the two kinds of product.

    Args:
      times_matrices: of arguments and blocks: every row times the matrix of its group.
      matrix_gradients: of arguments, the gradient of the result, and blocks.
      narrow: both sides of a product must have one dtype, as matrix units want it: where the
        result is wider than the inputs, its gradient is cast to theirs.
    """

    def forward(*args: jax.Array, cfg: Any, **options: Any) -> jax.Array:
        return times_matrices(Arguments.of(*args, **options), _blocks_of(cfg)[0])

    def forward_with_residuals(
        *args: jax.Array, cfg: Any, **options: Any
    ) -> tuple[jax.Array, None]:
        return forward(*args, cfg=cfg, **options), None

    def backward(
        residuals: None, out: None, dout: jax.Array, *args: jax.Array, cfg: Any, **options: Any
    ) -> tuple[jax.Array, jax.Array, None]:
        call = Arguments.of(*args, **options)
        _, dlhs_blocks, drhs_blocks = _blocks_of(cfg)
        dout = dout.astype(call.lhs.dtype) if narrow else dout
        dlhs = times_matrices(call.for_dlhs(dout), dlhs_blocks)
        return dlhs, matrix_gradients(call, dout, drhs_blocks), None

    return forward, forward_with_residuals, backward


def one_at_a_time(base: Config, blocks: Iterable[Any]) -> list[Config]:
    """All blocks for each product; they share nothing, so one varies while the others stay."""
    names = [field.name for field in dataclasses.fields(base)]  # type: ignore[arg-type]
    listed = list(blocks)
    return [dataclasses.replace(base, **{name: b}) for name in names for b in listed]  # type: ignore[type-var]


def for_all_products(limits: dict[str, Limit]) -> dict[str, Limit]:
    """Limits of the fields of blocks, for the three blocks of a config."""
    return {f"{p}.{name}": limit for p in PRODUCTS for name, limit in limits.items()}


def rows_for(inv: Invocation[Any, Any], *, smallest: int, largest: int) -> int:
    """The power of two that holds a group of average size, within limits."""
    lhs, _, group_sizes = inv.args
    average = max(1, lhs.shape[0] // group_sizes.shape[0])
    return min(largest, max(smallest, power_of_two_from(average)))


def power_of_two_from(size: int) -> int:
    """The smallest power of two that is at least as large."""
    return 1 << (size - 1).bit_length()


def no_float64_result(inv: Invocation[Any, Any]) -> str | None:
    """A preferred_element_type of at most 32 bits."""
    preferred = inv.kwargs.get("preferred_element_type")
    if preferred is not None and np.dtype(preferred).itemsize > 4:
        return f"preferred_element_type={preferred} is not supported: sums are kept in float32"
    return None


def _blocks_of(cfg: Any) -> list[Any]:
    return [getattr(cfg, field.name) for field in dataclasses.fields(cfg)]
