"""`flash_attention`: exact attention in linear memory."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.flash_attention import FlashAttention, FlashAttentionConfig
from ejkernel.kernels.flash_attention.arguments import checked

_kernel = FlashAttention()


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_lse: bool = False,
    sequence_axis: str | None = None,
    implementation: str | None = None,
    cfg: FlashAttentionConfig | None = None,
) -> Any:  # an array, or with return_lse a pair: overloads would say it twice over
    r"""Attention, `softmax(scale · q kᵀ) v`, without the score matrix in memory.

    Differentiable in `q`, `k`, `v`, `bias` and `sinks`; memory is linear in the sequence length in
    both directions. Sequences may have any length. Arithmetic is in float32 (in float64 where `q`
    is). What a query does not see is skipped block by block, not computed and hidden. A query that
    sees no key at all gives zeros, and its gradients are zero.

    Args:
      q: queries, `(batch, q_len, heads, head_dim)`.
      k: keys, `(batch, kv_len, kv_heads, head_dim)`; `heads` must be a multiple of `kv_heads`.
      v: values, `(batch, kv_len, kv_heads, value_dim)`.
      causal: query `i` attends to keys `0 … i` only, as in `jax.nn.dot_product_attention`.
      softmax_scale: factor on the scores; default `head_dim ** -0.5`.
      bias: added to the scores; must broadcast to `(batch, heads, q_len, kv_len)`.
      mask: True where a query sees a key; of the same shapes.
      segment_ids: `(batch, q_len)` integers: a query sees only keys of its own segment, as in
        packed sequences. Skips the most if the segments are in order.
      kv_segment_ids: `(batch, kv_len)`, the segments of the keys; default: `segment_ids`.
      window: query `i` sees the keys from `i - w` to `i + w` (with `causal` to `i`); or
        `(left, right)`, where None is a side without limit.
      logits_soft_cap: `c` bends the scaled scores `s` to `c · tanh(s / c)`, before bias and mask.
      sinks: `(heads,)`, one more logit for each head's softmax, without a value.
      q_lengths: `(batch,)`, how many queries of each sequence are real; the others see nothing.
      kv_lengths: `(batch,)`, how many keys of each sequence are real.
      dropout_rate: share of the weights that are set to zero; the others grow by `1 / (1 - rate)`.
      dropout_key: random key that chooses them. The same key drops the same weights, whatever the
        blocks, the implementation and the sharding of the sequence.
      return_lse: also return the logarithm of the softmax's denominator.
      sequence_axis: inside `jax.shard_map`, the mesh axis over which the sequence is shared out, in
        order and in equal parts: ring attention. Positions are those of the whole sequence, lengths
        too; `bias` and `mask` have the local queries and all keys.
      implementation: request one (`"cpu"`, `"xla"`, `"pallas"`, `"triton"`); by default the best
        that supports the call.
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

    Returns:
      `(batch, q_len, heads, value_dim)`, of `q`'s dtype; with `return_lse` also the `(batch, heads,
      q_len)` log-sum-exp, in the dtype of the arithmetic, `-inf` for a query that sees no key.

    >>> import jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
    >>> flash_attention(q, k, v, causal=True).shape
    (2, 100, 4, 32)
    >>> out, lse = flash_attention(q, k, v, causal=True, window=16, return_lse=True)
    >>> lse.shape
    (2, 4, 100)
    """
    arrays, options = checked(q, k, v, given=locals())
    options |= given_options("flash_attention", implementation, cfg)
    return _kernel(*arrays, **options)
