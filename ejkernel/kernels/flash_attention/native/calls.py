"""The calls of the C++ library, with arrays in the forms that it expects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.native.calling import call_handler

from ...promotion import usual_promotion
from ..options import Options
from ..passes import Gradients, Results

DTYPES = ("float32", "bfloat16", "float16")

FORWARD = "ejkernel_flash_attention_forward"
BACKWARD = "ejkernel_flash_attention_backward"


@usual_promotion
def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, options: Options, **blocks: int
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators: arrays as in `xla.forward`.

    Args:
      q, k, v: arrays of any floating type; of others than `DTYPES` as float32.
      options: the keywords of the call, without dropout.
      block_q: rows (queries times the query heads of a key head) that are worked on together.
      block_k: most keys in a tile; rounded to what the machine's registers hold.
    """
    dtype = q.dtype
    q, k, v = _of_one_dtype(q, k, v)
    batch, q_len, heads, _ = q.shape
    out, lse = call_handler(
        FORWARD,
        (((batch, q_len, heads, v.shape[-1]), q.dtype), ((batch, heads, q_len), jnp.float32)),
        (q, k, v, *_of_scores(options)),
        _attributes(options, **blocks),
    )
    return out.astype(dtype), lse


@usual_promotion
def backward(results: Results, options: Options, **blocks: int) -> Gradients:
    """Gradients of `q`, `k`, `v`, and of `sinks` by name if there are any; none of a bias.

    The other arguments are as in `forward`; the blocks may differ from those used there.
    """
    q, k, v, out, lse, dout, dlse = results
    q, k, v = _of_one_dtype(q, k, v)
    operands = (
        *(q, k, v),
        *_of_scores(options),
        out.astype(q.dtype),
        dout.astype(q.dtype),
        lse,
        _optional(dlse, jnp.float32),
    )
    by_row = (0,) if options.sinks is None else lse.shape
    dq, dk, dv, dsinks = call_handler(
        BACKWARD,
        (*((x.shape, x.dtype) for x in (q, k, v)), (by_row, jnp.float32)),
        operands,
        _attributes(options, **blocks),
    )
    named = {} if options.sinks is None else {"sinks": jnp.sum(dsinks, axis=(0, 2))}
    return Gradients(dq, dk, dv, named)


def _of_one_dtype(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    if q.dtype == k.dtype == v.dtype and q.dtype.name in DTYPES:
        return q, k, v
    return tuple(x.astype(jnp.float32) for x in (q, k, v))


def _of_scores(options: Options) -> tuple[jax.Array, ...]:
    """What says which scores count, and what is added to them."""
    integers = (
        options.q_lengths,
        options.kv_lengths,
        options.segment_ids,
        options.kv_segment_ids,
    )
    return (
        *(_optional(array, jnp.int32) for array in integers),
        _optional(options.mask, jnp.bool_),
        _optional(options.bias, jnp.float32),
        _optional(options.sinks, jnp.float32),
    )


def _optional(array: jax.Array | None, dtype: Any) -> jax.Array:
    """An array that is not given goes as one without elements."""
    return jnp.zeros((0,), dtype) if array is None else array.astype(dtype)


def _attributes(options: Options, block_q: int, block_k: int) -> dict[str, Any]:
    left, right = options.window or (None, None)
    return {
        "causal": np.int64(options.causal),
        "scale": np.float32(options.softmax_scale),
        "left": np.int64(-1 if left is None else left),
        "right": np.int64(-1 if right is None else right),
        "soft_cap": np.float32(options.logits_soft_cap or 0.0),
        "block_q": np.int64(block_q),
        "block_k": np.int64(block_k),
    }
