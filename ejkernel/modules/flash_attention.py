"""`flash_attention`: exact attention in linear memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import FlashAttention, FlashAttentionConfig

_kernel = FlashAttention()


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    cfg: FlashAttentionConfig | None = None,
) -> jax.Array:
    r"""Attention, `softmax(scale · q kᵀ) v`, without the score matrix in memory.

    Differentiable in `q`, `k` and `v`; memory is linear in the sequence length in both directions.
    Sequences may have any length. Accumulation is in float32 whatever the input's dtype.

    Args:
      q: queries, `(batch, q_len, heads, head_dim)`.
      k: keys, `(batch, kv_len, kv_heads, head_dim)`; `heads` must be a multiple of `kv_heads`.
      v: values, `(batch, kv_len, kv_heads, value_dim)`.
      causal: query `i` attends to keys `0 … i` only, as in `jax.nn.dot_product_attention`.
      softmax_scale: factor on the scores; default `head_dim ** -0.5`.
      cfg: block sizes; by default the tuned ones of the store, else a heuristic.

    Returns:
      `(batch, q_len, heads, value_dim)`, of `q`'s dtype.

    >>> import jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
    >>> flash_attention(q, k, v, causal=True).shape
    (2, 100, 4, 32)
    """
    _check(q, k, v, causal, softmax_scale)
    scale = float(q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if cfg is None:
        return _kernel(q, k, v, causal=bool(causal), softmax_scale=scale)
    return _kernel(q, k, v, causal=bool(causal), softmax_scale=scale, cfg=cfg)


def _check(q: Any, k: Any, v: Any, causal: Any, softmax_scale: Any) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        shape, dtype = jnp.shape(array), jnp.result_type(array)
        if len(shape) != 4:
            raise ValueError(
                f"flash_attention: {name} has shape {shape}; it must have four axes, "
                "(batch, sequence, heads, head_dim)"
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"flash_attention: {name} is {dtype}; it must be a floating type, such as float32 "
                "or bfloat16"
            )
        if 0 in shape:
            raise ValueError(f"flash_attention: {name} has shape {shape}; no axis may be empty")
    _same("batch size", 0, q=q, k=k, v=v)
    _same("length", 1, k=k, v=v)
    _same("number of heads", 2, k=k, v=v)
    _same("head_dim", 3, q=q, k=k)
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"flash_attention: q has {q.shape[2]} heads and k has {k.shape[2]}; the query heads "
            "must be a multiple of the key heads"
        )
    if isinstance(causal, jax.core.Tracer) or causal not in (True, False):
        raise TypeError(f"flash_attention: causal must be True or False, got {causal!r}")
    if isinstance(softmax_scale, jax.core.Tracer):
        raise TypeError(
            "flash_attention: softmax_scale must be a number known while tracing; for a learned "
            "scale multiply q by it"
        )


def _same(what: str, axis: int, **arrays: Any) -> None:
    if len({array.shape[axis] for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(
            f"flash_attention: {' and '.join(arrays)} differ in {what} (axis {axis}): {shapes}"
        )
