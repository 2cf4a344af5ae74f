"""Attention over pages written the obvious way: what fast versions are tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Implementation
from ejkernel.ops.core.varying import vary_alike

from ..dtypes import accumulation_dtype
from ..promotion import usual_promotion
from .arguments import Arguments, RaggedArguments

LEARNED = ("sinks", "k_scale", "v_scale")
"""Keywords that are arrays, and differentiable."""


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
    call = Arguments.of(*args, softmax_scale=scale, **options)
    tokens = call.q.shape[1]

    def attend(q: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        return _attend(q, table, length, length - tokens + jnp.arange(tokens), call)

    return jax.vmap(attend)(call.q, call.page_table, call.lengths)


@usual_promotion
def ragged_paged_attention_reference(
    *args: jax.Array, softmax_scale: float | None = None, **options: Any
) -> jax.Array:
    r"""The same for packed queries: row :math:`r` of a sequence with :math:`n` of them, the first
    of which is row :math:`r_0`, has the position :math:`i = \text{length} - n + r - r_0`.

    Without ``causal`` it sees the keys from :math:`i - \text{window}` to the end of its sequence.
    Keys and values are what the pages hold times ``k_scale`` and ``v_scale``. Rows of no
    sequence are zero. Arguments and results are those of
    :func:`ejkernel.modules.ragged_paged_attention`.

    Example:
        >>> import jax.numpy as jnp
        >>> pages = jnp.arange(6.0).reshape(3, 2, 1, 1)  # three pages of two tokens
        >>> q, table = jnp.zeros((4, 1, 1)), jnp.array([[2, 0], [1, 0]])
        >>> lengths, starts = jnp.array([3, 2]), jnp.array([0, 2, 3])  # two new tokens, and one
        >>> out = ragged_paged_attention_reference(q, pages, pages, table, lengths, starts)
        >>> out.ravel().tolist()  # (4+5)/2, (4+5+0)/3, (2+3)/2, nobody's
        [4.5, 3.0, 2.5, 0.0]
    """
    scale = args[0].shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    ragged = RaggedArguments.of(*args, **options)
    sequence, position = ragged.places()
    call = Arguments.of(*args[:5], softmax_scale=scale, **options)

    def add(out: jax.Array, s: jax.Array) -> tuple[jax.Array, None]:
        """All rows with the keys of one sequence; those of others see nothing, and give zeros."""
        own = jnp.where(sequence == s, position, -1)
        return out + _attend(ragged.q, ragged.page_table[s], ragged.lengths[s], own, call), None

    shape = (*ragged.q.shape[:2], ragged.v_pages.shape[3])
    sequences = jnp.arange(ragged.lengths.shape[0])
    return jax.lax.scan(add, vary_alike(jnp.zeros(shape, ragged.q.dtype), args), sequences)[0]


def _attend(q: Any, table: Any, length: Any, position: Any, call: Arguments) -> jax.Array:
    """`(tokens, heads, value_dim)`: queries at some positions with the keys of one sequence."""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = call.k_pages.shape[1:3]
    exact = jax.lax.Precision.HIGHEST
    wide = accumulation_dtype(q.dtype)
    keys = table.shape[0] * page_size

    key, position = jnp.arange(keys), position[:, None]
    visible = (key < length) & (position >= 0)
    if call.causal:
        visible &= key <= position
    if call.window is not None:
        visible &= key >= position - call.window
    # What no query of a sequence sees may be anything: zero times NaN would be NaN.
    seen = jnp.any(visible, axis=0)[:, None, None]

    def gathered(pages: jax.Array, scale: jax.Array | None) -> jax.Array:
        found = pages[table].astype(wide)
        if scale is not None:
            factor = scale if scale.ndim == 1 else scale[table]
            factor = jnp.expand_dims(factor, 1) if scale.ndim == 2 else factor
            found = found * factor[..., None].astype(wide)
        return jnp.where(seen, found.reshape(keys, kv_heads, -1), 0.0)

    k, v = gathered(call.k_pages, call.k_scale), gathered(call.v_pages, call.v_scale)
    # Scaled before the product: fused with the difference from the maximum, below, a factor
    # would be rounded in two ways.
    scaled = (call.softmax_scale * q.astype(wide)).reshape(tokens, kv_heads, -1, head_dim)
    scores = jnp.einsum("thgd,khd->hgtk", scaled, k, precision=exact)
    if (cap := call.logits_soft_cap) is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(visible, scores, -jnp.inf)

    # A row without keys has the maximum -inf, and -inf - -inf would be NaN.
    row_max = jnp.max(scores, axis=-1, keepdims=True)
    empty = jnp.isneginf(row_max)
    if call.sinks is not None:
        logits = call.sinks.astype(wide).reshape(kv_heads, -1, 1, 1)
        row_max = jnp.maximum(row_max, logits)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isneginf(row_max), 0.0, row_max))
    weights = jnp.exp(scores - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if call.sinks is not None:
        total = total + jnp.exp(logits - shift)
    probabilities = weights / jnp.where(empty, 1.0, total)
    out = jnp.einsum("hgtk,khd->thgd", probabilities, v, precision=exact)
    return out.reshape(tokens, heads, -1).astype(q.dtype)


def implementation(
    attend: Callable[[Arguments, Any], jax.Array], **declared: Any
) -> Implementation[Any, jax.Array]:
    """One implementation of `PagedAttention`: `attend(call, cfg)` gives the output."""
    return _implementation(attend, Arguments.of, paged_attention_reference, **declared)


def ragged_implementation(
    attend: Callable[[RaggedArguments, Any], jax.Array], **declared: Any
) -> Implementation[Any, jax.Array]:
    """The same of `RaggedPagedAttention`."""
    return _implementation(attend, RaggedArguments.of, ragged_paged_attention_reference, **declared)


def _implementation(
    attend: Callable[[Any, Any], jax.Array],
    arguments: Callable[..., Any],
    definition: Callable[..., jax.Array],
    **declared: Any,
) -> Implementation[Any, jax.Array]:
    """The definition gives the gradient.

    Nobody trains through a cache of pages in a loop, but gradients through a decoding step are
    asked for now and then (sinks, learned prefixes).
    """

    @usual_promotion
    def forward(*args: jax.Array, cfg: Any, **options: Any) -> jax.Array:
        return attend(arguments(*args, **options), cfg)

    def forward_with_residuals(*args: Any, cfg: Any, **options: Any) -> tuple[jax.Array, None]:
        return forward(*args, cfg=cfg, **options), None

    @usual_promotion
    def backward(
        residuals: None, out: None, dout: jax.Array, *args: jax.Array, cfg: Any, **options: Any
    ) -> tuple[Any, ...]:
        free = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]
        named = {n: x for n in LEARNED if (x := options.pop(n, None)) is not None}

        def of_free(arrays: list[jax.Array], named: dict[str, jax.Array]) -> jax.Array:
            given = dict(zip(free, arrays, strict=True))
            every = (given.get(i, x) for i, x in enumerate(args))
            return definition(*every, **named, **options)

        gradients, by_keyword = jax.vjp(of_free, [args[i] for i in free], named)[1](dout)
        found = dict(zip(free, gradients, strict=True))
        every = tuple(found.get(i) for i in range(len(args)))
        return (*every, by_keyword) if by_keyword else every

    return Implementation(
        forward=forward,
        forward_with_residuals=forward_with_residuals,
        backward=backward,
        reads_out=False,
        **declared,
    )
