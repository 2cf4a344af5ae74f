"""Paged attention as a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning
from ejkernel.ops.core.work import Work

from ..sizes import default_scale
from .pallas_gpu import PALLAS_GPU
from .pallas_tpu import PALLAS_TPU
from .reference import paged_attention_reference
from .xla import XLA


class PagedAttention(Kernel[Any, jax.Array]):
    """Attention of the last tokens of sequences whose keys and values are in pages.

    Arguments are `q, k_pages, v_pages, page_table, lengths`, keywords those of
    `paged_attention_reference`. Use `ejkernel.modules.paged_attention`, which checks them.
    """

    implementations = (PALLAS_TPU, PALLAS_GPU, XLA)
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
        q, k_pages, v_pages, table, lengths = inv.args
        keys = iter(jax.random.split(key, 8))

        def normal(like: Any) -> jax.Array:
            return jax.random.normal(next(keys), like.shape, like.dtype)

        batch, per_sequence = table.shape
        pages, page_size = k_pages.shape[:2]
        order = jax.random.permutation(next(keys), max(pages, batch * per_sequence)) % pages
        order = order[: batch * per_sequence].reshape(table.shape).astype(table.dtype)
        used = jnp.asarray(_lengths(batch, per_sequence * page_size), lengths.dtype)
        args = (*map(normal, (q, k_pages, v_pages)), order, used)
        sinks = {n: normal(x) for n, x in inv.kwargs.items() if n == "sinks" and x is not None}
        return args, {**inv.kwargs, **sinks}

    def work(self, inv: Invocation[Any, Any]) -> Work | None:
        """Both products with the keys and values of the pages in use, each of them read once."""
        if inv.differentiated:
            return None  # of sequences in a cache there is no gradient to speak of
        q, k_pages, v_pages, table, _ = inv.args
        (batch, per_sequence), (_, page_size, kv_heads, head_dim) = table.shape, k_pages.shape
        tokens, features = q.shape[1], head_dim + v_pages.shape[3]
        used = _lengths(batch, per_sequence * page_size)
        seen = np.maximum(used[:, None] - np.arange(tokens), 0)  # by each of the last tokens
        if (window := inv.kwargs.get("window")) is not None:
            used, seen = np.minimum(used, window + tokens), np.minimum(seen, window + 1)
        flops = 2.0 * q.shape[2] * features * seen.sum()
        read = k_pages.dtype.itemsize * kv_heads * features * used.sum()
        around = q.dtype.itemsize * q.size * (1 + v_pages.shape[3] / head_dim)
        return Work(flops, float(read + around))


def _lengths(batch: int, longest: int) -> Any:
    """From half to whole, and one whole: an average that does not depend on the draw."""
    share = 1.0 - 0.5 * np.arange(batch) / batch
    return np.maximum(share * longest, 1).astype(np.int64)
