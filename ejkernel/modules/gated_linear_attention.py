"""`gated_linear_attention`: linear attention whose state decays."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.kernels.arguments import (
    checked_flag,
    checked_floating,
    checked_integers,
    checked_number,
    given_options,
    refuse_empty,
)
from ejkernel.kernels.dtypes import accumulation_dtype
from ejkernel.kernels.gated_linear_attention import (
    GatedLinearAttention,
    GatedLinearAttentionConfig,
)
from ejkernel.kernels.gated_linear_attention.chunk import FORGET, START

_kernel = GatedLinearAttention()
_NAME = "gated_linear_attention"


@overload
def gated_linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_state: Literal[False] = False,
    implementation: str | None = None,
    cfg: GatedLinearAttentionConfig | None = None,
) -> jax.Array: ...


@overload
def gated_linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_state: Literal[True],
    implementation: str | None = None,
    cfg: GatedLinearAttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def gated_linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_state: bool = False,
    implementation: str | None = None,
    cfg: GatedLinearAttentionConfig | None = None,
) -> Any:
    r"""Linear attention with decay.

    For each batch entry and head, `S_t = diag(exp(g_t)) S_{t-1} + k_tᵀ v_t` and
    `o_t = scale · q_t S_t`. Differentiable in `q`, `k`, `v`, `g` and the states; memory is linear
    in the length. Any length is allowed, and any decay: `g` may be as negative as it likes, `-inf`
    included (its gradient is then zero). Accumulation is in float32 whatever the input's dtype (in
    float64 for float64).

    Args:
      q: queries, `(batch, length, heads, key_dim)`.
      k: keys, of the same shape.
      v: values, `(batch, length, heads, value_dim)`.
      g: logarithm of the decay, usually not above zero: per key channel, of `k`'s shape, or per
        head, `(batch, length, heads)`. None: nothing decays.
      scale: factor on the output; default `key_dim ** -0.5`.
      initial_state: the state before the first token, `(batch, heads, key_dim, value_dim)`;
        default zeros.
      segment_ids: `(batch, length)`, integers; wherever the id changes, the state starts from
        zero. `initial_state` belongs to the first segment, the returned state to the last.
      return_state: whether to return the state after the last token as well.
      implementation: `"xla"`, `"pallas"` or `"triton"`; default: the best one for the device.
      cfg: how the recurrence is cut; by default the tuned one of the store, else a heuristic.

    Returns:
      `(batch, length, heads, value_dim)`, of `q`'s dtype; with `return_state` also the state, in
      float32 (float64 for float64).

    >>> import jax
    >>> import jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
    >>> g = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(1), (2, 100, 4, 32)))
    >>> out, state = gated_linear_attention(q, k, v, g, return_state=True)
    >>> out.shape, state.shape
    ((2, 100, 4, 32), (2, 4, 32, 32))

    A sequence may be continued where it was left:

    >>> before, after = [x[:, :60] for x in (q, k, v, g)], [x[:, 60:] for x in (q, k, v, g)]
    >>> first, state = gated_linear_attention(*before, return_state=True)
    >>> rest = gated_linear_attention(*after, initial_state=state)
    >>> bool(jnp.allclose(jnp.concatenate([first, rest], 1), out, atol=1e-5))
    True
    """
    q, k, v = (checked_floating(_NAME, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    g = None if g is None else checked_floating(_NAME, "g", g)
    if initial_state is not None:
        initial_state = checked_floating(_NAME, "initial_state", initial_state)
    if segment_ids is not None:
        segment_ids = checked_integers(_NAME, "segment_ids", segment_ids)
    _check_shapes(q, k, v, g, initial_state, segment_ids)
    factor = q.shape[3] ** -0.5
    if scale is not None:
        advice = "for a learned scale multiply q by it"
        factor = checked_number(_NAME, "scale", scale, advice=advice)
    return_state = checked_flag(_NAME, "return_state", return_state)
    decay = _decay(q, g, segment_ids)
    keywords: dict[str, Any] = {
        "scale": factor,
        **({} if initial_state is None else {"initial_state": initial_state}),
        **({"return_state": True} if return_state else {}),
        **({} if segment_ids is None else {"segments": True}),
        **given_options(_NAME, implementation, cfg),
    }
    return _kernel(q, k, v, *(() if decay is None else (decay,)), **keywords)


def _decay(q: jax.Array, g: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array | None:
    """The decay with segments in it: at the first token of a segment everything is forgotten."""
    dtype = accumulation_dtype(q.dtype)
    if g is not None:
        # Finite, so that sums of decays stay numbers. Half precision cannot hold it.
        g = jnp.maximum(g.astype(dtype), FORGET)
    if segment_ids is None:
        return g
    segment_ids = _whole_sequences(segment_ids, q if g is None else g)
    if g is None:
        g = jnp.zeros(q.shape[:3], dtype)
    first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(first.reshape(*first.shape, *(1,) * (g.ndim - 2)), START, g)


def _whole_sequences(segment_ids: jax.Array, beside: jax.Array) -> jax.Array:
    """Segments that are sharded over explicit axes as the entries of another array, and no more.

    A token is compared with the one before it, which JAX refuses where another device has it.
    """
    sharding = jax.typeof(segment_ids).sharding
    if all(entry is None for entry in sharding.spec):
        return segment_ids
    entries = PartitionSpec(*jax.typeof(beside).sharding.spec[:1])
    whole: jax.Array = jax.sharding.reshard(segment_ids, NamedSharding(sharding.mesh, entries))
    return whole


def _check_shapes(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    initial_state: jax.Array | None,
    segment_ids: jax.Array | None,
) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(
                f"{_NAME}: {name} has shape {array.shape}; it must have four axes, "
                "(batch, length, heads, features)"
            )
        refuse_empty(_NAME, name, array)
    if k.shape != q.shape:
        raise ValueError(f"{_NAME}: k has shape {k.shape}; it must be that of q, {q.shape}")
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{_NAME}: v has shape {v.shape}; its batch, length and heads must be those of q, "
            f"{q.shape[:3]}"
        )
    if g is not None and g.shape not in (q.shape, q.shape[:3]):
        raise ValueError(
            f"{_NAME}: g has shape {g.shape}; it must be {q.shape} (per key channel), "
            f"{q.shape[:3]} (per head) or None"
        )
    if initial_state is not None:
        wanted = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        if initial_state.shape != wanted:
            raise ValueError(
                f"{_NAME}: initial_state has shape {initial_state.shape}; it must be "
                f"(batch, heads, key_dim, value_dim) = {wanted}"
            )
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f"{_NAME}: segment_ids has shape {segment_ids.shape}; it must be "
            f"(batch, length) = {q.shape[:2]}"
        )
