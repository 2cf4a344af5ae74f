"""`flash_attention`: exact attention in linear memory."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.arguments import (
    checked_flag,
    checked_number,
    checked_soft_cap,
    given_options,
)
from ejkernel.kernels.flash_attention import FlashAttention, FlashAttentionConfig, arguments

_kernel = FlashAttention()
_NAME = "flash_attention"


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
      implementation: `"xla"`, …: use this one or raise; default: the best that can serve the call.
      cfg: block sizes; by default the tuned ones of the store, else a heuristic.

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
    q, k, v = arguments.checked_arrays(q, k, v)
    (batch, q_len, heads, head_dim), kv_len = q.shape, k.shape[1]
    causal = checked_flag(_NAME, "causal", causal)
    scale = head_dim**-0.5
    if softmax_scale is not None:
        advice = "for a learned scale multiply q by it"
        scale = checked_number(_NAME, "softmax_scale", softmax_scale, advice=advice)
    options: dict[str, Any] = {"causal": causal, "softmax_scale": scale}
    whole = (q_len, kv_len)  # of all devices
    if sequence_axis is not None:
        devices = arguments.axis_size(sequence_axis)
        whole = (q_len * devices, kv_len * devices)
        kv_len = whole[1]
        options["sequence_axis"] = sequence_axis
    table_shape = (batch, heads, q_len, kv_len)
    if bias is not None:
        options["bias"] = arguments.checked_table("bias", bias, table_shape, boolean=False)
    if mask is not None:
        options["mask"] = arguments.checked_table("mask", mask, table_shape, boolean=True)
    if segment_ids is not None or kv_segment_ids is not None:
        options |= arguments.checked_segments(segment_ids, kv_segment_ids, batch, q_len, k.shape[1])
    if window is not None:
        band = arguments.checked_window(window, causal, *whole)
        options |= {} if band is None else {"window": band}
    if logits_soft_cap is not None:
        options["logits_soft_cap"] = checked_soft_cap(_NAME, logits_soft_cap)
    if sinks is not None:
        options["sinks"] = arguments.checked_sinks(sinks, heads)
    given = (("q_lengths", q_lengths, whole[0]), ("kv_lengths", kv_lengths, whole[1]))
    for name, lengths, longest in given:
        if lengths is not None:
            options[name] = arguments.checked_lengths(name, lengths, batch, longest)
    if dropout_key is not None or not isinstance(dropout_rate, float) or dropout_rate:
        options |= arguments.checked_dropout(dropout_rate, dropout_key)
    if return_lse is not False and checked_flag(_NAME, "return_lse", return_lse):
        options["return_lse"] = True
    options |= given_options(_NAME, implementation, cfg)
    return _kernel(q, k, v, **options)
