"""Attention as users of JAX write it without this package: what the tuner shows the gain over."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .options import Window

_EXPRESSED = frozenset(
    (
        *("causal", "softmax_scale", "bias", "mask", "segment_ids", "kv_segment_ids", "window"),
        *("q_lengths", "kv_lengths"),
    )
)


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    **options: Any,
) -> jax.Array:
    """`jax.nn.dot_product_attention`, with segments as a mask.

    Raises `NotImplementedError` for what that function cannot express: a soft cap, sinks, dropout,
    the log-sum-exp, a sequence over several devices, dtypes or head sizes that differ, float64
    (its softmax is float32).

    >>> import jax.numpy as jnp
    >>> q, v = jnp.zeros((1, 2, 1, 4)), jnp.array([2.0, 4.0, 0.0, 0.0] * 2).reshape(1, 2, 1, 4)
    >>> dot_product_attention(q, q, v, causal=True).shape
    (1, 2, 1, 4)
    """
    if not options.keys() <= _EXPRESSED:
        inexpressible = ", ".join(sorted(options.keys() - _EXPRESSED))
        raise NotImplementedError(f"jax.nn.dot_product_attention has no {inexpressible}")
    if {k.dtype, v.dtype} != {q.dtype} or k.shape != v.shape or q.dtype == jnp.float64:
        raise NotImplementedError("jax.nn.dot_product_attention takes one dtype and head size")
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=options.get("bias"),
        mask=_mask(options),
        scale=softmax_scale,
        is_causal=causal,
        query_seq_lengths=options.get("q_lengths"),
        key_value_seq_lengths=options.get("kv_lengths"),
        local_window_size=_window(options.get("window"), max(q.shape[1], k.shape[1])),
    )


def _mask(options: dict[str, Any]) -> jax.Array | None:
    mask: jax.Array | None = options.get("mask")
    ids: jax.Array | None = options.get("segment_ids")
    if ids is None:
        return mask
    of_keys: jax.Array = options.get("kv_segment_ids", ids)
    same = (ids[:, :, None] == of_keys[:, None, :])[:, None]
    return same if mask is None else same & mask


def _window(window: Window | None, longest: int) -> tuple[int, int] | None:
    if window is None:
        return None
    left, right = (longest if side is None else side for side in window)
    return left, right
