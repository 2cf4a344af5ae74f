"""Attention over pages as kernels: of equal blocks of queries, and of packed ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning
from ejkernel.ops.core.work import Work

from ..sizes import default_scale
from .native import CPP, RAGGED_CPP
from .pallas_gpu import PALLAS_GPU, RAGGED_PALLAS_GPU
from .pallas_tpu import PALLAS_TPU, RAGGED_PALLAS_TPU
from .reference import LEARNED, paged_attention_reference, ragged_paged_attention_reference
from .xla import RAGGED_XLA, XLA


class PagedAttention(Kernel[Any, jax.Array]):
    """Attention of the last tokens of sequences whose keys and values are in pages.

    Arguments are `q, k_pages, v_pages, page_table, lengths`, keywords those of
    `paged_attention_reference`. Use `ejkernel.modules.paged_attention`, which checks them.
    """

    implementations = (PALLAS_TPU, PALLAS_GPU, CPP, XLA)
    reference = staticmethod(paged_attention_reference)
    partitioning = Partitioning(
        "b s (k g) d, n p k d, n p k e, b m, b -> b s (k g) e",
        keywords={"sinks": "(k g)"},
        independent="b k g",
    )
    # What is best for a step depends on the pages; how many there are hardly matters.
    near_shapes = NearShapes(
        Dimension(argument=(0, 3, 4), axis=0, rounding="nearest"),
        Dimension(argument=(1, 2), axis=0, rounding="nearest"),
        Dimension(argument=3, axis=1, rounding="nearest"),
        within=4.0,
    )

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return True

    def default_keywords(self, *args: Any) -> dict[str, Any]:
        return default_scale("softmax_scale", *args)

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Sequences of all lengths up to the longest, and pages in any order."""
        return _made_inputs(inv, key)

    def work(self, inv: Invocation[Any, Any]) -> Work | None:
        """Both products with the keys and values of the pages in use, each of them read once."""
        return _work(inv, np.full(inv.args[0].shape[0], inv.args[0].shape[1]))


class RaggedPagedAttention(Kernel[Any, jax.Array]):
    """Attention of packed tokens of many sequences whose keys and values are in pages.

    Arguments are `q, k_pages, v_pages, page_table, lengths, query_starts`, keywords those of
    `ragged_paged_attention_reference`. Use `ejkernel.modules.ragged_paged_attention`, which checks
    them.
    """

    implementations = (RAGGED_PALLAS_TPU, RAGGED_PALLAS_GPU, RAGGED_CPP, RAGGED_XLA)
    reference = staticmethod(ragged_paged_attention_reference)
    near_shapes = NearShapes(
        Dimension(argument=0, axis=0, rounding="nearest"),
        Dimension(argument=(1, 2), axis=0, rounding="nearest"),
        Dimension(argument=3, axis=1, rounding="nearest"),
        within=4.0,
    )

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        scales = {
            name: " ".join("npk"[3 - array.ndim :]) if array.ndim != 2 else "n k"
            for name in ("k_scale", "v_scale")
            if (array := inv.kwargs.get(name)) is not None
        }
        return Partitioning(
            "t (k g) d, n p k d, n p k e, s m, s, starts -> t (k g) e",
            keywords={"sinks": "(k g)", **scales},
            independent="k g",
        )

    def default_keywords(self, *args: Any) -> dict[str, Any]:
        return default_scale("softmax_scale", *args)

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One new token for most sequences, and what rows are left to a few prompts."""
        args, keywords = _made_inputs(inv, key)
        starts = np.concatenate([[0], np.cumsum(self._new_tokens(inv))])
        return (*args, jnp.asarray(starts, inv.args[5].dtype)), keywords

    def work(self, inv: Invocation[Any, Any]) -> Work | None:
        """As of `paged_attention`, with the tokens that `make_inputs` gives each sequence."""
        return _work(inv, self._new_tokens(inv))

    @staticmethod
    def _new_tokens(inv: Invocation[Any, Any]) -> Any:
        """As many prompts as it takes that none is longer than its sequence; then single tokens."""
        rows, (sequences, per_sequence) = inv.args[0].shape[0], inv.args[3].shape
        counts = np.full(sequences, 1 if rows >= sequences else 0)
        counts[: rows if rows < sequences else 0] = 1
        lengths = _lengths(sequences, per_sequence * inv.args[1].shape[1])
        for s, length in enumerate(lengths):
            counts[s] += max(0, min(int(length) - 1, rows - int(counts.sum())))
        return counts


def _made_inputs(
    inv: Invocation[Any, Any], key: jax.Array
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, k_pages, v_pages, table, lengths = inv.args[:5]
    keys = iter(jax.random.split(key, 8))

    def normal(like: Any) -> jax.Array:
        drawn = jax.random.normal(next(keys), like.shape, jnp.float32)
        is_integer = jnp.issubdtype(like.dtype, jnp.integer)
        return (32 * drawn if is_integer else drawn).astype(like.dtype)

    batch, per_sequence = table.shape
    pages, page_size = k_pages.shape[:2]
    order = jax.random.permutation(next(keys), max(pages, batch * per_sequence)) % pages
    order = order[: batch * per_sequence].reshape(table.shape).astype(table.dtype)
    used = jnp.asarray(_lengths(batch, per_sequence * page_size), lengths.dtype)
    args = (*map(normal, (q, k_pages, v_pages)), order, used)
    learned = {n: normal(x) for n, x in inv.kwargs.items() if n in LEARNED and x is not None}
    return args, {**inv.kwargs, **learned}


def _work(inv: Invocation[Any, Any], new_tokens: Any) -> Work | None:
    """What a call has to do for sequences with so many new tokens, in the tuner's inputs."""
    if inv.differentiated:
        return None  # of sequences in a cache there is no gradient to speak of
    q, k_pages, v_pages, table = inv.args[:4]
    (batch, per_sequence), (_, page_size, kv_heads, head_dim) = table.shape, k_pages.shape
    features = head_dim + v_pages.shape[3]
    lengths = np.where(new_tokens > 0, _lengths(batch, per_sequence * page_size), 0)
    last = inv.kwargs.get("causal", True)  # each new token sees those before it
    window = inv.kwargs.get("window")
    seen = 0
    for length, count in zip(lengths, new_tokens, strict=True):
        keys = np.maximum(length - np.arange(count), 0) if last else np.full(count, length)
        seen += int((keys if window is None else np.minimum(keys, window + 1)).sum())
    read = lengths if window is None else np.minimum(lengths, window + new_tokens)
    flops = 2.0 * q.shape[-2] * features * seen
    pages = k_pages.dtype.itemsize * kv_heads * features * int(read.sum())
    around = q.dtype.itemsize * q.size * (1 + v_pages.shape[3] / head_dim)
    return Work(flops, float(pages + around))


def _lengths(batch: int, longest: int) -> Any:
    """From half to whole, and one whole: an average that does not depend on the draw."""
    share = 1.0 - 0.5 * np.arange(batch) / batch
    return np.maximum(share * longest, 1).astype(np.int64)
