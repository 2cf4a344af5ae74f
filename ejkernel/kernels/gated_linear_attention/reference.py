"""Gated linear attention written the obvious way: one step after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.core.varying import vary_alike

from ..dtypes import accumulation_dtype
from .arguments import Arguments


def gated_linear_attention_reference(
    *args: jax.Array,
    scale: float | None = None,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""The recurrence itself.

    For every batch entry and head, with a state :math:`S` of shape ``(key_dim, value_dim)``:

    .. math::
        S_t = \operatorname{diag}(e^{g_t}) \, S_{t-1} + k_t^\top v_t, \qquad
        o_t = \text{scale} \; q_t S_t

    Arguments are those of :func:`ejkernel.modules.gated_linear_attention`. ``segments`` is not
    used: a decay to zero forgets infinities and NaN in any case.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones((1, 3, 1, 1))
        >>> half = jnp.log(jnp.full((1, 3, 1), 0.5))
        >>> gated_linear_attention_reference(ones, ones, ones, half).ravel().tolist()
        [1.0, 1.5, 1.75]
    """
    scale = args[0].shape[-1] ** -0.5 if scale is None else scale
    call = Arguments(*args, scale=scale, **options)
    q, k, v, g = call.tokens
    batch, length, heads, key_dim = q.shape
    dtype = accumulation_dtype(q.dtype)
    if g is None:
        g = jnp.zeros((batch, length, heads, key_dim), dtype)
    elif g.ndim == 3:
        g = jnp.broadcast_to(g[..., None], k.shape)
    decay = jnp.exp(g.astype(dtype))
    if segment_ids is not None:
        first = segment_ids[:, 1:] != segment_ids[:, :-1]
        first = jnp.pad(first, ((0, 0), (1, 0)))[:, :, None, None]
        decay = jnp.where(first, 0.0, decay)
    state = jnp.zeros((batch, heads, key_dim, v.shape[-1]), dtype)
    if call.initial_state is not None:
        state = call.initial_state.astype(dtype)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_t, k_t, v_t, decay_t = token
        decay_t = decay_t[..., None]
        left = decay_t * jnp.where(decay_t == 0.0, 0.0, state)
        state = left + k_t[..., :, None] * v_t[..., None, :]
        return state, scale * jnp.einsum("bhk,bhkv->bhv", q_t, state, precision="highest")

    tokens = tuple(jnp.moveaxis(x.astype(dtype), 1, 0) for x in (q, k, v, decay))
    state, out = jax.lax.scan(step, vary_alike(state, tokens), tokens)
    out = jnp.moveaxis(out, 0, 1).astype(q.dtype)
    return (out, state) if call.return_state else out
