"""Inputs for the tuner: random arrays, with lengths and segments as real calls have them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation

SEGMENTS = 4  # of every sequence, if there are any


def make_inputs(
    inv: Invocation[Any, Any], key: jax.Array
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords to measure a call with.

    Random integers would be poor segment ids and lengths: with them a call would skip nothing, or
    everything.
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
