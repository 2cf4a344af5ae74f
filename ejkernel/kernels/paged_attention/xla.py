"""Paged attention in plain JAX: only the pages in use are read, where they are.

Gathering a sequence's pages first, as the plain formulation does, writes and reads the whole table
once more, used or not. Here an outer loop walks over the sequences and an inner one over the pages
that each one has, with an online softmax. A step of one page slices it out of the cache, and XLA's
product reads the slice in place. A step of several gathers them first, which pays off where pages
are small; and where the whole cache is small, one step that gathers everything is fastest:
`PagedAttentionXlaConfig.heuristic`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation

from ..dtypes import accumulation_dtype
from ..limits import COUNT
from ..slicing import take_in_dim, take_rows
from .arguments import Arguments, hidden_score, lowest_maximum
from .reference import implementation

_GATHERED_AT_ONCE = 2**20  # bytes of keys, in float32


@dataclasses.dataclass(frozen=True)
class PagedAttentionXlaConfig:
    """How many pages of a sequence are worked on at a time.

    If those are all that a sequence may have, all sequences are worked on together.
    """

    pages_per_step: Annotated[int, COUNT] = 1

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> PagedAttentionXlaConfig:
        """One page, with a few exceptions.

        From interleaved timings (two Zen 3 cores), versus one page at a time: four pages with 8 KiB
        of keys took 0.7 to 0.97 of the time, eight of 4 KiB 0.75 to 1.0, but two of 16 KiB up to
        1.5 and four of 64 KiB 1.4. Where a key head has a single query, two pages of 64 keys took
        0.65 to 0.75. All such small pages of all sequences at once took 0.82 and 0.93 of the time
        of a few at a time with 0.5 and 1 MiB of keys; 1.7 with 2 MiB of which sequences used a
        half.
        """
        q, k_pages, _, table = inv.args[:4]
        (batch, tokens, heads, _), per_sequence = q.shape, table.shape[1]
        _, page_size, kv_heads, head_dim = k_pages.shape
        page_bytes = max(1, 4 * page_size * kv_heads * head_dim)
        small = 2**15 // page_bytes
        if tokens * heads == kv_heads and page_size >= 64:
            pages = 2
        elif small < 4:
            pages = 1
        elif batch * per_sequence * page_bytes <= _GATHERED_AT_ONCE:
            pages = per_sequence
        else:
            pages = min(small, 8)
        return cls(min(pages, per_sequence))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[PagedAttentionXlaConfig]:
        per_sequence = inv.args[3].shape[1]
        steps = [pages for pages in (1, 2, 4, 8) if pages < per_sequence]
        # All pages of all sequences are worth trying only where few of them may be unused.
        all_of_them = [per_sequence] if per_sequence <= 64 else []
        return [cls(pages) for pages in (*steps, *all_of_them)]


def attend(call: Arguments, cfg: PagedAttentionXlaConfig) -> jax.Array:
    """What `paged_attention_reference` gives."""
    k_pages, v_pages, lengths = call.k_pages, call.v_pages, call.lengths
    (batch, tokens, heads, _), (_, page_size, kv_heads, _) = call.q.shape, k_pages.shape
    group, value_dim = heads // kv_heads, v_pages.shape[3]
    step = min(cfg.pages_per_step, call.page_table.shape[1])
    keys = step * page_size
    table = jnp.pad(call.page_table, ((0, 0), (0, -call.page_table.shape[1] % step)))
    wide = accumulation_dtype(call.q.dtype)
    rows = call.softmax_scale * call.rows_of_key_heads().astype(wide)
    token = jnp.arange(tokens * group, dtype=jnp.int32) // group
    sink = None if (sinks := call.sink_rows()) is None else sinks[..., None]

    def tile(cache: jax.Array, numbers: jax.Array) -> jax.Array:
        found = take_in_dim(cache, numbers[0], 1) if step == 1 else take_rows(cache, numbers)
        return found.reshape(keys, *cache.shape[2:]).astype(wide)

    def only_seen(values: jax.Array, first: Any, length: jax.Array) -> jax.Array:
        """Zeros for keys that no query sees: there may be NaN, which no weight would hide."""
        key = first + jnp.arange(keys, dtype=jnp.int32)
        return jnp.where(call.seen(key, length)[:, None, None], values, 0.0)

    def scores(q_rows: jax.Array, k_tile: jax.Array, first: Any, length: jax.Array) -> jax.Array:
        """Of the keys from position `first` on; a finite number where a key is not seen."""
        found = call.capped(jnp.einsum("hrd,khd->hrk", q_rows, k_tile))
        key = first + jnp.arange(keys, dtype=jnp.int32)
        position = (length - tokens + token)[:, None]
        return jnp.where(call.visible(key, position), found, hidden_score(wide))

    def attend_at_once(q_rows: jax.Array, numbers: jax.Array, length: jax.Array) -> jax.Array:
        found = scores(q_rows, tile(k_pages, numbers), 0, length)
        values = only_seen(tile(v_pages, numbers), 0, length)
        return _Softmax.start(q_rows, value_dim).add(found, values).finish(sink)

    def attend_in_steps(sequence: jax.Array) -> jax.Array:
        length, q_rows = lengths[sequence], rows[sequence]

        def add_pages(j: jax.Array, softmax: _Softmax, *, last: bool = False) -> _Softmax:
            numbers = lax.dynamic_slice_in_dim(table[sequence], j * step, step)
            values = tile(v_pages, numbers)
            # Before its end a sequence's page holds its own values. Of several pages, some may have
            # been given to other sequences: those behind a window.
            if last or step > 1:
                values = only_seen(values, j * keys, length)
            return softmax.add(scores(q_rows, tile(k_pages, numbers), j * keys, length), values)

        first = call.first_block(length, keys)
        last = jnp.maximum(length - 1, 0) // keys
        start = _Softmax.start(q_rows, value_dim)
        met: _Softmax = lax.fori_loop(first, last, add_pages, start)
        return add_pages(last, met, last=True).finish(sink)

    out: jax.Array
    if table.shape[1] == step:
        out = jax.vmap(attend_at_once)(rows, table, lengths)
    else:
        out = lax.map(attend_in_steps, jnp.arange(batch, dtype=jnp.int32))
    return call.from_rows(out)


class _Softmax(NamedTuple):
    """The online softmax: what query rows remember of the keys they have met so far."""

    largest: jax.Array  # (kv_heads, rows, 1)
    total: jax.Array  # (kv_heads, rows, 1)
    weighted: jax.Array  # (kv_heads, rows, value_dim)

    @staticmethod
    def start(q_rows: jax.Array, value_dim: int) -> _Softmax:
        zeros = jnp.zeros_like(q_rows[..., :1])
        largest = zeros + lowest_maximum(zeros.dtype)
        return _Softmax(largest, zeros, jnp.broadcast_to(zeros, (*zeros.shape[:2], value_dim)))

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


XLA = implementation(attend, name="xla", config=PagedAttentionXlaConfig)
