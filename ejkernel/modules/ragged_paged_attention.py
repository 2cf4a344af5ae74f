"""`ragged_paged_attention`: prompts and decoding tokens of many sequences, over pages."""

from __future__ import annotations

import jax

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.paged_attention import RaggedPagedAttention, RaggedPagedAttentionConfig
from ejkernel.kernels.paged_attention.arguments import checked_ragged

_kernel = RaggedPagedAttention()


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    query_starts: jax.Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str | None = None,
    cfg: RaggedPagedAttentionConfig | None = None,
) -> jax.Array:
    """Attention of the new tokens of many sequences, each with any number of them.

    Whole prompts, parts of prompts and single decoding tokens go into one call: the new tokens of
    all sequences are packed, and their keys and values are in the pages already (`update_pages`
    puts them there). Accumulation is in float32, in float64 for float64.

    Args:
      q: queries, `(tokens, heads, head_dim)`: those of sequence `s` are the rows
        `query_starts[s] … query_starts[s + 1]`.
      k_pages: keys, `(pages, page_size, kv_heads, head_dim)`; `heads` must be a multiple of
        `kv_heads`. A floating type, int8, float8_e4m3fn or float8_e5m2.
      v_pages: values, `(pages, page_size, kv_heads, value_dim)`.
      page_table: the pages of each sequence in their order, integers,
        `(sequences, pages_per_sequence)`. Entries beyond a sequence's length are not looked at.
        Where the values are known (outside of `jit`) one that is out of range is an error; inside,
        it is clamped into the range, so that no foreign memory is read.
      lengths: tokens of each sequence, the new ones included, integers, `(sequences,)`. The new
        ones are the last: with `n` of them, row `query_starts[s] + i` has the position
        `lengths[s] - n + i`.
      query_starts: integers, `(sequences + 1,)`, rising. A sequence may have no new tokens. Rows
        from the last on belong to nobody and give zeros, so that the number of rows can stay the
        same from step to step.
      softmax_scale: factor on the scores; default `head_dim ** -0.5`.
      causal: whether a query sees only positions up to its own; if not, all of its sequence.
      window: query `i` sees no keys before `i - window`; default: all.
      logits_soft_cap: `c` makes scores `c · tanh(score / c)`.
      sinks: `(heads,)`, one more logit per head that takes part in the denominator only.
      k_scale: what keys are multiplied by when they are read: for each head `(kv_heads,)`, page and
        head `(pages, kv_heads)`, or token and head `(pages, page_size, kv_heads)`.
      v_scale: the same for the values.
      implementation: request one by name, such as `"xla"`; raises if that does not support it.
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

    Returns:
      `(tokens, heads, value_dim)`, of `q`'s dtype. Zeros where there is no key to see.

    >>> import jax, jax.numpy as jnp
    >>> q = jax.random.normal(jax.random.key(0), (8, 8, 32))  # 5 and 1 new tokens; 2 are unused
    >>> k_pages, v_pages = jax.random.normal(jax.random.key(1), (2, 10, 16, 4, 32))
    >>> page_table = jnp.array([[7, 1, 4], [2, 0, 0]])
    >>> lengths, query_starts = jnp.array([40, 9]), jnp.array([0, 5, 6])
    >>> out = ragged_paged_attention(q, k_pages, v_pages, page_table, lengths, query_starts)
    >>> out.shape, bool(out[6:].any())
    ((8, 8, 32), False)
    """
    arrays, options = checked_ragged(
        *(q, k_pages, v_pages, page_table, lengths, query_starts),
        softmax_scale=softmax_scale,
        causal=causal,
        window=window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return _kernel(
        *arrays, **options, **given_options("ragged_paged_attention", implementation, cfg)
    )
