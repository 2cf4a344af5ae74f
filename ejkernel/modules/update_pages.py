"""`update_pages`: new tokens into the pages that attention reads."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.paged_attention.update import checked_update, slots_of, update


def update_pages(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    query_starts: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[Any, ...]:
    """The pages with the new tokens where `ragged_paged_attention` reads them.

    In a `jit` that the pages are donated to, they are updated in place. Nothing else is touched:
    not the other slots, and nothing for rows that belong to no sequence or whose page does not
    exist. Two sequences must not have new tokens in the same page.

    Args:
      k_pages: keys, `(pages, page_size, kv_heads, head_dim)`: of a floating type, int8,
        float8_e4m3fn or float8_e5m2.
      v_pages: values, `(pages, page_size, kv_heads, value_dim)`.
      k: new keys, `(tokens, kv_heads, head_dim)`, packed as the queries are.
      v: new values, `(tokens, kv_heads, value_dim)`.
      page_table: as in `ragged_paged_attention`.
      lengths: as there: of each sequence, its new tokens included.
      query_starts: as there.
      k_scale: for keys of int8 or float8. With a scale per token and head,
        `(pages, page_size, kv_heads)`, each new token's is what makes its largest number fit, and
        is written with it. Scales per head, or per page and head, are the user's: numbers that they
        do not fit are clipped.
      v_scale: the same for the values.

    Returns:
      `(k_pages, v_pages)`; `(k_pages, v_pages, k_scale, v_scale)` if a scale is given.

    >>> import jax, jax.numpy as jnp
    >>> k_pages = v_pages = jnp.zeros((10, 16, 4, 32))
    >>> k = v = jnp.ones((6, 4, 32))  # 5 and 1 new tokens
    >>> page_table = jnp.array([[7, 1, 4], [2, 0, 0]])
    >>> lengths, query_starts = jnp.array([40, 9]), jnp.array([0, 5, 6])
    >>> k_pages, _ = update_pages(k_pages, v_pages, k, v, page_table, lengths, query_starts)
    >>> k_pages[4, :, 0, 0].nonzero()[0].tolist(), k_pages[2, :, 0, 0].nonzero()[0].tolist()
    ([3, 4, 5, 6, 7], [8])
    """
    given = (k_pages, v_pages, k, v, page_table, lengths, query_starts, k_scale, v_scale)
    k_pages, v_pages, k, v, *where, k_scale, v_scale = checked_update(*given)
    slots = slots_of(k.shape[0], k_pages, *where)
    k_pages, k_scale = update(k_pages, k, k_scale, slots)
    v_pages, v_scale = update(v_pages, v, v_scale, slots)
    if k_scale is None and v_scale is None:
        return k_pages, v_pages
    return k_pages, v_pages, k_scale, v_scale
