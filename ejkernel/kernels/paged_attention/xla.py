"""Paged attention in plain JAX: only the pages in use are read, where they are.

Gathering a sequence's pages first, as the plain formulation does, writes and reads the whole table
once more, used or not. Here an outer loop walks over the sequences and an inner one over the pages
that each one has, with an online softmax. A step of one page slices it out of the cache, and XLA's
product reads the slice in place. A step of several gathers them first, which pays off where pages
are small: `default_pages_per_step`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..slicing import take_in_dim, take_rows

# Both are finite, because -inf - -inf is NaN. The maximum starts above hidden scores, so that their
# exponential is exactly zero even in a row that has seen no key yet.
_HIDDEN_SCORE = -1e30
_LOWEST_MAXIMUM = -0.5e30


def forward(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    softmax_scale: float,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    pages_per_step: int = 1,
) -> jax.Array:
    """What `paged_attention_reference` gives; `pages_per_step` pages are worked on at a time."""
    batch, tokens, heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k_pages.shape
    value_dim = v_pages.shape[3]
    group = heads // kv_heads
    step = min(pages_per_step, page_table.shape[1])
    keys = step * page_size
    # Whatever stands in the table, nothing outside of the cache is read.
    table = jnp.clip(page_table, 0, pages - 1).astype(jnp.int32)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % step)))
    lengths = jnp.clip(lengths, 0, page_table.shape[1] * page_size).astype(jnp.int32)
    # The queries of a key head are rows of one product: row r is token r // group.
    rows = q.reshape(batch, tokens, kv_heads, group, head_dim).swapaxes(1, 2)
    rows = rows.reshape(batch, kv_heads, tokens * group, head_dim)
    token = jnp.arange(tokens * group) // group
    sink = None if sinks is None else _sink_rows(sinks, kv_heads, tokens)

    def attend(sequence: jax.Array) -> jax.Array:
        length = lengths[sequence]
        position = (length - tokens + token)[:, None]
        q_rows = softmax_scale * rows[sequence].astype(jnp.float32)

        def tile(cache: jax.Array, j: jax.Array) -> jax.Array:
            if step == 1:
                found = take_in_dim(cache, table[sequence, j], 1)
            else:
                found = take_rows(cache, lax.dynamic_slice_in_dim(table[sequence], j * step, step))
            return found.reshape(keys, *cache.shape[2:]).astype(jnp.float32)

        def add_pages(j: jax.Array, softmax: _Softmax) -> _Softmax:
            scores = jnp.einsum("hrd,khd->hrk", q_rows, tile(k_pages, j))
            if logits_soft_cap is not None:
                scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
            key = j * keys + jnp.arange(keys)
            visible = key <= position
            if window is not None:
                visible &= key >= position - window
            return softmax.add(jnp.where(visible, scores, _HIDDEN_SCORE), tile(v_pages, j))

        first = 0 if window is None else jnp.maximum(length - tokens - window, 0) // keys
        end = (length + keys - 1) // keys
        zeros = jnp.zeros_like(q_rows[..., :1])
        start = _Softmax(
            zeros + _LOWEST_MAXIMUM, zeros, jnp.broadcast_to(zeros, (*zeros.shape[:2], value_dim))
        )
        met: _Softmax = lax.fori_loop(first, end, add_pages, start)
        return met.finish(sink)

    out: jax.Array = lax.map(attend, jnp.arange(batch, dtype=jnp.int32)).astype(q.dtype)
    out = out.reshape(batch, kv_heads, tokens, group, value_dim).swapaxes(1, 2)
    return out.reshape(batch, tokens, heads, value_dim)


def default_pages_per_step(
    q_shape: tuple[int, ...], pages_shape: tuple[int, ...], per_sequence: int
) -> int:
    """One, with a few exceptions.

    From interleaved timings (two Zen 3 cores), beside one page at a time: four pages with 8 KiB of
    keys took 0.7 to 0.97 of the time, eight of 4 KiB 0.75 to 1.0, but two of 16 KiB up to 1.5 and
    four of 64 KiB 1.4. Where a key head has a single query, two pages of 64 keys took 0.65 to 0.75.
    """
    _, tokens, heads, _ = q_shape
    _, page_size, kv_heads, head_dim = pages_shape
    if tokens * heads == kv_heads and page_size >= 64:
        return min(2, per_sequence)
    small = 2**15 // max(1, 4 * page_size * kv_heads * head_dim)
    return min(small, 8, per_sequence) if small >= 4 else 1


def _sink_rows(sinks: jax.Array, kv_heads: int, tokens: int) -> jax.Array:
    """`(kv_heads, tokens * group, 1)`: the sink of each row."""
    return jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1), (1, tokens))[..., None]


class _Softmax(NamedTuple):
    """The online softmax: what query rows remember of the keys they have met so far."""

    largest: jax.Array  # (kv_heads, rows, 1)
    total: jax.Array  # (kv_heads, rows, 1)
    weighted: jax.Array  # (kv_heads, rows, value_dim)

    def add(self, scores: jax.Array, values: jax.Array) -> _Softmax:
        largest = jnp.maximum(self.largest, jnp.max(scores, axis=-1, keepdims=True))
        shrink = jnp.exp(self.largest - largest)
        weights = jnp.exp(scores - largest)
        total = shrink * self.total + jnp.sum(weights, axis=-1, keepdims=True)
        weighted = shrink * self.weighted + jnp.einsum("hrk,khd->hrd", weights, values)
        return _Softmax(largest, total, weighted)

    def finish(self, sink: jax.Array | None) -> jax.Array:
        """The output; zeros where no key was met."""
        empty = self.total == 0.0
        total, weighted = self.total, self.weighted
        if sink is not None:
            largest = jnp.maximum(self.largest, sink)
            shrink = jnp.exp(self.largest - largest)
            total, weighted = shrink * total + jnp.exp(sink - largest), shrink * weighted
        return jnp.where(empty, 0.0, weighted / jnp.where(empty, 1.0, total))
