"""Packed queries of many sequences, as blocks of queries that all lie in one sequence.

Prompts are cut into blocks of `block_q` tokens, and sequences with a single new token are blocks of
one: what works on equal blocks, `PagedAttention`, then works on both, and neither pays for the
other. How many blocks of either kind there are is known by shape, as an upper limit; those that a
step does not need have no keys, and cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .arguments import Arguments, RaggedArguments


def in_blocks(
    attend: Callable[[Arguments, Any], jax.Array],
) -> Callable[[RaggedArguments, Any], jax.Array]:
    """`attend(call, cfg)` of packed queries, from that of equal blocks; `cfg` has a `block_q`."""

    def attend_packed(call: RaggedArguments, cfg: Any) -> jax.Array:
        rows, sequences = call.q.shape[0], call.lengths.shape[0]
        sequence, position = call.places()
        done = jnp.arange(rows, dtype=jnp.int32) - call.query_starts[sequence]

        def out_of(tokens: int, most: int, has_rows: Any) -> jax.Array:
            blocks, first = call.blocks(tokens, most, has_rows)
            place = jnp.clip(first[sequence] + done // tokens, 0, most - 1)
            return attend(blocks, cfg)[place, done % tokens]

        tokens = min(cfg.block_q, rows)
        if tokens == 1:
            out = out_of(1, rows, True)
        else:
            single = jnp.diff(call.query_starts) == 1
            # Of every other sequence's blocks all but the last are full.
            prompts = out_of(tokens, rows // tokens + min(sequences, rows // 2), ~single)
            tokens_alone = out_of(1, min(sequences, rows), single)
            out = jnp.where(single[sequence][:, None, None], tokens_alone, prompts)
        return jnp.where((position >= 0)[:, None, None], out, jnp.zeros_like(out))

    return attend_packed


def block_q_for(rows: int, sequences: int, block_q: int) -> int:
    """One where every sequence has one new token, else so many."""
    return 1 if rows <= sequences else min(block_q, rows)
