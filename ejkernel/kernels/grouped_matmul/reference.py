"""The grouped matrix product written the obvious way."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype
from .groups import row_spans, rows_of_groups


def grouped_matmul_reference(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    r"""Multiply every row by every matrix, and keep the product with its group's one.

    The rows of ``lhs`` are sorted by group: the first :math:`s_0` belong to group 0, the next
    :math:`s_1` to group 1, and so on. With :math:`o` the group offset and :math:`g(i)` the group of
    row :math:`i`:

    .. math::
        \mathrm{out}_i = \mathrm{lhs}_i \; \mathrm{rhs}_{g(i) - o}, \qquad
        \mathrm{out}_i = 0 \;\text{ if there is no such matrix.}

    Args:
        lhs: Rows, ``(m, k)``.
        rhs: Matrices, ``(groups, k, n)``, or ``(groups, n, k)`` with ``transpose_rhs``.
        group_sizes: Rows of each group, ``(all groups,)``.
        transpose_rhs: If true, the matrices are used transposed.
        preferred_element_type: Dtype of the result; that of the inputs if not given.
        precision: Not used here: the reference is as exact as float32 (or float64) is.
        group_offset: The group of ``rhs[0]``; 0 if not given.

    Returns:
        ``(m, n)``.

    Example:
        >>> import jax.numpy as jnp
        >>> lhs, rhs = jnp.ones((4, 1)), jnp.array([[[1.0]], [[10.0]]])
        >>> grouped_matmul_reference(lhs, rhs, jnp.array([2, 1])).ravel().tolist()
        [1.0, 1.0, 10.0, 0.0]
    """
    del precision
    dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    wide = accumulation_dtype(dtype)
    products = jnp.einsum(
        "mk,gnk->mgn" if transpose_rhs else "mk,gkn->mgn",
        lhs.astype(wide),
        rhs.astype(wide),
        precision=jax.lax.Precision.HIGHEST,
    )
    spans = row_spans(group_sizes, lhs.shape[0], rhs.shape[0], group_offset)
    mine = rows_of_groups(spans, lhs.shape[0])[:, :, None]
    return jnp.sum(jnp.where(mine, products, 0), axis=1).astype(dtype)
