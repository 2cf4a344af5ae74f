"""Attention over pages in C++, on CPU: one library for equal blocks of queries and packed ones.

Prompts go through the tiles of flash attention, whose headers it includes, and single tokens read
keys and values where they lie.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.native import Library, declare, unavailable, why_not
from ejkernel.native.calling import call, call_handler
from ejkernel.ops import Invocation, Supports

from ...limits import COUNT
from ..arguments import SHORT_TYPES, Arguments, RaggedArguments
from ..ragged import in_blocks
from ..reference import LEARNED, implementation, ragged_implementation
from ..xla import RaggedPagedAttentionXlaConfig
from ..xla import attend as attend_by_xla

_HERE = pathlib.Path(__file__).resolve().parent
_HANDLER = "ejkernel_paged_attention"

LIBRARY = declare(
    Library(
        "paged_attention",
        _HERE / "cpp" / "paged_attention.cc",
        (_HANDLER,),
        headers=(_HERE.parents[1] / "flash_attention" / "native" / "cpp",),
    )
)


@dataclasses.dataclass(frozen=True)
class PagedAttentionCppConfig:
    """The sizes of tasks.

    Args:
      block_q: rows of a prompt that are worked on together: queries times the query heads of a key
        head.
      block_k: most keys in a tile of a prompt's scores; rounded to what the registers hold.
      split_k: keys of a sequence with few new tokens that a thread takes at a time, at most 1024.
    """

    block_q: Annotated[int, COUNT] = 192
    block_k: Annotated[int, COUNT] = 480
    split_k: Annotated[int, COUNT] = 256

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> PagedAttentionCppConfig:
        """Tasks so short that every thread has several: the last one keeps none waiting."""
        has_affinity = hasattr(os, "sched_getaffinity")
        threads = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        q, k_pages, _, table = inv.args[:4]
        rows = int(np.prod(q.shape[:-1]))
        keys = table.shape[0] * table.shape[1] * k_pages.shape[1]
        return cls(
            max(24, min(192, rows // (4 * threads))),
            max(1, 480 * 64 // max(64, q.shape[-1])),
            max(64, min(512, keys // (8 * threads))),
        )

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[PagedAttentionCppConfig]:
        first = cls.heuristic(inv)
        rows = int(np.prod(inv.args[0].shape[:-1])) // inv.args[1].shape[2]
        tiles = ((first.block_q, first.block_k), (96, 192), (192, 240), (192, 480))
        blocks = dict.fromkeys((min(block_q, max(24, rows)), block_k) for block_q, block_k in tiles)
        splits = dict.fromkeys((first.split_k, 128, 512))
        return [
            *(cls(block_q, block_k, first.split_k) for block_q, block_k in blocks),
            *(cls(first.block_q, first.block_k, split) for split in list(splits)[1:]),
        ]


def attend_packed(ragged: RaggedArguments, cfg: PagedAttentionCppConfig) -> jax.Array:
    """What `ragged_paged_attention_reference` gives."""
    fixed = {name: value for name, value in ragged.options.items() if name not in LEARNED}
    named = {name: ragged.options.get(name) for name in LEARNED}
    fields = ("q", "k_pages", "v_pages", "page_table", "lengths", "query_starts")
    arrays = tuple(getattr(ragged, name) for name in fields)

    def native(arrays: Any, named: dict[str, Any]) -> jax.Array:
        q, _, v_pages, *_ = arrays
        empty = jnp.zeros((0,), jnp.float32)
        more = (empty if x is None else x.astype(jnp.float32) for x in map(named.get, LEARNED))
        shape = (*q.shape[:2], v_pages.shape[3])
        window, cap = fixed.get("window"), fixed.get("logits_soft_cap")
        attributes = {
            "causal": np.int64(fixed.get("causal", True)),
            "window": np.int64(-1 if window is None else window),
            "scale": np.float32(fixed["softmax_scale"]),
            "soft_cap": np.float32(cap or 0.0),
            **{name: np.int64(value) for name, value in dataclasses.asdict(cfg).items()},
        }
        results, operands = ((shape, q.dtype),), (*arrays, *more)
        out: jax.Array = call_handler(
            _HANDLER, results, operands, attributes, vmap_method="sequential"
        )[0]
        return out

    def other(arrays: Any, named: dict[str, Any]) -> jax.Array:
        given = {name: value for name, value in named.items() if value is not None}
        own = dataclasses.replace(
            ragged, **dict(zip(fields, arrays, strict=True)), options={**fixed, **given}
        )
        return in_blocks(attend_by_xla)(own, RaggedPagedAttentionXlaConfig())

    out: jax.Array = call(native, other, arrays, named)
    return out


def attend(blocks: Arguments, cfg: PagedAttentionCppConfig) -> jax.Array:
    """What `paged_attention_reference` gives: every sequence has as many new tokens."""
    batch, tokens, heads, head_dim = blocks.q.shape
    options = {
        "softmax_scale": blocks.softmax_scale,
        "window": blocks.window,
        "logits_soft_cap": blocks.logits_soft_cap,
        "sinks": blocks.sinks,
    }
    starts = jnp.arange(batch + 1, dtype=jnp.int32) * tokens
    ragged = RaggedArguments(
        blocks.q.reshape(batch * tokens, heads, head_dim),
        *(blocks.k_pages, blocks.v_pages, blocks.page_table, blocks.lengths, starts),
        {name: value for name, value in options.items() if value is not None},
    )
    return attend_packed(ragged, cfg).reshape(batch, tokens, heads, -1)


def _is_available(inv: Invocation[Any, Any]) -> str | None:
    """A C++ compiler, or a library that was built before."""
    return unavailable(LIBRARY)


_DECLARED: dict[str, Any] = {
    "name": "cpu",
    "devices": ("cpu",),
    "config": PagedAttentionCppConfig,
    "supports": Supports(
        dtypes=("float32", "bfloat16", "float16", *SHORT_TYPES), rules=(_is_available,)
    ),
    "build": partial(why_not, LIBRARY),
}
CPP = implementation(attend, **_DECLARED)
RAGGED_CPP = ragged_implementation(attend_packed, **_DECLARED)
