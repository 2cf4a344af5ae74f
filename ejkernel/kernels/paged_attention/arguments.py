"""What calls of attention over pages may look like: checked, and as implementations read them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arguments import (
    checked_array,
    checked_flag,
    checked_floating,
    checked_integers,
    checked_number,
    checked_soft_cap,
    refuse_empty,
    shown,
)
from ..dtypes import accumulation_dtype
from ..integers import to_int32

SHORT_TYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""What pages may be in addition to the floating types of 16 bits or more."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Blocks of queries, each of neighbours in one sequence, and which keys they see."""

    q: jax.Array  # (batch, tokens, heads, head_dim)
    k_pages: jax.Array  # (pages, page_size, kv_heads, head_dim)
    v_pages: jax.Array  # (pages, page_size, kv_heads, value_dim)
    page_table: jax.Array  # (batch, pages of a sequence), int32
    lengths: jax.Array  # (batch,), int32: keys that there are
    ends: jax.Array  # (batch,), int32: the position behind the last query
    _: dataclasses.KW_ONLY
    softmax_scale: float
    causal: bool = True
    window: int | None = None
    logits_soft_cap: float | None = None
    sinks: jax.Array | None = None
    k_scale: jax.Array | None = None  # (kv_heads,), (pages, kv_heads) or (pages, page_size, …)
    v_scale: jax.Array | None = None

    @staticmethod
    def of(*args: jax.Array, **options: Any) -> Arguments:
        """From the arguments of `PagedAttention`: the queries are the last of their sequence."""
        q, k_pages, v_pages, table, lengths = args
        table, lengths = clamped(table, lengths, k_pages)
        return Arguments(q, k_pages, v_pages, table, lengths, lengths, **options)

    def visible(self, key: Any, position: Any, length: Any) -> Any:
        """Whether a query at a position sees a key, in a sequence of this length."""
        visible = key < length
        if self.causal:
            visible &= key <= position
        return visible if self.window is None else visible & (key >= position - self.window)

    def seen(self, key: Any, length: Any, end: Any) -> Any:
        """Whether any query of a block that ends there sees a key."""
        seen = key < length
        if self.window is None:
            return seen
        return seen & (key >= end - self.q.shape[1] - self.window)

    def first_block(self, end: Any, size: int) -> Any:
        """The first block of this many keys that a query of a block that ends there sees."""
        if self.window is None:
            return jnp.int32(0)
        first = jnp.maximum(end - self.q.shape[1] - self.window, 0)
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


