"""The grouped matrix product written the obvious way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype
from .arguments import Arguments
from .groups import rows_of_groups


def grouped_matmul_reference(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **options: Any
) -> jax.Array:
    r"""Multiply every row by every matrix, and keep the product with its group's one.

    The rows of ``lhs`` are sorted by group: the first :math:`s_0` belong to group 0, the next
    :math:`s_1` to group 1, and so on. With :math:`o` the group offset and :math:`g(i)` the group of
    row :math:`i`:

    .. math::
        \mathrm{out}_i = \mathrm{lhs}_i \; \mathrm{rhs}_{g(i) - o}, \qquad
        \mathrm{out}_i = 0 \;\text{ if there is no such matrix.}

    Arguments are those of :class:`.kernel.GroupedMatmul`. ``precision`` is not used: this is as
    exact as float32 (or float64) is.

    >>> lhs, rhs = jnp.ones((4, 1)), jnp.array([[[1.0]], [[10.0]]])
    >>> grouped_matmul_reference(lhs, rhs, jnp.array([2, 1])).ravel().tolist()
    [1.0, 1.0, 10.0, 0.0]
    """
    call = Arguments.of(lhs, rhs, group_sizes, **options)
    wide = accumulation_dtype(call.dtype)
    axes = "mk,gnk->mgn" if call.transpose_rhs else "mk,gkn->mgn"
    products = jnp.einsum(axes, lhs.astype(wide), rhs.astype(wide), precision="highest")
    mine = rows_of_groups(call.spans, lhs.shape[0])[:, :, None]
    return jnp.sum(jnp.where(mine, products, 0), axis=1).astype(call.dtype)
