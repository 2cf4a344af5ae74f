"""What the operations compute, in NumPy and float64: loops over rows, as the documentation has it.

Arguments are those of the functions of the same name in `ejkernel.modules`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rms_norm(
    x: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Any = None,
) -> Any:
    return _norm(x, weight, None, eps, weight_offset, residual, centered=False)


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual: Any = None,
) -> Any:
    return _norm(x, weight, bias, eps, weight_offset, residual, centered=True)


def _norm(
    x: Any, weight: Any, bias: Any, eps: float, offset: float, residual: Any, *, centered: bool
) -> Any:
    summed = float64(x) if residual is None else float64(x) + float64(residual)
    values = summed - summed.mean(-1, keepdims=True) if centered else summed
    out = values / np.sqrt((values**2).mean(-1, keepdims=True) + eps)
    if weight is not None:
        out = out * (float64(weight) + offset)
    if bias is not None:
        out = out + float64(bias)
    return out if residual is None else (out, summed)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: max(x, 0.0),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "identity": lambda x: x,
}


def gated_linear_unit(
    x: Any,
    w_gate: Any,
    w_up: Any = None,
    *,
    activation: str = "silu",
    b_gate: Any = None,
    b_up: Any = None,
    **_: Any,
) -> np.ndarray:
    w_gate = float64(w_gate)
    if w_up is None:
        w_gate, w_up = np.split(w_gate.reshape(len(w_gate), -1), 2, axis=1)
        if b_gate is not None and np.size(b_gate) == 2 * w_gate.shape[1]:
            b_gate, b_up = np.split(float64(b_gate).reshape(-1), 2)
    gate = float64(x) @ w_gate + (0 if b_gate is None else float64(b_gate))
    up = float64(x) @ float64(w_up) + (0 if b_up is None else float64(b_up))
    return np.vectorize(ACTIVATIONS[activation], otypes=[np.float64])(gate) * up


def grouped_matmul(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    transpose_rhs: bool = False,
    group_offset: int = 0,
    existing_out: Any = None,
    **_: Any,
) -> np.ndarray:
    lhs, rhs = float64(lhs), float64(rhs)
    matrices = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = np.zeros((len(lhs), matrices.shape[2]))
    if existing_out is not None:
        out[:] = float64(existing_out)
    owners = np.repeat(np.arange(len(group_sizes)), np.maximum(np.asarray(group_sizes), 0))
    for row, owner in enumerate(owners[: len(lhs)]):
        if 0 <= owner - group_offset < len(matrices):
            out[row] = lhs[row] @ matrices[owner - group_offset]
    return out


def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    vocab_first: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logits_soft_cap: float | None = None,
    z_loss: float = 0.0,
    softmax_scale: float = 1.0,
    reduction: str = "mean",
) -> Any:
    labels = np.asarray(labels)
    matrix = float64(weight).T if vocab_first else float64(weight)
    losses = np.zeros(labels.shape)
    for row in np.ndindex(*labels.shape):
        label = int(labels[row])
        if label == ignore_index:
            continue
        logits = float64(hidden)[row] @ matrix + (0 if bias is None else float64(bias))
        logits = softmax_scale * logits
        if logits_soft_cap is not None:
            logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
        lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        picked = logits[label] if 0 <= label < len(logits) else np.nan
        losses[row] = (
            (1 - label_smoothing) * (lse - picked)
            + label_smoothing * (lse - logits).mean()
            + z_loss * lse**2
        )
    if reduction == "none":
        return losses
    counted = max(1, int((labels != ignore_index).sum()))
    return losses.sum() if reduction == "sum" else losses.sum() / counted


def gated_linear_attention(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    segment_ids: Any = None,
    return_state: bool = False,
) -> Any:
    q, k, v = float64(q), float64(k), float64(v)
    batch, length, heads, key_dim = q.shape
    scale = key_dim**-0.5 if scale is None else scale
    out = np.zeros(v.shape)
    states = np.zeros((batch, heads, key_dim, v.shape[3]))
    if initial_state is not None:
        states[:] = float64(initial_state)
    for b, h in np.ndindex(batch, heads):
        for t in range(length):
            if segment_ids is not None and t > 0 and segment_ids[b][t] != segment_ids[b][t - 1]:
                states[b, h] = 0
            if g is not None:
                decay = np.exp(float64(g)[b, t, h])
                states[b, h] *= decay[:, None] if decay.ndim else decay
            states[b, h] += np.outer(k[b, t, h], v[b, t, h])
            out[b, t, h] = scale * q[b, t, h] @ states[b, h]
    return (out, states) if return_state else out


def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
) -> np.ndarray:
    q, k_pages, v_pages = float64(q), float64(k_pages), float64(v_pages)
    rows = q if q.ndim == 4 else q[:, None]
    batch, tokens, heads, head_dim = rows.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = np.zeros((batch, tokens, heads, v_pages.shape[3]))
    for b, t, h in np.ndindex(batch, tokens, heads):
        position = int(lengths[b]) - tokens + t
        first = 0 if window is None else max(0, position - window)
        places = range(first, position + 1)
        head = h // (heads // k_pages.shape[2])
        page = [page_table[b][j // k_pages.shape[1]] for j in places]
        inside = [j % k_pages.shape[1] for j in places]
        if not page:
            continue
        scores = scale * (k_pages[page, inside, head] @ rows[b, t, h])
        if logits_soft_cap is not None:
            scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
        logits = scores if sinks is None else np.append(scores, float64(sinks)[h])
        weights = np.exp(scores - logits.max()) / np.exp(logits - logits.max()).sum()
        out[b, t, h] = weights @ v_pages[page, inside, head]
    return out if q.ndim == 4 else out[:, 0]


def ragged_paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    query_starts: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> np.ndarray:
    def scaled(pages: Any, scale: Any) -> np.ndarray:
        if scale is None:
            return float64(pages)
        scale = float64(scale)
        return float64(pages) * (scale[:, None] if scale.ndim == 2 else scale)[..., None]

    q, k, v = float64(q), scaled(k_pages, k_scale), scaled(v_pages, v_scale)
    rows, heads, head_dim = q.shape
    page_size, kv_heads = k.shape[1:3]
    out = np.zeros((rows, heads, v.shape[3]))
    for s, h in np.ndindex(len(lengths), heads):
        for row in range(query_starts[s], query_starts[s + 1]):
            position = lengths[s] - query_starts[s + 1] + row
            first = 0 if window is None else max(0, position - window)
            places = range(first, position + 1 if causal else lengths[s])
            page = [page_table[s][j // page_size] for j in places]
            inside, head = [j % page_size for j in places], h // (heads // kv_heads)
            scores = k[page, inside, head] @ q[row, h] * head_dim**-0.5
            if logits_soft_cap is not None:
                scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
            logits = scores if sinks is None else np.append(scores, float64(sinks)[h])
            weights = np.exp(scores - logits.max()) / np.exp(logits - logits.max()).sum()
            out[row, h] = weights @ v[page, inside, head]
    return out
