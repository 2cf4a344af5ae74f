"""Segments whose numbers are not finite, where several segments meet in one product.

A chunk is made of matrix products over its tokens, and there a weight of zero does not hide another
segment's infinity or NaN. So segments with such numbers are computed with zeros, and their results
are NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .arguments import FORGET, START, Arguments, Gradients


class NotFinite:
    """The segments, of every batch entry and head, in which some number is not finite.

    `call`, `dout` and `dstate` are what was given, with zeros in those segments.

    Args:
        call: One with starts of segments in its decays.
        dout: In a backward pass, the gradient of the outputs.
        dstate: Likewise that of the last state, which belongs to the last segment.
    """

    def __init__(self, call: Arguments, dout: Any = None, dstate: Any = None) -> None:
        assert call.g is not None
        start = call.g < FORGET
        start, g = (start, call.g[..., None]) if start.ndim == 3 else (start[..., 0], call.g)
        here = jnp.zeros_like(start)
        for array in (g, call.q, call.k, call.v, dout):
            here = here if array is None else here | _any_not_finite(array, 1)
        for token, state in ((0, call.initial_state), (-1, dstate)):
            if state is not None:
                here = here.at[:, token].set(here[:, token] | _any_not_finite(state, 2))
        self._so_far = _or_since_start(here, start)
        # From the end, a segment begins behind the start of the one after it.
        turned = jnp.roll(start, -1, axis=1)[:, ::-1]
        self._anywhere = self._so_far | _or_since_start(here[:, ::-1], turned)[:, ::-1]
        self._first, self._last = self._anywhere[:, 0], self._anywhere[:, -1]
        q, k, v, self.dout = _where(self._anywhere, 0.0, (call.q, call.k, call.v, dout))
        g = _where(self._anywhere, jnp.where(start, START, 0.0), call.g)
        state = _where(self._first, 0.0, call.initial_state)
        self.call = dataclasses.replace(call, q=q, k=k, v=v, g=g, initial_state=state)
        self.dstate = _where(self._last, 0.0, dstate)

    def shown(self, out: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Results, NaN from the number that is not finite to the end of its segment."""
        return _where(self._so_far, jnp.nan, out), _where(self._last, jnp.nan, state)

    def shown_gradients(self, found: Gradients) -> Gradients:
        """Gradients, NaN in those segments."""
        tokens = _where(self._anywhere, jnp.nan, found[:4])
        return *tokens, _where(self._first, jnp.nan, found[4])


def _or_since_start(here: jax.Array, start: jax.Array) -> jax.Array:
    def either(a: Any, b: Any) -> Any:
        return a[0] | b[0], jnp.where(b[0], b[1], a[1] | b[1])

    found: jax.Array = jax.lax.associative_scan(either, (start, here), axis=1)[1]
    return found


def _any_not_finite(x: jax.Array, axes: int) -> jax.Array:
    return jnp.any(~jnp.isfinite(x), axis=tuple(range(x.ndim - axes, x.ndim)))


def _where(flags: jax.Array, value: Any, arrays: Any) -> Any:
    """The arrays with another value where flags of their leading axes are set."""

    def replaced(x: jax.Array) -> jax.Array:
        behind = tuple(range(flags.ndim, x.ndim))
        put = jnp.expand_dims(value, behind) if isinstance(value, jax.Array) else value
        return jnp.where(jnp.expand_dims(flags, behind), put, x).astype(x.dtype)

    return jax.tree.map(replaced, arrays)
