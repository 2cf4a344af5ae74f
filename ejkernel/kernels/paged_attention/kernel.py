"""Paged attention as a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning

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
        longest = per_sequence * page_size
        # Half to whole, and one whole: an average that does not depend on the draw.
        share = 1.0 - 0.5 * jnp.arange(batch) / batch
        args = (
            normal(q),
            normal(k_pages),
            normal(v_pages),
            order[: batch * per_sequence].reshape(batch, per_sequence).astype(table.dtype),
            jnp.maximum(share * longest, 1).astype(lengths.dtype),
        )
        kwargs = dict(inv.kwargs)
        if kwargs.get("sinks") is not None:
            kwargs["sinks"] = normal(kwargs["sinks"])
        return args, kwargs
