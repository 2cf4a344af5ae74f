"""Paged attention written the obvious way: the definition that fast versions are tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Implementation

from ..dtypes import accumulation_dtype
from ..promotion import usual_promotion
from .arguments import Arguments


@usual_promotion
def paged_attention_reference(
    *args: jax.Array, softmax_scale: float | None = None, **options: Any
) -> jax.Array:
    r"""Softmax attention over keys that a page table collects.

    Key :math:`j` of sequence :math:`b` is row :math:`j \bmod p` of page
    :math:`\text{table}_{b, \lfloor j / p \rfloor}`, with pages of :math:`p` tokens. The queries are
    the last tokens of their sequence: with :math:`T` of them, query :math:`t` has the position
    :math:`i = \text{length} - T + t`, and sees the keys :math:`V_i` from :math:`i - \text{window}`
    to :math:`i`. With :math:`c` the soft cap and :math:`z` the head's sink:

    .. math::
        s_{ij} = c \tanh(\text{scale} \; q_i \cdot k_j / c), \qquad
        o_i = \frac{\sum_{j \in V_i} e^{s_{ij}} \, v_j}{e^z + \sum_{j \in V_i} e^{s_{ij}}}

    Without a cap the scores are the scaled products, without a sink :math:`e^z = 0`.

    Arguments and results are those of :func:`ejkernel.modules.paged_attention`, with ``q`` as
    ``(batch, tokens, heads, head_dim)``.

    Example:
        >>> import jax.numpy as jnp
        >>> pages = jnp.arange(6.0).reshape(3, 2, 1, 1)  # three pages of two tokens
        >>> q, table = jnp.zeros((1, 1, 1, 1)), jnp.array([[2, 0]])
        >>> paged_attention_reference(q, pages, pages, table, jnp.array([3])).item()  # (4+5+0)/3
        3.0
    """
    scale = args[0].shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    call = Arguments(*args, softmax_scale=scale, **options)
    q, k_pages, v_pages, page_table = call.q, call.k_pages, call.v_pages, call.page_table
    batch, tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    exact = jax.lax.Precision.HIGHEST
    wide = accumulation_dtype(q.dtype)
    keys = page_table.shape[1] * page_size

    def gathered(pages: jax.Array) -> jax.Array:
        found = pages[jnp.clip(page_table, 0, pages.shape[0] - 1)].astype(wide)
        return found.reshape(batch, keys, kv_heads, pages.shape[3])

    position = jnp.minimum(call.lengths, keys)[:, None, None] - tokens + jnp.arange(tokens)[:, None]
    key = jnp.arange(keys)
    visible = key <= position
    if call.window is not None:
        visible &= key >= position - call.window
    # What no query of a sequence sees may be anything: zero times NaN would be NaN.
    seen = jnp.any(visible, axis=1)[:, :, None, None]
    k, v = (jnp.where(seen, gathered(pages), 0.0) for pages in (k_pages, v_pages))

    grouped_q = q.astype(wide).reshape(batch, tokens, kv_heads, -1, head_dim)
    scores = scale * jnp.einsum("bthgd,bkhd->bhgtk", grouped_q, k, precision=exact)
    if (cap := call.logits_soft_cap) is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)

    # A row without keys has the maximum -inf, and -inf - -inf would be NaN.
    row_max = jnp.max(scores, axis=-1, keepdims=True)
    empty = jnp.isneginf(row_max)
    if call.sinks is not None:
        logits = call.sinks.astype(wide).reshape(1, kv_heads, -1, 1, 1)
        row_max = jnp.maximum(row_max, logits)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isneginf(row_max), 0.0, row_max))
    weights = jnp.exp(scores - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if call.sinks is not None:
        total = total + jnp.exp(logits - shift)
    probabilities = weights / jnp.where(empty, 1.0, total)
    out = jnp.einsum("bhgtk,bkhd->bthgd", probabilities, v, precision=exact)
    return out.reshape(batch, tokens, heads, v_pages.shape[3]).astype(q.dtype)


def implementation(
    attend: Callable[[Arguments, Any], jax.Array], **declared: Any
) -> Implementation[Any, jax.Array]:
    """One implementation: `attend(call, cfg)` gives the output, the definition the gradient.

    Nobody trains through a cache of pages in a loop, but gradients through a decoding step are
    asked for now and then (sinks, learned prefixes).
    """

    @usual_promotion
    def forward(*args: jax.Array, cfg: Any, **options: Any) -> jax.Array:
        return attend(Arguments.of(*args, **options), cfg)

    def forward_with_residuals(*args: Any, cfg: Any, **options: Any) -> tuple[jax.Array, None]:
        return forward(*args, cfg=cfg, **options), None

    return Implementation(
        forward=forward,
        forward_with_residuals=forward_with_residuals,
        backward=_backward,
        reads_out=False,
        **declared,
    )


@usual_promotion
def _backward(
    residuals: None, out: None, dout: jax.Array, *args: jax.Array, cfg: Any, **options: Any
) -> tuple[Any, ...]:
    q, k_pages, v_pages, table, lengths = args
    sinks = {name: options.pop(name) for name in ("sinks",) if name in options}

    def definition(q: Any, k_pages: Any, v_pages: Any, sinks: dict[str, Any]) -> jax.Array:
        return paged_attention_reference(q, k_pages, v_pages, table, lengths, **sinks, **options)

    *gradients, by_keyword = jax.vjp(definition, q, k_pages, v_pages, sinks)[1](dout)
    return (*gradients, None, None, *([by_keyword] if by_keyword else []))
