"""Attention and its gradients in NumPy and float64, from the definition."""

from __future__ import annotations

from typing import Any

import numpy as np


def attention64(
    q: Any,
    k: Any,
    v: Any,
    *,
    visible: Any = None,
    bias: Any = None,
    sinks: Any = None,
    cap: float | None = None,
    scale: float | None = None,
    kept: Any = None,
    dout: Any = None,
    dlse: Any = None,
    score_dtype: Any = np.float32,
) -> dict[str, np.ndarray]:
    """`out`, `lse`, and with `dout` the gradients `q`, `k`, `v`, `bias`, `sinks`.

    `visible`, `bias` and `kept`, the factors of dropout, broadcast to `(batch, heads, q_len,
    kv_len)`. Scores are rounded to `score_dtype` before and after the bias is added, because that
    is where a large bias takes digits away; all the rest is exact.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    scale = dim**-0.5 if scale is None else scale
    wide_k, wide_v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    shape = (batch, heads, q_len, kv_len)
    seen = np.broadcast_to(True if visible is None else np.asarray(visible), shape)
    with np.errstate(all="ignore"):
        scores = scale * np.einsum("bqhd,bkhd->bhqk", q, wide_k)
        slope = np.ones(shape)
        if cap is not None:
            slope = 1 - np.tanh(scores / cap) ** 2
            scores = cap * np.tanh(scores / cap)
        scores = scores.astype(score_dtype)
        if bias is not None:
            table = np.broadcast_to(np.asarray(bias).astype(score_dtype), shape)
            scores = scores + table
        scores = np.where(seen, scores.astype(np.float64), -np.inf)
        largest = scores.max(axis=-1, keepdims=True)
        empty = np.isneginf(largest)
        if sinks is not None:
            logits = np.asarray(sinks).astype(np.float64).reshape(1, heads, 1, 1)
            largest = np.maximum(largest, logits)
        weights = np.exp(scores - np.where(empty, 0.0, largest))
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(logits - largest)
        p = np.where(empty, 0.0, weights / np.where(empty, 1.0, total))
        lse = np.where(empty, -np.inf, largest + np.log(np.where(empty, 1.0, total)))[..., 0]
    clean_v = np.where(np.isfinite(wide_v), wide_v, 0)
    clean_k = np.where(np.isfinite(wide_k), wide_k, 0)
    clean_q = np.where(np.isfinite(q), q, 0)
    z = np.ones(shape) if kept is None else np.broadcast_to(kept, shape)
    found = {"out": np.einsum("bhqk,bkhd->bqhd", z * p, clean_v), "lse": lse}
    if dout is None:
        return found
    dout = np.asarray(dout).astype(np.float64)
    row = np.einsum("bqhd,bqhd->bhq", dout, found["out"])
    if dlse is not None:
        row = row - np.asarray(dlse).astype(np.float64)
    ds = p * (z * np.einsum("bqhd,bkhd->bhqk", dout, clean_v) - row[..., None])
    if bias is not None:
        given = np.shape(bias)
        given = (1,) * (4 - len(given)) + given
        once = tuple(a for a in range(4) if given[a] == 1)
        found["bias"] = ds.sum(axis=once, keepdims=True).reshape(np.shape(bias))
    if sinks is not None:
        of_sink = np.where(empty, 0.0, np.exp(logits - largest) / total)[..., 0]
        found["sinks"] = -(of_sink * row).sum(axis=(0, 2))
    ds = np.where(p == 0, 0.0, ds * slope)
    found["q"] = scale * np.einsum("bhqk,bkhd->bqhd", ds, clean_k)
    groups = (batch, kv_len, kv_heads, group, -1)
    dk = scale * np.einsum("bhqk,bqhd->bkhd", ds, clean_q)
    found["k"] = dk.reshape(groups).sum(axis=3)
    found["v"] = np.einsum("bhqk,bqhd->bkhd", z * p, dout).reshape(groups).sum(axis=3)
    return found