@dataclasses.dataclass(frozen=True)
class RaggedArguments:
    """Packed queries of many sequences."""

    q: jax.Array  # (rows, heads, head_dim)
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array  # (sequences, pages of a sequence), int32
    lengths: jax.Array  # (sequences,), int32
    query_starts: jax.Array  # (sequences + 1,), int32, rising
    options: Mapping[str, Any]

    @staticmethod
    def of(*args: jax.Array, **options: Any) -> RaggedArguments:
        """From the arguments of `RaggedPagedAttention`."""
        q, k_pages, v_pages, table, lengths, starts = args
        table, lengths = clamped(table, lengths, k_pages)
        return RaggedArguments(
            q, k_pages, v_pages, table, lengths, rising(starts, q.shape[0]), options
        )

    def places(self) -> tuple[jax.Array, jax.Array]:
        """The sequence of every row, and its position there: below 0 if it belongs to nobody."""
        return places(self.query_starts, self.lengths, self.q.shape[0])

    def blocks(self, tokens: int, most: int, has_rows: Any) -> tuple[Arguments, jax.Array]:
        """The rows of some sequences in blocks of so many, and the first block of each sequence.

        Of what sequence `s` has, row `i` is row `i % tokens` of block `first[s] + i // tokens`.
        There are `most` blocks; those that nobody needs, at the end, have no keys.
        """
        rows, sequences = self.q.shape[0], self.lengths.shape[0]
        starts, counts = self.query_starts[:-1], jnp.diff(self.query_starts)
        counts = jnp.where(has_rows, counts, 0)
        last = jnp.cumsum(-(-counts // tokens), dtype=jnp.int32)
        first = jnp.concatenate([jnp.zeros((1,), jnp.int32), last[:-1]])
        block = jnp.arange(most, dtype=jnp.int32)
        owner = jnp.searchsorted(last, block, side="right").astype(jnp.int32)
        in_use, owner = owner < sequences, jnp.minimum(owner, sequences - 1)
        done = (block - first[owner]) * tokens
        row = starts[owner] + done
        begin = self.lengths[owner] - counts[owner] + done  # the position of the first query
        keys = self.lengths[owner]
        if self.options.get("causal", True):  # no query of the block sees what comes after it
            keys = jnp.clip(begin + tokens, 0, keys)
        q = self.q[jnp.minimum(row[:, None] + jnp.arange(tokens), rows - 1)]
        keys = jnp.where(in_use, keys, 0)
        table = self.page_table[owner]
        call = Arguments(q, self.k_pages, self.v_pages, table, keys, begin + tokens, **self.options)
        return call, first


def clamped(table: Any, lengths: Any, k_pages: Any) -> tuple[jax.Array, jax.Array]:
    """Whatever stands in them, nothing outside of the cache is read."""
    longest = table.shape[1] * k_pages.shape[1]
    table = jnp.clip(table, 0, k_pages.shape[0] - 1).astype(jnp.int32)
    return table, jnp.clip(lengths, 0, longest).astype(jnp.int32)


def rising(starts: jax.Array, rows: int) -> jax.Array:
    """The first row of each sequence, and the end of the last: within the rows, and none before
    its predecessor."""
    return lax.cummax(jnp.clip(starts, 0, rows).astype(jnp.int32))


def places(starts: jax.Array, lengths: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The sequence of every row, and its position there: below 0 if it belongs to nobody."""
    row = jnp.arange(rows, dtype=jnp.int32)
    sequence = jnp.searchsorted(starts, row, side="right").astype(jnp.int32) - 1
    owned = (sequence >= 0) & (sequence < lengths.shape[0])
    sequence = jnp.clip(sequence, 0, lengths.shape[0] - 1)
    position = lengths[sequence] - starts[sequence + 1] + row
    return sequence, jnp.where(owned, position, -1)


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
    q: Any, k_pages: Any, v_pages: Any, page_table: Any, lengths: Any, **options: Any
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The arguments and keywords of `PagedAttention` from those of a user; errors name what is
    wrong."""
    name = "paged_attention"
    arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    q, k_pages, v_pages = (checked_floating(name, which, x) for which, x in arrays.items())
    meaning = "(batch, heads, head_dim) or (batch, tokens, heads, head_dim)"
    check_pages(name, k_pages, v_pages, {"q": (q, (3, 4), meaning)})
    _check_heads(name, q, k_pages)
    page_table, lengths = checked_table(name, page_table, lengths, k_pages, batch=q.shape[0])
    longest = page_table.shape[1] * k_pages.shape[1]
    return (q, k_pages, v_pages, page_table, lengths), _options(name, q, longest, **options)


def checked_ragged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    query_starts: Any,
    *,
    causal: Any,
    k_scale: Any,
    v_scale: Any,
    **options: Any,
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The same for `RaggedPagedAttention`."""
    name = "ragged_paged_attention"
    q = checked_floating(name, "q", q)
    k_pages, v_pages = checked_pages(name, k_pages, v_pages)
    check_pages(name, k_pages, v_pages, {"q": (q, (3,), "(tokens, heads, head_dim)")})
    _check_heads(name, q, k_pages)
    page_table, lengths = checked_table(name, page_table, lengths, k_pages)
    query_starts = checked_starts(name, query_starts, lengths, q.shape[0])
    longest = page_table.shape[1] * k_pages.shape[1]
    keywords = _options(name, q, longest, **options)
    if not checked_flag(name, "causal", causal):
        keywords["causal"] = False
    for which, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            keywords[which] = checked_scale(name, which, scale, k_pages)
    return (q, k_pages, v_pages, page_table, lengths, query_starts), keywords


def checked_pages(operation: str, *pages: Any) -> list[jax.Array]:
    """The keys' and the values' pages: of a floating type, or of a short one."""
    found = []
    for name, value in zip(("k_pages", "v_pages"), pages, strict=True):
        array = checked_array(operation, name, value)
        if array.dtype.name not in SHORT_TYPES:
            array = checked_floating(operation, name, array)
        found.append(array)
    return found


def check_pages(
    operation: str, k_pages: Any, v_pages: Any, others: Mapping[str, tuple[Any, Any, str]]
) -> None:
    """Raise if pages do not belong together, or if they or others have the wrong rank."""
    caches = "(pages, page_size, kv_heads, head_dim)"
    own = {"k_pages": (k_pages, (4,), caches), "v_pages": (v_pages, (4,), caches)}
    for name, (array, ranks, meaning) in {**others, **own}.items():
        if array.ndim not in ranks:
            raise ValueError(f"{operation}: {name} has shape {array.shape}; it must be {meaning}")
        refuse_empty(operation, name, array)
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(
            f"{operation}: k_pages {k_pages.shape} and v_pages {v_pages.shape} differ in more "
            "than the last axis; they must have the same pages, page size and heads"
        )


def _check_heads(operation: str, q: Any, k_pages: Any) -> None:
    if q.shape[-1] != k_pages.shape[3]:
        raise ValueError(
            f"{operation}: q {q.shape} and k_pages {k_pages.shape} differ in head_dim, the last "
            "axis"
        )
    if q.shape[-2] % k_pages.shape[2]:
        raise ValueError(
            f"{operation}: q {q.shape} has {q.shape[-2]} heads and k_pages {k_pages.shape} has "
            f"{k_pages.shape[2]}; the query heads must be a multiple of the key heads"
        )


def checked_table(
    operation: str,
    page_table: Any,
    lengths: Any,
    k_pages: Any,
    *,
    batch: int | None = None,
    clamp: bool = True,
) -> tuple[Any, Any]:
    """The page table and the lengths as int32; refused where they are known and do not fit.

    Without `clamp` what does not fit stays recognisable: pages of -1, and lengths beyond the table.
    """
    table = checked_integers(operation, "page_table", page_table)
    used = checked_integers(operation, "lengths", lengths)
    if batch is None:
        axis, batch = "sequences", table.shape[0] if table.ndim else 0
    else:
        axis = "batch"
    for name, array, rank, meaning in (
        ("page_table", table, 2, f"({axis}, pages_per_sequence), here ({batch}, …)"),
        ("lengths", used, 1, f"({axis},), here ({batch},)"),
    ):
        shape = array.shape
        if len(shape) != rank or shape[0] != batch or 0 in shape:
            raise ValueError(f"{operation}: {name} has shape {shape}; it must be {meaning}")
    if not isinstance(table, jax.core.Tracer) and not isinstance(used, jax.core.Tracer):
        _check_table_values(operation, table, used, k_pages)
    more = 0 if clamp else 1
    table, last = to_int32(table, -more, k_pages.shape[0] - 1 + more), table.shape[1]
    return table, to_int32(used, 0, last * k_pages.shape[1] + more * 2**30)


def _check_table_values(operation: str, page_table: Any, lengths: Any, k_pages: Any) -> None:
    if isinstance(page_table, jax.ShapeDtypeStruct) or isinstance(lengths, jax.ShapeDtypeStruct):
        return
    table, used = np.asarray(page_table), np.asarray(lengths)
    pages, page_size = k_pages.shape[:2]
    holds = table.shape[1] * page_size
    if (used < 0).any() or (used > holds).any():
        raise ValueError(
            f"{operation}: lengths {lengths.shape} has values from {used.min()} to "
            f"{used.max()}; they must be from 0 to {holds}, what {table.shape[1]} pages of "
            f"{page_size} tokens hold"
        )
    in_use = np.arange(table.shape[1]) * page_size < used[:, None]
    wrong = in_use & ((table < 0) | (table >= pages))
    if wrong.any():
        sequence, place = np.argwhere(wrong)[0]
        raise ValueError(
            f"{operation}: page_table[{sequence}, {place}] is {table[sequence, place]}; "
            f"k_pages {k_pages.shape} has pages 0 to {pages - 1}"
        )


def checked_starts(operation: str, query_starts: Any, lengths: Any, rows: int) -> Any:
    """The first row of each sequence and the end of the last, as int32."""
    starts = checked_integers(operation, "query_starts", query_starts)
    wanted = lengths.shape[0] + 1
    if starts.shape != (wanted,):
        raise ValueError(
            f"{operation}: query_starts has shape {starts.shape}; it must be (sequences + 1,), "
            f"here ({wanted},)"
        )
    known = (jax.core.Tracer, jax.ShapeDtypeStruct)
    if not isinstance(starts, known):
        values = np.asarray(starts).astype(np.int64)
        if (np.diff(values) < 0).any() or values[0] < 0 or values[-1] > rows:
            raise ValueError(
                f"{operation}: query_starts is {shown(values.tolist())}; it must rise from 0 or "
                f"more to at most {rows}, the rows there are"
            )
        if not isinstance(lengths, known) and (np.diff(values) > np.asarray(lengths)).any():
            s = int(np.argmax(np.diff(values) > np.asarray(lengths)))
            raise ValueError(
                f"{operation}: query_starts gives sequence {s} {np.diff(values)[s]} new tokens, "
                f"and lengths[{s}] is {int(lengths[s])}; new tokens count in the length"
            )
    return to_int32(starts, 0, rows)


def checked_scale(operation: str, name: str, scale: Any, k_pages: Any) -> jax.Array:
    """What pages are multiplied by: for each head, page and head, or token and head."""
    array = checked_floating(operation, name, scale)
    pages, page_size, kv_heads = k_pages.shape[:3]
    allowed = ((kv_heads,), (pages, kv_heads), (pages, page_size, kv_heads))
    if array.shape not in allowed:
        raise ValueError(
            f"{operation}: {name} has shape {array.shape}; it must be one of "
            f"{', '.join(map(str, allowed))}: for each key head, page and head, or token and head"
        )
    return array


def _options(
    operation: str,
    q: Any,
    longest: int,
    *,
    softmax_scale: Any,
    window: Any,
    logits_soft_cap: Any,
    sinks: Any,
) -> dict[str, Any]:
    """The options that are given, as the kernel takes them."""
    scale = q.shape[-1] ** -0.5
    if softmax_scale is not None:
        advice = "for a learned scale multiply q by it"
        scale = checked_number(operation, "softmax_scale", softmax_scale, advice=advice)
    options: dict[str, Any] = {"softmax_scale": scale}
    if window is not None:
        try:
            size = -1 if isinstance(window, (bool, np.bool_)) else operator.index(window)
        except (TypeError, jax.errors.JAXTypeError):
            size = -1
        if size < 0:
            raise ValueError(
                f"{operation}: window={shown(window)} must be a whole number of 0 or more, "
                "known while tracing"
            )
        if size < longest:  # else it hides nothing
            options["window"] = size
    if logits_soft_cap is not None:
        options["logits_soft_cap"] = checked_soft_cap(operation, logits_soft_cap)
    if sinks is not None:
        sinks = checked_floating(operation, "sinks", sinks)
        if sinks.shape != (q.shape[-2],):
            raise ValueError(
                f"{operation}: sinks is {sinks.dtype} of shape {sinks.shape}; it must be one "
                f"floating number for each query head, here ({q.shape[-2]},)"
            )
        options["sinks"] = sinks
    return options
