"""Ragged paged attention versus memory, torch, flash attention, and JAX that gathers pages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.side_by_side import Bound, Call, Comparison, outside_jax
from ejkernel.kernels.paged_attention import RaggedPagedAttention
from ejkernel.modules import flash_attention, ragged_paged_attention, update_pages

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LONGEST = 32, 8, 128, 16, 2048
SEQUENCES = 16


def gathered(q, k_pages, v_pages, page_table, lengths, query_starts):
    """The plain JAX formulation of one token per sequence: gather, scores, softmax, product."""
    batch = page_table.shape[0]
    k, v = (x[page_table].reshape(batch, -1, KV_HEADS, HEAD_DIM) for x in (k_pages, v_pages))
    grouped = q.reshape(batch, KV_HEADS, -1, HEAD_DIM) * HEAD_DIM**-0.5
    scores = jnp.einsum("bhgd,bkhd->bhgk", grouped, k)
    visible = jnp.arange(scores.shape[-1]) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bhgk,bkhd->bhgd", weights, v).reshape(q.shape)


def read(*arrays):
    """The bytes of as many keys and values as there are, read once; and what attention gives."""
    *_, k_read, v_read, expected = arrays
    return expected + 0.0 * (jnp.sum(k_read) + jnp.sum(v_read))


def arguments(lengths: np.ndarray, new: np.ndarray, *, in_order: bool = False) -> tuple[Any, ...]:
    """Packed tokens, pages in any order or one after the other."""
    rng = np.random.default_rng(0)
    per_sequence = -(-int(lengths.max()) // PAGE_SIZE)
    pages = len(lengths) * per_sequence
    order = np.arange(pages) if in_order else rng.permutation(pages)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    return (
        normal(int(new.sum()), HEADS, HEAD_DIM),
        normal(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM),
        normal(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM),
        jnp.asarray(order.reshape(len(lengths), per_sequence), jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32),
    )


def decoding() -> tuple[Any, ...]:
    lengths = np.linspace(512, LONGEST, SEQUENCES).astype(int)
    return arguments(lengths, np.ones(SEQUENCES, int))


def with_memory() -> tuple[Any, ...]:
    """The same, arrays of as many bytes as are read of the pages, and the result."""
    args = decoding()
    keys = int(args[4].sum())
    once = jnp.ones((keys * KV_HEADS * HEAD_DIM,))
    return (*args, once, once + 1.0, jax.jit(ragged_paged_attention)(*args))


def quantised() -> tuple[Any, ...]:
    """Pages of int8 with scales, and pages of float32 that hold the same numbers."""
    q, k_pages, v_pages, *where = decoding()
    scale = jnp.full(k_pages.shape[:3], 1 / 32)
    short = [jnp.clip(jnp.round(x * 32), -127, 127).astype(jnp.int8) for x in (k_pages, v_pages)]
    return q, *short, *(x.astype(jnp.float32) / 32 for x in short), scale, *where


def mixed() -> tuple[Any, ...]:
    """Two prompts of 512, and 14 sequences with one new token."""
    lengths = np.concatenate([[512, 512], np.linspace(512, LONGEST, 14)]).astype(int)
    return arguments(lengths, np.array([512, 512] + [1] * 14))


def together() -> Callable[..., Any]:
    """Both in one call; the results of prompts and tokens are views, which cost nothing."""
    step = jax.jit(ragged_paged_attention)

    def both(*args: Any) -> Any:
        out = np.asarray(step(*args))
        return out[:1024], out[1024:]

    return both


def apart() -> Callable[..., Any]:
    """Prompts first, then the tokens: a program each."""
    step = jax.jit(ragged_paged_attention)
    cut: dict[int, Any] = {}

    def both(*args: Any) -> Any:
        if not cut:  # once, before anything is timed
            q, k_pages, v_pages, table, lengths, starts = args
            cut[0] = q[:1024], k_pages, v_pages, table[:2], lengths[:2], starts[:3]
            cut[1] = q[1024:], k_pages, v_pages, table[2:], lengths[2:], starts[2:] - 1024
        return tuple(np.asarray(step(*cut[i])) for i in (0, 1))

    return both


def by_flash_attention(q, k_pages, v_pages, *_):
    """Two prompts of 512 whose pages lie in order."""
    k, v = (x.reshape(2, 512, KV_HEADS, HEAD_DIM) for x in (k_pages, v_pages))
    return flash_attention(q.reshape(2, 512, HEADS, HEAD_DIM), k, v, causal=True).reshape(q.shape)


def by_torch(q, k_pages, v_pages, *_):
    """One token of each sequence, over dense caches of equal length."""
    import torch

    batch = q.shape[0]
    dense = [
        torch.from_numpy(np.array(x).reshape(batch, -1, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        for x in (k_pages, v_pages)
    ]
    queries = torch.from_numpy(np.array(q))[:, :, None]

    def run(*_: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        with torch.no_grad():
            return attend(queries, *dense, enable_gqa=True)[:, :, 0].numpy()

    return run


def comparisons() -> Iterator[Comparison]:
    name = f"{SEQUENCES} tokens, 512 to {LONGEST} keys, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}"
    yield Comparison(
        name=name,
        ours=ragged_paged_attention,
        peers={"plain jax": gathered},
        arguments=decoding,
        limits={"plain jax": 0.5},
    )
    yield Comparison(
        name=name,
        ours=lambda *args: ragged_paged_attention(*args[:6]),
        peers={"reading the same bytes": read},
        arguments=with_memory,
        limits={"reading the same bytes": 1 / 0.7},
    )
    yield Comparison(
        name=f"{name}, int8",
        ours=lambda q, k, v, k_wide, v_wide, scale, *where: ragged_paged_attention(
            q, k, v, *where, k_scale=scale, v_scale=scale
        ),
        peers={
            "float32 pages": lambda q, k, v, k_wide, v_wide, scale, *where: ragged_paged_attention(
                q, k_wide, v_wide, *where
            )
        },
        arguments=quantised,
        limits={"float32 pages": 0.5},
    )
    yield Comparison(
        name="2 prompts of 512 and 14 tokens",
        ours=outside_jax(together()),
        peers={"both done alone": outside_jax(apart())},
        arguments=mixed,
        limits={"both done alone": 1.1},
    )
    prompts = np.array([512, 512])
    yield Comparison(
        name="2 prompts of 512",
        ours=ragged_paged_attention,
        peers={"flash_attention": by_flash_attention},
        arguments=lambda: arguments(prompts, prompts, in_order=True),
        limits={"flash_attention": 1.1},
    )
    if importlib.util.find_spec("torch"):
        equal = arguments(np.full(SEQUENCES, 1280), np.ones(SEQUENCES, int), in_order=True)
        yield Comparison(
            name=f"{SEQUENCES} tokens, 1280 keys",
            ours=ragged_paged_attention,
            peers={"torch": outside_jax(by_torch(*equal))},
            arguments=lambda: equal,
            limits={"torch": 0.8},
        )


def bounds() -> Iterator[Bound]:
    """Pages that are donated are updated in place."""
    shape = (4096, PAGE_SIZE, KV_HEADS, HEAD_DIM)

    def step(k_pages, v_pages, *rest):
        return jax.jit(update_pages, donate_argnums=(0, 1))(k_pages, v_pages, *rest)

    q, _, _, *where = decoding()
    new = q[:, :KV_HEADS]
    cache = jax.ShapeDtypeStruct(shape, jnp.float32)
    yield Bound(
        name="update_pages of 256 MiB",
        function=step,
        arguments=lambda: (cache, cache, new, new, *where),
        mib=1.0,
    )


def grid() -> Iterator[Call]:
    kernel = RaggedPagedAttention()
    for rows, sequences, longest in ((1, 1, 2048), (16, 16, 1024), (256, 1, 512), (512, 16, 1024)):
        for heads, kv_heads, head_dim in ((8, 8, 64), (32, 8, 128)):
            pages = sequences * longest // PAGE_SIZE
            cache = jax.ShapeDtypeStruct((pages, PAGE_SIZE, kv_heads, head_dim), jnp.float32)
            yield Call(
                name=f"{rows} rows of {sequences} sequences to {longest}, {heads}/{kv_heads} heads",
                kernel=kernel,
                arguments=(
                    jax.ShapeDtypeStruct((rows, heads, head_dim), jnp.float32),
                    *(cache, cache),
                    jax.ShapeDtypeStruct((sequences, longest // PAGE_SIZE), jnp.int32),
                    jax.ShapeDtypeStruct((sequences,), jnp.int32),
                    jax.ShapeDtypeStruct((sequences + 1,), jnp.int32),
                ),
                keywords={"softmax_scale": head_dim**-0.5},
            )
