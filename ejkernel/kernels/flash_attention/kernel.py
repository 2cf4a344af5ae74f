"""Flash attention as a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning, Shards
from ejkernel.ops.core.work import Work, traffic

from ..sizes import default_scale
from .native import CPP
from .pallas_gpu import PALLAS_GPU
from .pallas_tpu import PALLAS_TPU
from .plain import dot_product_attention
from .reference import attention_reference_by_rows
from .work import SEGMENTS, visible_pairs
from .xla import XLA

Out = jax.Array | tuple[jax.Array, jax.Array]


class FlashAttention(Kernel[Any, Out]):
    """`softmax(scale * q kᵀ) v`, tile by tile, with its own backward pass.

    Arguments are `q, k, v` as `(batch, sequence, heads, head_dim)`, keywords those of
    `attention_reference` and `sequence_axis`. Use `ejkernel.modules.flash_attention`, which checks
    them.
    """

    implementations = (PALLAS_TPU, PALLAS_GPU, CPP, XLA)
    reference = staticmethod(attention_reference_by_rows)
    plain = staticmethod(dot_product_attention)
    # Blocks are chosen for a length; the number of sequences hardly matters, and a block that is
    # longer than a sequence is cut to it.
    near_shapes = NearShapes(
        Dimension(argument=(0, 1, 2), axis=0, rounding="nearest"),
        Dimension(argument=(0, 1, 2), axis=1, rounding="nearest"),
        within=4.0,
    )

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        lse = ", b (k g) s" if inv.kwargs.get("return_lse") else ""
        return Partitioning(
            "b s (k g) d, b t k d, b t k e -> b s (k g) e" + lse,
            keywords={
                "bias": "b (k g) s t",
                "mask": "b (k g) s t",
                "segment_ids": "b s",
                "kv_segment_ids": "b t",
                "sinks": "(k g)",
                "q_lengths": "b",
                "kv_lengths": "b",
            },
            independent="b k g",
            localize=_with_own_dropout,
        )

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        # What is dropped depends on the number of the entry.
        return options.get("dropout_key") is None

    def default_keywords(self, *args: Any) -> dict[str, Any]:
        return {"causal": False, **default_scale("softmax_scale", *args)}

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random arrays; sequences as long as they may be, with a few segments packed in order.

        Random integers would be poor segment ids and lengths: with them a call would skip nothing,
        or everything.
        """
        # Loaded when something is measured, as all that belongs to measuring.
        from ejkernel.ops.tuner.inputs import batched_shapes, random_like

        seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
        args = random_like(batched_shapes(inv.args, inv), seed)
        kwargs = random_like(dict(inv.kwargs), seed + 1)
        q, k, _ = inv.args
        for name, length in (("q_lengths", q.shape[1]), ("kv_lengths", k.shape[1])):
            if name in kwargs:
                lengths = kwargs[name]
                kwargs[name] = jnp.full(lengths.shape, length, lengths.dtype)
        for name in ("segment_ids", "kv_segment_ids"):
            if name in kwargs:
                ids = kwargs[name]
                in_order = jnp.arange(ids.shape[-1]) * SEGMENTS // ids.shape[-1]
                kwargs[name] = jnp.broadcast_to(in_order, ids.shape).astype(ids.dtype)
        if "mask" in kwargs:
            kwargs["mask"] = jnp.ones_like(kwargs["mask"])
        return tuple(args), kwargs

    def work(self, inv: Invocation[Any, Any]) -> Work:
        """Two products of what queries see, and four more for all gradients."""
        q, _, v = inv.args
        heads, head_dim, value_dim = q.shape[2], q.shape[3], v.shape[3]
        features = head_dim + value_dim
        if wanted := set(inv.differentiated):
            features += value_dim if wanted - {"2"} else 0  # the gradient of the weights
            features += head_dim * len(wanted & {"0", "1"}) + value_dim * len(wanted & {"2"})
        out = jax.ShapeDtypeStruct((*q.shape[:3], value_dim), q.dtype)
        return Work(2.0 * heads * visible_pairs(inv) * features, traffic(inv, out))


def _with_own_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any], shards: Shards
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Weights are dropped by their place in the whole call: where the part at hand begins in it."""
    if kwargs.get("dropout_key") is None:
        return args, kwargs
    examples, _, heads, _ = args[0].shape
    # Query heads are cut between key heads, or where there is one key head, between themselves.
    head = shards.index("k") + shards.index("g")
    first = {"first_example": shards.index("b") * examples, "first_head": head * heads}
    return args, {**kwargs, **{n: jnp.asarray(x, np.int32) for n, x in first.items()}}
