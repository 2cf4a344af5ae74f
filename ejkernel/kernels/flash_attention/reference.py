"""Attention written the obvious way: the definition that every fast version is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> jax.Array:
    r"""Softmax attention that builds the whole score matrix.

    For every batch entry and query head, with :math:`V_i` the keys that query :math:`i` may see:

    .. math::
        s_{ij} = \text{scale} \; q_i \cdot k_j, \qquad
        o_i = \sum_{j \in V_i} \frac{e^{s_{ij}}}{\sum_{l \in V_i} e^{s_{il}}} \, v_j

    Args:
        q: Queries, ``(batch, q_len, q_heads, head_dim)``.
        k: Keys, ``(batch, k_len, kv_heads, head_dim)``; ``kv_heads`` divides ``q_heads``, and query
            head ``h`` reads key head ``h // (q_heads // kv_heads)``.
        v: Values, ``(batch, k_len, kv_heads, value_dim)``.
        causal: If true, query ``i`` sees the keys ``j <= i`` (aligned at the top left).
        softmax_scale: Factor on the scores; ``head_dim ** -0.5`` if not given.

    Returns:
        ``(batch, q_len, q_heads, value_dim)`` in the dtype of ``q``, computed in float32. A query
        that sees no key gives zeros.

    Example:
        >>> import jax.numpy as jnp
        >>> q = jnp.zeros((1, 2, 1, 4))  # equal scores, so the output is the mean of what is seen
        >>> v = jnp.array([2.0, 4.0]).reshape(1, 2, 1, 1)
        >>> attention_reference(q, q, v, causal=True).ravel().tolist()
        [2.0, 3.0]
    """
    batch, q_len, q_heads, head_dim = q.shape
    _, k_len, kv_heads, value_dim = v.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    exact = jax.lax.Precision.HIGHEST

    grouped_q = q.astype(jnp.float32).reshape(batch, q_len, kv_heads, q_heads // kv_heads, head_dim)
    scores = scale * jnp.einsum(
        "bqhgd,bkhd->bhgqk", grouped_q, k.astype(jnp.float32), precision=exact
    )
    if causal:
        visible = jnp.arange(k_len)[None, :] <= jnp.arange(q_len)[:, None]
        scores = jnp.where(visible, scores, -jnp.inf)

    # Subtracting the row maximum changes nothing but the range. A row without keys has the maximum
    # -inf, and -inf - -inf would be NaN, so such a row is shifted by nothing.
    row_max = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isneginf(row_max), 0.0, row_max))
    weights = jnp.exp(scores - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = weights / jnp.where(total == 0.0, 1.0, total)

    out = jnp.einsum("bhgqk,bkhd->bqhgd", probabilities, v.astype(jnp.float32), precision=exact)
    return out.reshape(batch, q_len, q_heads, value_dim).astype(q.dtype)
