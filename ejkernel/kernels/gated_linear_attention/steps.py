r"""Gated linear attention step by step: the form for CPUs, with a gradient in linear memory.

On a CPU the recurrence itself is hard to beat: XLA fuses the decay, the update and the read of the
state into one pass over a state that stays in the cache, while a chunk is many small products at a
fraction of the processor's speed. Three things make it better than the plain loop:

* Batch and heads are one axis, of rows, and only as many rows are worked on at a time as keep their
  states in the cache.
* The backward pass stores no state per step. The gradient of ``q`` follows from the states, made
  again in a forward loop; those of ``k`` and ``v`` from the gradients of the states, in a loop from
  the end:

.. math::
    \mathrm{dq}_t = \mathrm{do}_t S_t^\top, \quad
    D_t = q_t^\top \mathrm{do}_t + e^{g_{t+1}} D_{t+1}, \quad
    \mathrm{dk}_t = v_t D_t^\top, \quad \mathrm{dv}_t = k_t D_t .

* The gradient of ``g`` needs :math:`S` and :math:`D` of the same step, which never exist together.
  But with the state :math:`S_e` at some later step :math:`e`,

.. math::
    \mathrm{dg}_t = \sum_{s = t}^{e} (q_s \odot \mathrm{dq}_s - k_s \odot \mathrm{dk}_s)
        + \sum_v (S_e \odot e^{g_{e+1}} D_{e+1})_v ,

  so a state is stored every ``SEGMENT`` steps, and rounding does not pile up over longer stretches.

Arrays are ``(length, rows, features)`` here, all of one dtype; the scale is already in ``q``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .arguments import Gradients

Tokens = tuple[Any, ...]
"""What there is for every token; None for the decay, if there is none."""

# Steps between two states that the backward pass stores.
SEGMENT = 256


def forward(tokens: Tokens, states: tuple[Array], *, segments: bool) -> tuple[Array, Array]:
    """Outputs, ``(length, rows, value_dim)``, and the last state, ``(rows, key_dim, value_dim)``.

    From ``q, k, v, g`` and the state before the first token; ``g`` is ``(length, rows, key_dim)``,
    ``(length, rows, 1)`` or None. With ``segments`` a decay to zero forgets infinities and NaN too.
    """

    def step(state: Array, token: Any) -> tuple[Array, Array]:
        q_t, k_t, v_t, g_t = token
        state = _decayed(state, g_t, 2, segments) + k_t[:, :, None] * v_t[:, None, :]
        return state, jnp.einsum("rk,rkv->rv", q_t, state)

    state, out = lax.scan(step, states[0], tokens)
    return out, state


def backward(tokens: Tokens, states: tuple[Array, Array], *, segments: bool) -> Gradients:
    """Gradients, from ``q, k, v, g, dout``, the first state and the gradient of the last one."""
    state, dstate = states
    length = len(tokens[2])
    count = -(-length // SEGMENT)
    size = -(-length // count)

    def cut(x: Array) -> Array:
        """Into segments of equal length. What is appended changes no state and reads none."""
        x = jnp.pad(x, ((0, count * size - length), (0, 0), (0, 0)))
        return x.reshape(count, size, *x.shape[1:])

    def join(x: Array) -> Array:
        return x.reshape(count * size, *x.shape[2:])[:length]

    def step_ahead(state: Array, token: Any) -> tuple[Array, Array]:
        k_t, v_t, g_t, dout_t = token
        state = _decayed(state, g_t, 1, segments) + v_t[:, :, None] * k_t[:, None, :]
        return state, jnp.einsum("rvk,rv->rk", state, dout_t)

    def segment_ahead(state: Array, tokens: Any) -> tuple[Array, Any]:
        state, dq = lax.scan(step_ahead, state, tokens)
        return state, (dq, state)

    def step(carry: tuple[Array, Array | None], token: Any) -> tuple[Any, Any]:
        dstate, dg = carry
        q_t, k_t, v_t, g_t, dout_t, dq_t = token
        dstate = dstate + dout_t[:, :, None] * q_t[:, None, :]
        dk_t = jnp.einsum("rvk,rv->rk", dstate, v_t)
        dv_t = jnp.einsum("rvk,rk->rv", dstate, k_t)
        if g_t is None or dg is None:
            return (dstate, None), (dk_t, dv_t, None)
        dg = dg + _like_g(q_t * dq_t - k_t * dk_t, g_t)
        # Where everything is forgotten the sum is zero but for its rounding, which must not reach
        # the tokens before: theirs may be much smaller numbers.
        dg = jnp.where(jnp.exp(g_t) == 0.0, 0.0, dg)
        return (_decayed(dstate, g_t, 1, segments), dg), (dk_t, dv_t, dg)

    def segment(dstate: Array, tokens: Any) -> tuple[Array, Any]:
        (_, _, _, g, _, _), last_state = tokens
        dg = None if g is None else _like_g(jnp.sum(dstate * last_state, axis=1), g[0])
        (dstate, _), gradients = lax.scan(step, (dstate, dg), tokens[0], reverse=True)
        return dstate, gradients

    q, k, v, g, dout = jax.tree.map(cut, tokens)
    # Transposed states, (rows, value_dim, key_dim): the sums over values, which make dq and dk,
    # then run over an outer axis, and vectorise.
    _, (dq, last_states) = lax.scan(segment_ahead, state.swapaxes(1, 2), (k, v, g, dout))
    arrays = (q, k, v, g, dout, dq), last_states
    dstate, (dk, dv, dg) = lax.scan(segment, dstate.swapaxes(1, 2), arrays, reverse=True)
    return *jax.tree.map(join, (dq, dk, dv, dg)), dstate.swapaxes(1, 2)


def _decayed(state: Array, g: Array | None, axis: int, segments: bool) -> Array:
    """A state after a decay; ``axis`` is that of the value channels, which ``g`` does not have."""
    if g is None:
        return state
    decay = jnp.expand_dims(jnp.exp(g), axis)
    # Only where it may matter: the selection takes time.
    return jnp.where(decay == 0.0, 0.0, state * decay) if segments else state * decay


def _like_g(by_channel: Array, g: Array) -> Array:
    """Channels summed, if ``g`` has one number per row."""
    return by_channel if g.shape == by_channel.shape else by_channel.sum(axis=1, keepdims=True)
