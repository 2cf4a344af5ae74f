"""Paged attention in plain JAX: only the pages in use are read, where they are.

Gathering a sequence's pages first, as the plain formulation does, writes and reads the whole table
once more, used or not. Here an outer loop walks over the sequences and an inner one over the pages
that each one has, with an online softmax. A step of one page slices it out of the cache, and XLA's
product reads the slice in place. A step of several gathers them first, which pays off where pages
are small; and where the whole cache is small, one step that gathers everything is fastest:
`default_pages_per_step`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..dtypes import accumulation_dtype
from ..promotion import usual_promotion
from ..slicing import take_in_dim, take_rows
from .hidden import hidden_score, lowest_maximum

_GATHERED_AT_ONCE = 2**20  # bytes of keys, in float32


@usual_promotion
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
    """What `paged_attention_reference` gives; `pages_per_step` pages are worked on at a time.

    If those are all that a sequence may have, all sequences are worked on together.
    """
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
    wide = accumulation_dtype(q.dtype)
    rows = softmax_scale * rows.astype(wide)
    token = jnp.arange(tokens * group, dtype=jnp.int32) // group
    sink = None if sinks is None else _sink_rows(sinks.astype(wide), kv_heads, tokens)

    def tile(cache: jax.Array, numbers: jax.Array) -> jax.Array:
        found = take_in_dim(cache, numbers[0], 1) if step == 1 else take_rows(cache, numbers)
        return found.reshape(keys, *cache.shape[2:]).astype(wide)

    def only_seen(values: jax.Array, first: Any, length: jax.Array) -> jax.Array:
        """Zeros for keys that no query sees: there may be NaN, which no weight would hide."""
        key = first + jnp.arange(keys, dtype=jnp.int32)
        seen = key < length
        if window is not None:
            seen &= key >= length - tokens - window
        return jnp.where(seen[:, None, None], values, 0.0)

    def scores(q_rows: jax.Array, k_tile: jax.Array, first: Any, length: jax.Array) -> jax.Array:
        """Of the keys from position `first` on; a finite number where a key is not seen."""
        found = jnp.einsum("hrd,khd->hrk", q_rows, k_tile)
        if logits_soft_cap is not None:
            found = logits_soft_cap * jnp.tanh(found / logits_soft_cap)
        key = first + jnp.arange(keys, dtype=jnp.int32)
        position = (length - tokens + token)[:, None]
        visible = key <= position
        if window is not None:
            visible &= key >= position - window
        return jnp.where(visible, found, hidden_score(wide))

    def attend_at_once(q_rows: jax.Array, numbers: jax.Array, length: jax.Array) -> jax.Array:
        found = scores(q_rows, tile(k_pages, numbers), 0, length)
        values = only_seen(tile(v_pages, numbers), 0, length)
        return _Softmax.start(q_rows, value_dim).add(found, values).finish(sink)

    def attend(sequence: jax.Array) -> jax.Array:
        length, q_rows = lengths[sequence], rows[sequence]

        def add_pages(j: jax.Array, softmax: _Softmax, *, last: bool = False) -> _Softmax:
            numbers = lax.dynamic_slice_in_dim(table[sequence], j * step, step)
            values = tile(v_pages, numbers)
            # Before its end a sequence's page holds its own values. Of several pages, some may have
            # been given to other sequences: those behind a window.
            if last or step > 1:
                values = only_seen(values, j * keys, length)
            return softmax.add(scores(q_rows, tile(k_pages, numbers), j * keys, length), values)

        first = jnp.int32(0) if window is None else jnp.maximum(length - tokens - window, 0) // keys
        last = jnp.maximum(length - 1, 0) // keys
        start = _Softmax.start(q_rows, value_dim)
        met: _Softmax = lax.fori_loop(first, last, add_pages, start)
        return add_pages(last, met, last=True).finish(sink)

    out: jax.Array
    if table.shape[1] == step:
        out = jax.vmap(attend_at_once)(rows, table, lengths)
    else:
        out = lax.map(attend, jnp.arange(batch, dtype=jnp.int32))
    out = out.astype(q.dtype).reshape(batch, kv_heads, tokens, group, value_dim).swapaxes(1, 2)
    return out.reshape(batch, tokens, heads, value_dim)


def default_pages_per_step(
    q_shape: tuple[int, ...], pages_shape: tuple[int, ...], per_sequence: int
) -> int:
    """One, with a few exceptions.

    From interleaved timings (two Zen 3 cores), beside one page at a time: four pages with 8 KiB of
    keys took 0.7 to 0.97 of the time, eight of 4 KiB 0.75 to 1.0, but two of 16 KiB up to 1.5 and
    four of 64 KiB 1.4. Where a key head has a single query, two pages of 64 keys took 0.65 to 0.75.
    All such small pages of all sequences at once took 0.82 and 0.93 of the time of a few at a time
    with 0.5 and 1 MiB of keys; 1.7 with 2 MiB of which sequences used a half.
    """
    batch, tokens, heads, _ = q_shape
    _, page_size, kv_heads, head_dim = pages_shape
    if tokens * heads == kv_heads and page_size >= 64:
        return min(2, per_sequence)
    page_bytes = max(1, 4 * page_size * kv_heads * head_dim)
    small = 2**15 // page_bytes
    if small >= 4 and batch * per_sequence * page_bytes <= _GATHERED_AT_ONCE:
        return per_sequence
    return min(small, 8, per_sequence) if small >= 4 else 1


def _sink_rows(sinks: jax.Array, kv_heads: int, tokens: int) -> jax.Array:
    """`(kv_heads, tokens * group, 1)`: the sink of each row."""
    return jnp.tile(sinks.reshape(kv_heads, -1), (1, tokens))[..., None]


class _Softmax(NamedTuple):
    """The online softmax: what query rows remember of the keys they have met so far."""

    largest: jax.Array  # (kv_heads, rows, 1)
    total: jax.Array  # (kv_heads, rows, 1)
    weighted: jax.Array  # (kv_heads, rows, value_dim)

    @staticmethod
    def start(q_rows: jax.Array, value_dim: int) -> _Softmax:
        zeros = jnp.zeros_like(q_rows[..., :1])
        return _Softmax(
            zeros + lowest_maximum(zeros.dtype),
            zeros,
            jnp.broadcast_to(zeros, (*zeros.shape[:2], value_dim)),
        )

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
