"""Attention written the obvious way: the definition that every fast version is tested against."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.utils.serialize import is_symbolic

from ..dtypes import accumulation_dtype
from ..promotion import usual_promotion
from .dropout import keep_mask
from .options import Options
from .scalars import ceil_div


@usual_promotion
def attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    **keywords: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Softmax attention that builds the whole score matrix.

    For every batch entry and query head, with :math:`V_i` the keys that query :math:`i` may see,
    :math:`c` the soft cap, :math:`b` the bias and :math:`t` the head's sink:

    .. math::
        s_{ij} = c \tanh(\text{scale} \; q_i \cdot k_j / c) + b_{ij}, \qquad
        l_i = \log \Bigl( e^t + \sum_{j \in V_i} e^{s_{ij}} \Bigr), \qquad
        o_i = \sum_{j \in V_i} z_{ij} \, e^{s_{ij} - l_i} \, v_j

    Without a cap the scores are the scaled products, without a sink :math:`e^t = 0`, and
    :math:`z_{ij}` is 1, or with dropout 0 or :math:`1 / (1 - \text{rate})`.

    Args:
        q: Queries, ``(batch, q_len, q_heads, head_dim)``.
        k: Keys, ``(batch, k_len, kv_heads, head_dim)``; ``kv_heads`` divides ``q_heads``, and query
            head ``h`` reads key head ``h // (q_heads // kv_heads)``.
        v: Values, ``(batch, k_len, kv_heads, value_dim)``.
        causal: If true, query ``i`` sees the keys ``j <= i`` (aligned at the top left).
        softmax_scale: Factor on the scores; ``head_dim ** -0.5`` if not given.
        return_lse: If true, also return :math:`l`.
        **keywords: The other fields of ``Options``, but ``sequence_axis``; they mean what they mean
            in ``ejkernel.modules.flash_attention``.

    Returns:
        ``(batch, q_len, q_heads, value_dim)`` in the dtype of ``q``, computed in float32 (float64
        for float64); and, if asked for, the ``(batch, q_heads, q_len)`` log-sum-exp in the dtype of
        the computation. A query that sees no key gives zeros and minus infinity, sink or not, and
        all its gradients are zero.

    Example:
        >>> import jax.numpy as jnp
        >>> q = jnp.zeros((1, 2, 1, 4))  # equal scores, so the output is the mean of what is seen
        >>> v = jnp.array([2.0, 4.0]).reshape(1, 2, 1, 1)
        >>> attention_reference(q, q, v, causal=True).ravel().tolist()
        [2.0, 3.0]
    """
    batch, q_len, q_heads, head_dim = q.shape
    _, k_len, kv_heads, _ = v.shape
    exact = jax.lax.Precision.HIGHEST
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    options = Options(causal, scale, **keywords)
    if options.sequence_axis is not None:
        raise TypeError("attention_reference has the whole sequence, and so no sequence_axis")
    repeat = q_heads // kv_heads
    wide = accumulation_dtype(q.dtype)
    exact_q = q.astype(wide)
    every_k = jnp.repeat(k.astype(wide), repeat, axis=2)
    every_v = jnp.repeat(v.astype(wide), repeat, axis=2)

    row, key = jnp.arange(q_len)[:, None] + options.first_query, jnp.arange(k_len)[None, :]
    left, right = options.band
    visible = jnp.ones((batch, q_heads, q_len, k_len), bool)
    if right is not None:
        visible &= key <= row + right
    if left is not None:
        visible &= key >= row - left
    if options.mask is not None:
        visible &= options.mask
    if options.segment_ids is not None and options.kv_segment_ids is not None:
        of_keys = options.kv_segment_ids[:, None, :]
        visible &= (options.segment_ids[:, :, None] == of_keys)[:, None]
    if options.q_lengths is not None:
        visible &= (row < options.q_lengths[:, None, None])[:, None]
    if options.kv_lengths is not None:
        visible &= (key < options.kv_lengths[:, None, None])[:, None]

    # Zero times NaN would be NaN, and so would be the derivative of what is hidden. So numbers that
    # are not finite leave the products, and those who see them get NaN through their scores.
    bad_query = jnp.any(~jnp.isfinite(exact_q), axis=3).swapaxes(1, 2)[..., None]
    bad_key = jnp.any(~jnp.isfinite(every_k), axis=3) | jnp.any(~jnp.isfinite(every_v), axis=3)
    bad_key = bad_key.swapaxes(1, 2)[:, :, None]
    exact_q, every_k, every_v = (
        jnp.where(jnp.isfinite(x), x, 0.0) for x in (exact_q, every_k, every_v)
    )
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", exact_q, every_k, precision=exact)
    scores = jnp.where(visible, jnp.where(bad_query | bad_key, jnp.nan, scores), 0.0)
    if options.logits_soft_cap is not None:
        scores = options.logits_soft_cap * jnp.tanh(scores / options.logits_soft_cap)
    if options.bias is not None:
        scores = scores + options.bias.astype(wide)
    scores = jnp.where(visible, scores, -jnp.inf)

    # Subtracting the row maximum changes nothing but the range. A row without keys has the maximum
    # -inf, and -inf - -inf would be NaN, so such a row is shifted by nothing.
    row_max = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    empty = jnp.isneginf(row_max)
    sinks = None
    if options.sinks is not None:
        sinks = options.sinks.astype(wide).reshape(1, q_heads, 1, 1)
        row_max = jnp.maximum(row_max, sinks)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isneginf(row_max), 0.0, row_max))
    weights = jnp.exp(scores - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    total = jnp.where(empty, 1.0, total)
    probabilities = jnp.where(visible, weights / total, 0.0)  # in a row of NaN too
    if options.dropout_key is not None:
        rate = options.dropout_rate
        example = jnp.arange(batch).reshape(batch, 1, 1, 1) + options.first_example
        head = jnp.arange(q_heads).reshape(1, q_heads, 1, 1) + options.first_head
        keep = keep_mask(rate, options.dropout_key, example, head, row[None, None], key[None, None])
        probabilities = jnp.where(keep, probabilities / (1 - rate), 0.0)

    out = jnp.einsum("bhqk,bkhd->bqhd", probabilities, every_v, precision=exact).astype(q.dtype)
    if not return_lse:
        return out
    return out, jnp.where(empty, -jnp.inf, shift + jnp.log(total))[..., 0]


@usual_promotion
def attention_reference_by_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, *, most_scores: int = 2**24, **options: Any
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The same, some queries at a time, such that no more scores than this exist at once."""
    batch, q_len, q_heads, _ = q.shape
    if any(map(is_symbolic, (*q.shape, *k.shape))):
        return attention_reference(q, k, v, **options)
    rows = max(1, most_scores // max(1, batch * q_heads * k.shape[1]))
    if rows >= q_len:
        return attention_reference(q, k, v, **options)
    chunks = ceil_div(q_len, rows)
    per_row = {"q": (q, 1)}  # the arrays that have rows, and along which axis
    for name, axis in (("bias", 2), ("mask", 2), ("segment_ids", 1)):
        array = options.get(name)
        if array is not None and array.shape[axis] > 1:
            per_row[name] = (array, axis)
    if "segment_ids" in options:
        options.setdefault("kv_segment_ids", options["segment_ids"])
    missing = chunks * rows - q_len
    padded = {
        name: (jnp.pad(x, [(0, missing * (a == axis)) for a in range(x.ndim)]), axis)
        for name, (x, axis) in per_row.items()
    }

    @jax.checkpoint
    def attend(index: jax.Array) -> Any:
        mine = {
            name: jax.lax.dynamic_slice_in_dim(x, index * rows, rows, axis)
            for name, (x, axis) in padded.items()
        }
        return attention_reference(
            mine.pop("q"), k, v, **{**options, **mine}, first_query=index * rows
        )

    def joined(parts: jax.Array, axis: int) -> jax.Array:
        whole = jnp.moveaxis(parts, 0, axis)
        shape = (*whole.shape[:axis], chunks * rows, *whole.shape[axis + 2 :])
        return whole.reshape(shape)[(slice(None),) * axis + (slice(q_len),)]

    parts = jax.lax.map(attend, jnp.arange(chunks))
    if isinstance(parts, tuple):
        return joined(parts[0], 1), joined(parts[1], 2)
    return joined(parts, 1)
