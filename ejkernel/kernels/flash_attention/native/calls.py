"""Flash attention in C++: what XLA calls on CPU, with arrays in the forms that it expects.

The source is in `cpp/`. What is not served here is left to the XLA implementation: dropout, and the
gradient of a bias (`CPU` and `FlashAttentionOnCPU.vjp_cpu` in `cpu.py`).

Example:
    >>> import jax.numpy as jnp
    >>> from ejkernel import native
    >>> q = k = v = jnp.ones((1, 100, 4, 16))
    >>> options = dict(causal=True, softmax_scale=0.25, block_q=96, block_k=192)
    >>> if native.why_not(native.FLASH_ATTENTION) is None:
    ...     out, lse = forward(q, k, v, **options)
    ...     assert out.shape == (1, 100, 4, 16) and lse.shape == (1, 4, 100)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...promotion import usual_promotion
from ..options import Window, limited

DTYPES = ("float32", "bfloat16", "float16")


@usual_promotion
def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    softmax_scale: float,
    block_q: int,
    block_k: int,
    window: Window | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logarithm of its softmax denominators.

    Args:
        q: Queries, ``(batch, q_len, q_heads, head_dim)``, of a dtype in :data:`DTYPES`.
        k: Keys, ``(batch, k_len, kv_heads, head_dim)``; ``kv_heads`` divides ``q_heads``.
        v: Values, ``(batch, k_len, kv_heads, value_dim)``.
        causal: If true, query ``i`` sees the keys ``j <= i``.
        softmax_scale: Factor on the scores.
        block_q: Rows (queries times the query heads of a key head) that are worked on together.
        block_k: Most keys in a tile; rounded to what the machine's registers hold.
        window: ``(left, right)``: query ``i`` sees keys from ``i - left`` to ``i + right``.
        q_lengths: ``(batch,)``, queries that exist.
        kv_lengths: ``(batch,)``, keys that exist.
        segment_ids: ``(batch, q_len)``: a query sees the keys of its own segment only.
        kv_segment_ids: ``(batch, k_len)``; the same as ``segment_ids`` if not given.
        mask: True where a query sees a key; ``(batch, q_heads, q_len, k_len)``, axes may be 1.
        bias: Added to the scores, after the cap; of the same shapes.
        logits_soft_cap: Scores ``s`` become ``c * tanh(s / c)``.
        sinks: ``(q_heads,)``, a logit per head that takes part in the denominator only.

    Returns:
        ``out``, ``(batch, q_len, q_heads, value_dim)`` in the dtype of ``q``, and ``lse``, float32,
        ``(batch, q_heads, q_len)``, minus infinity where nothing is seen.
    """
    dtype = q.dtype
    q, k, v = _of_one_dtype(q, k, v)
    batch, q_len, heads, _ = q.shape
    operands = (
        q,
        k,
        v,
        *_of_scores(q_lengths, kv_lengths, segment_ids, kv_segment_ids, mask, bias, sinks),
    )
    out, lse = _call(
        "ejkernel_flash_attention_forward",
        (((batch, q_len, heads, v.shape[-1]), q.dtype), ((batch, heads, q_len), jnp.float32)),
        operands,
        _attributes(causal, softmax_scale, window, logits_soft_cap, block_q, block_k),
    )
    return out.astype(dtype), lse


@usual_promotion
def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    *,
    causal: bool,
    softmax_scale: float,
    block_q: int,
    block_k: int,
    dlse: jax.Array | None = None,
    window: Window | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of the inputs of :func:`forward`, from its results and their gradients.

    The other arguments are as in :func:`forward`; only the blocks may differ from those used there.

    Args:
        out: First result of :func:`forward`.
        lse: Second result of :func:`forward`.
        dout: Gradient of the loss with respect to ``out``.
        dlse: Gradient of the loss with respect to ``lse``; None: zero.

    Returns:
        ``dq``, ``dk`` and ``dv``, each with the shape of its input, and ``dsinks``, None without
        sinks. Not the gradient of a bias.
    """
    q, k, v = _of_one_dtype(q, k, v)
    operands = (
        q,
        k,
        v,
        *_of_scores(q_lengths, kv_lengths, segment_ids, kv_segment_ids, mask, bias, sinks),
        out.astype(q.dtype),
        dout.astype(q.dtype),
        lse,
        _optional(dlse, jnp.float32),
    )
    by_row = (0,) if sinks is None else lse.shape
    dq, dk, dv, dsinks = _call(
        "ejkernel_flash_attention_backward",
        (*((x.shape, x.dtype) for x in (q, k, v)), (by_row, jnp.float32)),
        operands,
        _attributes(causal, softmax_scale, window, logits_soft_cap, block_q, block_k),
    )
    return dq, dk, dv, None if sinks is None else jnp.sum(dsinks, axis=(0, 2))


def _call(
    name: str,
    results: tuple[tuple[tuple[int, ...], Any], ...],
    operands: tuple[jax.Array, ...],
    attributes: dict[str, Any],
) -> Any:
    types = [jax.typeof(operand) for operand in operands]
    varying = frozenset[str]().union(*(x.manual_axis_type.varying for x in types))
    more: dict[str, Any] = {}
    if varying:
        # Inside `shard_map`: what is the same on all devices is brought to the type of the rest.
        operands = tuple(
            jax.lax.pcast(x, tuple(varying - t.manual_axis_type.varying), to="varying")
            if varying != t.manual_axis_type.varying
            else x
            for x, t in zip(operands, types, strict=True)
        )
        like = jax.typeof(operands[0])
        everywhere = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
        more = {"sharding": everywhere, "manual_axis_type": like.manual_axis_type}
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype, **more) for shape, dtype in results)
    # The handlers take any number of leading axes as the batch.
    return jax.ffi.ffi_call(name, shapes, vmap_method="broadcast_all")(*operands, **attributes)


def _of_one_dtype(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    if q.dtype == k.dtype == v.dtype and q.dtype.name in DTYPES:
        return q, k, v
    return tuple(x.astype(jnp.float32) for x in (q, k, v))


def _of_scores(
    q_lengths: jax.Array | None,
    kv_lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    mask: jax.Array | None,
    bias: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """What says which scores count, and what is added to them."""
    of_keys = segment_ids if kv_segment_ids is None else kv_segment_ids
    integers = (q_lengths, kv_lengths, segment_ids, of_keys)
    return (
        *(_optional(array, jnp.int32) for array in integers),
        _optional(mask, jnp.bool_),
        _optional(bias, jnp.float32),
        _optional(sinks, jnp.float32),
    )


def _optional(array: jax.Array | None, dtype: Any) -> jax.Array:
    """An array that is not given goes as one without elements."""
    return jnp.zeros((0,), dtype) if array is None else array.astype(dtype)


def _attributes(
    causal: bool,
    softmax_scale: float,
    window: Window | None,
    logits_soft_cap: float | None,
    block_q: int,
    block_k: int,
) -> dict[str, Any]:
    left, right = limited(window) or (None, None)
    return {
        "causal": np.int64(causal),
        "scale": np.float32(softmax_scale),
        "left": np.int64(-1 if left is None else left),
        "right": np.int64(-1 if right is None else right),
        "soft_cap": np.float32(logits_soft_cap or 0.0),
        "block_q": np.int64(block_q),
        "block_k": np.int64(block_k),
    }
