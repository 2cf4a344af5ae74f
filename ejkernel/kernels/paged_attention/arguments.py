"""What a call of paged attention may look like: checked, and as implementations read it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arguments import (
    checked_floating,
    checked_integers,
    checked_number,
    checked_soft_cap,
    refuse_empty,
    shown,
)
from ..dtypes import accumulation_dtype
from ..integers import to_int32

_NAME = "paged_attention"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call, and which keys its queries see."""

    q: jax.Array  # (batch, tokens, heads, head_dim)
    k_pages: jax.Array  # (pages, page_size, kv_heads, head_dim)
    v_pages: jax.Array  # (pages, page_size, kv_heads, value_dim)
    page_table: jax.Array  # (batch, pages of a sequence), int32
    lengths: jax.Array  # (batch,), int32
    _: dataclasses.KW_ONLY
    softmax_scale: float
    window: int | None = None
    logits_soft_cap: float | None = None
    sinks: jax.Array | None = None

    @staticmethod
    def of(*args: jax.Array, **options: Any) -> Arguments:
        """From the arguments of the kernel."""
        q, k_pages, v_pages, table, lengths = args
        # Whatever stands in the table, nothing outside of the cache is read.
        inside = jnp.clip(table, 0, k_pages.shape[0] - 1).astype(jnp.int32)
        longest = table.shape[1] * k_pages.shape[1]
        lengths = jnp.clip(lengths, 0, longest).astype(jnp.int32)
        return Arguments(q, k_pages, v_pages, inside, lengths, **options)

    def visible(self, key: Any, position: Any) -> Any:
        """Whether a query at a position sees a key."""
        visible = key <= position
        return visible if self.window is None else visible & (key >= position - self.window)

    def seen(self, key: Any, length: Any) -> Any:
        """Whether any query of a sequence of this length sees a key."""
        seen = key < length
        if self.window is None:
            return seen
        return seen & (key >= length - self.q.shape[1] - self.window)

    def first_block(self, length: Any, size: int) -> Any:
        """The first block of this many keys that a query of a sequence of this length sees."""
        if self.window is None:
            return jnp.int32(0)
        first = jnp.maximum(length - self.q.shape[1] - self.window, 0)
        return lax.div(first, jnp.int32(size))

    def capped(self, scores: Any, tanh: Callable[[Any], Any] = jnp.tanh) -> Any:
        """The scores within the soft cap, if there is one."""
        if self.logits_soft_cap is None:
            return scores
        return self.logits_soft_cap * tanh(scores / self.logits_soft_cap)

    def rows_of_key_heads(self) -> jax.Array:
        """`(batch, kv_heads, rows, head_dim)`: row `r` is of token `r // (heads // kv_heads)`."""
        batch, tokens, heads, head_dim = self.q.shape
        kv_heads = self.k_pages.shape[2]
        rows = self.q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim).swapaxes(1, 2)
        return rows.reshape(batch, kv_heads, -1, head_dim)

    def from_rows(self, out: jax.Array) -> jax.Array:
        """The output from rows as those of `rows_of_key_heads`."""
        batch, tokens, heads, _ = self.q.shape
        kv_heads, value_dim = self.v_pages.shape[2:]
        out = out.astype(self.q.dtype)
        out = out.reshape(batch, kv_heads, tokens, heads // kv_heads, value_dim).swapaxes(1, 2)
        return out.reshape(batch, tokens, heads, value_dim)

    def sink_rows(self) -> jax.Array | None:
        """`(kv_heads, rows)`: the sink of each row."""
        if self.sinks is None:
            return None
        sinks = self.sinks.astype(accumulation_dtype(self.q.dtype))
        return jnp.tile(sinks.reshape(self.k_pages.shape[2], -1), (1, self.q.shape[1]))


def hidden_score(dtype: Any = np.float32) -> float:
    """The score of a key that a query does not see; `dtype` is that of the sums.

    It is finite, because -inf - -inf is NaN, and below every score there may be.
    """
    return float(np.finfo(dtype).min)


def lowest_maximum(dtype: Any = np.float32) -> float:
    """What the maximum of a row starts with.

    Above hidden scores, so that their exponential is exactly zero even in a row that has seen no
    key yet.
    """
    return hidden_score(dtype) / 2


HIDDEN_SCORE, LOWEST_MAXIMUM = hidden_score(), lowest_maximum()


def checked(
    q: Any, k_pages: Any, v_pages: Any, page_table: Any, lengths: Any, *options: Any
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong."""
    floating = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    q, k_pages, v_pages = (checked_floating(_NAME, name, x) for name, x in floating.items())
    page_table = checked_integers(_NAME, "page_table", page_table)
    lengths = checked_integers(_NAME, "lengths", lengths)
    _check_arrays(q, k_pages, v_pages)
    _check_table(q, k_pages, page_table, lengths)
    longest = page_table.shape[1] * k_pages.shape[1]
    page_table = to_int32(page_table, 0, k_pages.shape[0] - 1)
    lengths = to_int32(lengths, 0, longest)
    arrays = (q, k_pages, v_pages, page_table, lengths)
    return arrays, _checked_options(q, longest, *options)


def _check_arrays(q: Any, k_pages: Any, v_pages: Any) -> None:
    caches = "(pages, page_size, kv_heads, head_dim)"
    for name, array, ranks, meaning in (
        ("q", q, (3, 4), "(batch, heads, head_dim) or (batch, tokens, heads, head_dim)"),
        ("k_pages", k_pages, (4,), caches),
        ("v_pages", v_pages, (4,), caches),
    ):
        if array.ndim not in ranks:
            raise ValueError(f"{_NAME}: {name} has shape {array.shape}; it must be {meaning}")
        refuse_empty(_NAME, name, array)
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(
            f"{_NAME}: k_pages {k_pages.shape} and v_pages {v_pages.shape} differ in more "
            "than the last axis; they must have the same pages, page size and heads"
        )
    if q.shape[-1] != k_pages.shape[3]:
        raise ValueError(
            f"{_NAME}: q {q.shape} and k_pages {k_pages.shape} differ in head_dim, the last axis"
        )
    if q.shape[-2] % k_pages.shape[2]:
        raise ValueError(
            f"{_NAME}: q {q.shape} has {q.shape[-2]} heads and k_pages {k_pages.shape} has "
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
            raise ValueError(f"{_NAME}: {name} has shape {shape}; it must be {meaning}")
    if isinstance(page_table, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    table, used = np.asarray(page_table), np.asarray(lengths)
    pages, page_size = k_pages.shape[:2]
    holds = table.shape[1] * page_size
    if (used < 0).any() or (used > holds).any():
        raise ValueError(
            f"{_NAME}: lengths {lengths.shape} has values from {used.min()} to "
            f"{used.max()}; they must be from 0 to {holds}, what {table.shape[1]} pages of "
            f"{page_size} tokens hold"
        )
    in_use = np.arange(table.shape[1]) * page_size < used[:, None]
    wrong = in_use & ((table < 0) | (table >= pages))
    if wrong.any():
        sequence, place = np.argwhere(wrong)[0]
        raise ValueError(
            f"{_NAME}: page_table[{sequence}, {place}] is {table[sequence, place]}; "
            f"k_pages {k_pages.shape} has pages 0 to {pages - 1}"
        )


def _checked_options(
    q: Any, longest: int, softmax_scale: Any, window: Any, logits_soft_cap: Any, sinks: Any
) -> dict[str, Any]:
    """The options that are given, as the kernel takes them."""
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
                f"{_NAME}: window={shown(window)} must be a whole number of 0 or more, "
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
                f"{_NAME}: sinks is {sinks.dtype} of shape {sinks.shape}; it must be one "
                f"floating number for each query head, here ({q.shape[-2]},)"
            )
        options["sinks"] = sinks
    return options
