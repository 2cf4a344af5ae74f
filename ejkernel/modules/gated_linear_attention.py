"""`gated_linear_attention`: linear attention whose state decays."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.gated_linear_attention import (
    GatedLinearAttention,
    GatedLinearAttentionConfig,
)
from ejkernel.kernels.gated_linear_attention.arguments import checked

_kernel = GatedLinearAttention()


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
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

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
    arrays, options = checked(q, k, v, g, scale, initial_state, segment_ids, return_state)
    options |= given_options("gated_linear_attention", implementation, cfg)
    return _kernel(*arrays, **options)
