"""`grouped_matmul`: every row times the matrix of its group, as in a mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.grouped_matmul import GroupedMatmul, GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.arguments import Arguments, checked, checked_existing_out

_kernel = GroupedMatmul()


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    precision: str | jax.lax.Precision | None = None,
    group_offset: jax.Array | int | None = None,
    existing_out: jax.Array | None = None,
    implementation: str | None = None,
    cfg: GroupedMatmulConfig | None = None,
) -> jax.Array:
    r"""Multiply the rows of each group by the group's own matrix.

    The rows of `lhs` are sorted by group: the first `group_sizes[0]` rows are multiplied by
    `rhs[0]`, the next `group_sizes[1]` by `rhs[1]`, and so on. Groups may be empty. Rows beyond
    the sum of the sizes give zeros and have zero gradients. Differentiable in `lhs` and `rhs` (and
    `existing_out`).

    Args:
      lhs: rows, `(m, k)`.
      rhs: a matrix per group, `(groups, k, n)`; `(groups, n, k)` with `transpose_rhs`. Of the same
        dtype as `lhs`.
      group_sizes: rows of each group, `(groups,)`, integers. Sizes that are known (not traced) are
        checked: a negative one, or a sum of more than `m`, is a `ValueError`. Inside `jit` they
        cannot be: there a negative size counts as 0, and what reaches beyond row `m` is cut off.
      transpose_rhs: use each matrix transposed.
      preferred_element_type: dtype of the result; by default that of the inputs. Sums are in
        float32 (float64 for float64) in any case.
      precision: of the products, as in `jax.lax.dot`: `"default"`, `"high"`, `"highest"`.
      group_offset: the group that `rhs[0]` belongs to, where `rhs` holds only some of the groups
        (experts spread over devices). `group_sizes` then lists all groups, and rows of groups
        without a matrix here give zeros, so the shards' results add up. At most the number of
        groups that are elsewhere; a larger one is a `ValueError`, or inside `jit` cut to that.
      existing_out: `(m, n)`; rows without a matrix take it instead of zeros.
      implementation: one by name (`"xla"`, `"pallas"`, `"triton"`); by default the device's best.
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

    Returns:
      `(m, n)`.

    >>> import jax, jax.numpy as jnp
    >>> tokens, experts = jnp.ones((6, 8)), jnp.ones((3, 8, 4))
    >>> grouped_matmul(tokens, experts, jnp.array([2, 0, 3])).sum(axis=1).tolist()
    [32.0, 32.0, 32.0, 32.0, 32.0, 0.0]
    """
    arrays, options = checked(
        lhs, rhs, group_sizes, transpose_rhs, preferred_element_type, precision, group_offset
    )
    options_of_call = given_options("grouped_matmul", implementation, cfg)
    if existing_out is None:
        return _kernel(*arrays, **options, **options_of_call)
    call = Arguments.of(*arrays, **options)
    m, n, _ = call.sizes
    existing_out = checked_existing_out(existing_out, (m, n))  # before anything is computed
    out = _kernel(*arrays, **options, **options_of_call)
    starts, ends = call.spans
    row = jnp.arange(m, dtype=starts.dtype)[:, None]
    has_matrix = (row >= starts[0]) & (row < ends[-1])
    return jnp.where(has_matrix, out, existing_out.astype(out.dtype))
