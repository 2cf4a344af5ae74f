"""`paged_attention`: decoding with keys and values in pages."""

from __future__ import annotations

import jax

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.paged_attention import PagedAttention, PagedAttentionConfig
from ejkernel.kernels.paged_attention.arguments import checked

_kernel = PagedAttention()


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
    cfg: PagedAttentionConfig | None = None,
) -> jax.Array:
    """Attention of the last tokens of each sequence, with keys and values in pages.

    Only pages in use are read. Accumulation is in float32 whatever the input's dtype (in float64
    for float64).

    Args:
      q: queries, `(batch, heads, head_dim)` for one token per sequence, or
        `(batch, tokens, heads, head_dim)` for the last few, which see one another causally.
      k_pages: keys, `(pages, page_size, kv_heads, head_dim)`; `heads` must be a multiple of
        `kv_heads`. Those of the queries' tokens are in it already.
      v_pages: values, `(pages, page_size, kv_heads, value_dim)`.
      page_table: the pages of each sequence in their order, integers,
        `(batch, pages_per_sequence)`. Entries beyond a sequence's length are not looked at. Where
        the values are known (outside of `jit`) one that is out of range is an error; inside, it is
        clamped into the range, so that no foreign memory is read.
      lengths: tokens of each sequence, those of `q` included, integers, `(batch,)`; clamped to
        what the table can hold.
      softmax_scale: factor on the scores; default `head_dim ** -0.5`.
      window: query `i` sees the keys `i - window … i`; default: all before it.
      logits_soft_cap: `c` makes scores `c · tanh(score / c)`.
      sinks: `(heads,)`, one more logit per head that takes part in the denominator only.
      implementation: request one by name, such as `"xla"`; raises if that does not support it.
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

    Returns:
      Of `q`'s shape with `value_dim` in the last axis, and of its dtype. Zeros where there is no
      key to see, as in a sequence of length 0.

    >>> import jax, jax.numpy as jnp
    >>> q = jax.random.normal(jax.random.key(0), (2, 8, 32))
    >>> k_pages, v_pages = jax.random.normal(jax.random.key(1), (2, 10, 16, 4, 32))
    >>> page_table = jnp.array([[7, 1, 4], [2, 0, 0]])  # the second sequence has one page
    >>> paged_attention(q, k_pages, v_pages, page_table, jnp.array([40, 9])).shape
    (2, 8, 32)
    """
    arrays, options = checked(
        *(q, k_pages, v_pages, page_table, lengths),
        softmax_scale=softmax_scale,
        window=window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
    )
    options |= given_options("paged_attention", implementation, cfg)
    if arrays[0].ndim == 4:
        return _kernel(*arrays, **options)
    return _kernel(arrays[0][:, None], *arrays[1:], **options)[:, 0]
