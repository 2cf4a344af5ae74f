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
from .ragged import block_q_for, in_blocks
from .reference import implementation, ragged_implementation

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


@dataclasses.dataclass(frozen=True)
class RaggedPagedAttentionXlaConfig:
    """How many queries of a prompt, and how many pages, are worked on at a time."""

    block_q: Annotated[int, COUNT] = 64
    pages_per_step: Annotated[int, COUNT] = 4

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> RaggedPagedAttentionXlaConfig:
        """Steps of about 64 keys; single tokens alone read a page at a time, where it lies."""
        q, k_pages, _, table = inv.args[:4]
        block_q = block_q_for(q.shape[0], table.shape[0], 64)
        pages = 1 if block_q == 1 else max(1, 64 // k_pages.shape[1])
        return cls(block_q, min(pages, table.shape[1]))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[RaggedPagedAttentionXlaConfig]:
        rows, per_sequence = inv.args[0].shape[0], inv.args[3].shape[1]
        blocks = [1] if rows <= inv.args[3].shape[0] else [min(b, rows) for b in (16, 64, 256)]
        steps = dict.fromkeys(min(pages, per_sequence) for pages in (1, 4, 16))
        return [cls(block_q, pages) for block_q in dict.fromkeys(blocks) for pages in steps]


def attend(
    call: Arguments, cfg: PagedAttentionXlaConfig | RaggedPagedAttentionXlaConfig
) -> jax.Array:
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

    def taken(cache: jax.Array, numbers: jax.Array) -> jax.Array:
        return take_in_dim(cache, numbers[0], 1) if step == 1 else take_rows(cache, numbers)

    def tile(cache: jax.Array, scale: jax.Array | None, numbers: jax.Array) -> jax.Array:
        found = taken(cache, numbers).astype(wide)
        if scale is not None:
            factor = scale if scale.ndim == 1 else taken(scale, numbers)
            factor = factor[:, None] if scale.ndim == 2 else factor
            found = found * factor.astype(wide)[..., None]
        return found.reshape(keys, *cache.shape[2:])

    def k_tile(numbers: jax.Array) -> jax.Array:
        return tile(k_pages, call.k_scale, numbers)

    def v_tile(numbers: jax.Array, first: Any, at: jax.Array | None) -> jax.Array:
        """With zeros where no query sees a key: there may be NaN, which no weight would hide."""
        values = tile(v_pages, call.v_scale, numbers)
        if at is None:
            return values
        key = first + jnp.arange(keys, dtype=jnp.int32)
        return jnp.where(call.seen(key, *at)[:, None, None], values, 0.0)

    def scores(q_rows: jax.Array, k: jax.Array, first: Any, at: jax.Array) -> jax.Array:
        """Of the keys from position `first` on; a finite number where a key is not seen."""
        length, end = at
        found = call.capped(jnp.einsum("hrd,khd->hrk", q_rows, k))
        key = first + jnp.arange(keys, dtype=jnp.int32)
        position = (end - tokens + token)[:, None]
        return jnp.where(call.visible(key, position, length), found, hidden_score(wide))

    def attend_at_once(q_rows: jax.Array, numbers: jax.Array, at: jax.Array) -> jax.Array:
        found = scores(q_rows, k_tile(numbers), 0, at)
        return _Softmax.start(q_rows, value_dim).add(found, v_tile(numbers, 0, at)).finish(sink)

    def attend_in_steps(block: jax.Array) -> jax.Array:
        (length, end), q_rows = spans[block], rows[block]

        def add_pages(j: jax.Array, softmax: _Softmax, *, last: bool = False) -> _Softmax:
            numbers = lax.dynamic_slice_in_dim(table[block], j * step, step)
            # Before its end a sequence's page holds its own values. Of several pages, some may have
            # been given to other sequences: those behind a window.
            values = v_tile(numbers, j * keys, spans[block] if last or step > 1 else None)
            return softmax.add(scores(q_rows, k_tile(numbers), j * keys, spans[block]), values)

        first = call.first_block(end, keys)
        last = jnp.maximum(length - 1, 0) // keys
        start = _Softmax.start(q_rows, value_dim)
        met: _Softmax = lax.fori_loop(first, last, add_pages, start)
        return add_pages(last, met, last=True).finish(sink)

    spans = jnp.stack([lengths, call.ends], axis=1)
    out: jax.Array
    if table.shape[1] == step:
        out = jax.vmap(attend_at_once)(rows, table, spans)
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
RAGGED_XLA = ragged_implementation(
    in_blocks(attend), name="xla", config=RaggedPagedAttentionXlaConfig
)
