"""`paged_attention`: decoding with keys and values in pages."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from ejkernel.kernels.arguments import (
    checked_floating,
    checked_integers,
    checked_number,
    checked_soft_cap,
    given_options,
    refuse_empty,
    shown,
)
from ejkernel.kernels.integers import to_int32
from ejkernel.kernels.paged_attention import PagedAttention, PagedAttentionConfig

_kernel = PagedAttention()
_NAME = "paged_attention"


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
    cfg: PagedAttentionConfig | None = None,
) -> jax.Array:
    """Attention of the last tokens of each sequence, with keys and values in pages.

    Only pages in use are read. Accumulation is in float32 whatever the input's dtype (in float64
    for float64).

    Args:
      q: queries, `(batch, heads, head_dim)` for one token per sequence, or
        `(batch, tokens, heads, head_dim)` for the last few, which see one another causally.
      k_pages: keys, `(pages, page_size, kv_heads, head_dim)`; `heads` must be a multiple of
        `kv_heads`. Those of the queries' tokens are in it already.
      v_pages: values, `(pages, page_size, kv_heads, value_dim)`.
      page_table: the pages of each sequence in their order, integers,
        `(batch, pages_per_sequence)`. Entries beyond a sequence's length are not looked at. Where
        the values are known (outside of `jit`) one that is out of range is an error; inside, it is
        clamped into the range, so that no foreign memory is read.
      lengths: tokens of each sequence, those of `q` included, integers, `(batch,)`; clamped to
        what the table can hold.
      softmax_scale: factor on the scores; default `head_dim ** -0.5`.
      window: query `i` sees the keys `i - window … i`; default: all before it.
      logits_soft_cap: `c` makes scores `c · tanh(score / c)`.
      sinks: `(heads,)`, one more logit per head that takes part in the denominator only.
      implementation: demand one by name, such as `"xla"`; it raises if it cannot serve the call.
      cfg: pages per step and launch parameters; by default the tuned ones, else a heuristic.

    Returns:
      Of `q`'s shape with `value_dim` in the last axis, and of its dtype. Zeros where there is no
      key to see, as in a sequence of length 0.

    >>> import jax, jax.numpy as jnp
    >>> q = jax.random.normal(jax.random.key(0), (2, 8, 32))
    >>> k_pages, v_pages = jax.random.normal(jax.random.key(1), (2, 10, 16, 4, 32))
    >>> page_table = jnp.array([[7, 1, 4], [2, 0, 0]])  # the second sequence has one page
    >>> paged_attention(q, k_pages, v_pages, page_table, jnp.array([40, 9])).shape
    (2, 8, 32)
    """
    q = checked_floating(_NAME, "q", q)
    k_pages = checked_floating(_NAME, "k_pages", k_pages)
    v_pages = checked_floating(_NAME, "v_pages", v_pages)
    page_table = checked_integers(_NAME, "page_table", page_table)
    lengths = checked_integers(_NAME, "lengths", lengths)
    _check_arrays(q, k_pages, v_pages)
    _check_table(q, k_pages, page_table, lengths)
    longest = page_table.shape[1] * k_pages.shape[1]
    page_table = to_int32(page_table, 0, k_pages.shape[0] - 1)
    lengths = to_int32(lengths, 0, longest)
    options = _checked_options(q, softmax_scale, window, logits_soft_cap, sinks, longest)
    options |= given_options(_NAME, implementation, cfg)
    if q.ndim == 4:
        return _kernel(q, k_pages, v_pages, page_table, lengths, **options)
    return _kernel(q[:, None], k_pages, v_pages, page_table, lengths, **options)[:, 0]


def _check_arrays(q: Any, k_pages: Any, v_pages: Any) -> None:
    caches = "(pages, page_size, kv_heads, head_dim)"
    for name, array, ranks, meaning in (
        ("q", q, (3, 4), "(batch, heads, head_dim) or (batch, tokens, heads, head_dim)"),
        ("k_pages", k_pages, (4,), caches),
        ("v_pages", v_pages, (4,), caches),
    ):
        if array.ndim not in ranks:
            raise ValueError(
                f"paged_attention: {name} has shape {array.shape}; it must be {meaning}"
            )
        refuse_empty(_NAME, name, array)
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(
            f"paged_attention: k_pages {k_pages.shape} and v_pages {v_pages.shape} differ in more "
            "than the last axis; they must have the same pages, page size and heads"
        )
    if q.shape[-1] != k_pages.shape[3]:
        raise ValueError(
            f"paged_attention: q {q.shape} and k_pages {k_pages.shape} differ in head_dim, the "
            "last axis"
        )
    if q.shape[-2] % k_pages.shape[2]:
        raise ValueError(
            f"paged_attention: q {q.shape} has {q.shape[-2]} heads and k_pages {k_pages.shape} has "
            f"{k_pages.shape[2]}; the query heads must be a multiple of the key heads"
        )


def _check_table(q: Any, k_pages: Any, page_table: Any, lengths: Any) -> None:
    batch = q.shape[0]
    for name, array, rank, meaning in (
        ("page_table", page_table, 2, f"(batch, pages_per_sequence), here ({batch}, …)"),
        ("lengths", lengths, 1, f"(batch,), here ({batch},)"),
    ):
        shape = array.shape
        if len(shape) != rank or shape[0] != batch or 0 in shape:
            raise ValueError(f"paged_attention: {name} has shape {shape}; it must be {meaning}")
    if isinstance(page_table, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    table, used = np.asarray(page_table), np.asarray(lengths)
    pages, page_size = k_pages.shape[:2]
    holds = table.shape[1] * page_size
    if (used < 0).any() or (used > holds).any():
        raise ValueError(
            f"paged_attention: lengths {lengths.shape} has values from {used.min()} to "
            f"{used.max()}; they must be from 0 to {holds}, what {table.shape[1]} pages of "
            f"{page_size} tokens hold"
        )
    in_use = np.arange(table.shape[1]) * page_size < used[:, None]
    wrong = in_use & ((table < 0) | (table >= pages))
    if wrong.any():
        sequence, place = np.argwhere(wrong)[0]
        raise ValueError(
            f"paged_attention: page_table[{sequence}, {place}] is {table[sequence, place]}; "
            f"k_pages {k_pages.shape} has pages 0 to {pages - 1}"
        )


def _checked_options(
    q: Any, softmax_scale: Any, window: Any, logits_soft_cap: Any, sinks: Any, longest: int
) -> dict[str, Any]:
    """Those that are given, as the kernel takes them."""
    scale = q.shape[-1] ** -0.5
    if softmax_scale is not None:
        advice = "for a learned scale multiply q by it"
        scale = checked_number(_NAME, "softmax_scale", softmax_scale, advice=advice)
    options: dict[str, Any] = {"softmax_scale": scale}
    if window is not None:
        try:
            size = -1 if isinstance(window, (bool, np.bool_)) else operator.index(window)
        except (TypeError, jax.errors.JAXTypeError):
            size = -1
        if size < 0:
            raise ValueError(
                f"paged_attention: window={shown(window)} must be a whole number of 0 or more, "
                "known while tracing"
            )
        if size < longest:  # else it hides nothing
            options["window"] = size
    if logits_soft_cap is not None:
        options["logits_soft_cap"] = checked_soft_cap(_NAME, logits_soft_cap)
    if sinks is not None:
        sinks = checked_floating(_NAME, "sinks", sinks)
        if sinks.shape != (q.shape[-2],):
            raise ValueError(
                f"paged_attention: sinks is {sinks.dtype} of shape {sinks.shape}; it must be one "
                f"floating number for each query head, here ({q.shape[-2]},)"
            )
        options["sinks"] = sinks
    return options
