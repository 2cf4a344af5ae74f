"""Paged attention beside the formulation that gathers every sequence's pages first."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.side_by_side import Call, Comparison
from ejkernel.kernels.paged_attention import PagedAttention
from ejkernel.modules import paged_attention


def gathered(q, k_pages, v_pages, page_table, lengths):
    """The plain JAX formulation: gather, scores, mask, softmax, product."""
    batch, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    k = k_pages[page_table].reshape(batch, -1, kv_heads, head_dim)
    v = v_pages[page_table].reshape(batch, -1, kv_heads, v_pages.shape[3])
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim) * head_dim**-0.5
    scores = jnp.einsum("bhgd,bkhd->bhgk", grouped, k)
    visible = jnp.arange(scores.shape[-1]) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bhgk,bkhd->bhgd", weights, v).reshape(q.shape)


def arguments(batch, heads, kv_heads, head_dim, page_size, longest, ragged):
    """Pages in any order; lengths from an eighth of the longest to all of it if `ragged`."""
    rng = np.random.default_rng(0)
    per_sequence = longest // page_size
    pages = batch * per_sequence

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    share = np.linspace(1 / 8, 1, batch) if ragged else np.ones(batch)
    return (
        normal(batch, heads, head_dim),
        normal(pages, page_size, kv_heads, head_dim),
        normal(pages, page_size, kv_heads, head_dim),
        jnp.asarray(rng.permutation(pages).reshape(batch, per_sequence), jnp.int32),
        jnp.asarray(np.maximum(share * longest, 1), jnp.int32),
    )


SIZES = [
    # batch, heads, kv_heads, head_dim, page_size, longest, ragged
    (1, 8, 8, 64, 16, 128, False),
    (4, 8, 2, 64, 16, 512, False),
    (8, 8, 8, 64, 16, 1024, True),
    (8, 32, 8, 128, 16, 1024, True),
    (8, 32, 8, 128, 16, 1024, False),
    (16, 8, 1, 64, 64, 2048, True),
    (1, 32, 8, 128, 16, 8192, False),
    (4, 32, 8, 128, 128, 4096, True),
    (32, 16, 4, 64, 32, 512, True),
]


def _name(size) -> str:
    batch, heads, kv_heads, head_dim, page_size, longest, ragged = size
    lengths = f"to {longest}" if ragged else str(longest)
    heads_of = f"{heads}/{kv_heads} heads of {head_dim}"
    return f"{batch} sequences of {lengths}, {heads_of}, pages of {page_size}"


def comparisons() -> Iterator[Comparison]:
    for size in SIZES:
        yield Comparison(
            name=_name(size),
            ours=paged_attention,
            peers={"plain jax": gathered},
            arguments=lambda size=size: arguments(*size),
            limits={"plain jax": 1.0},
        )


def grid() -> Iterator[Call]:
    kernel = PagedAttention()
    for batch, longest in ((1, 512), (1, 2048), (4, 512), (8, 1024)):
        for heads, kv_heads, head_dim in ((8, 8, 64), (8, 1, 64), (32, 8, 128)):
            for page_size in (8, 16, 64):
                pages = batch * longest // page_size
                cache = jax.ShapeDtypeStruct((pages, page_size, kv_heads, head_dim), jnp.float32)
                yield Call(
                    name=_name((batch, heads, kv_heads, head_dim, page_size, longest, True)),
                    kernel=kernel,
                    arguments=(
                        jax.ShapeDtypeStruct((batch, 1, heads, head_dim), jnp.float32),
                        cache,
                        cache,
                        jax.ShapeDtypeStruct((batch, longest // page_size), jnp.int32),
                        jax.ShapeDtypeStruct((batch,), jnp.int32),
                    ),
                    keywords={"softmax_scale": head_dim**-0.5},
                )
