"""Segments whose numbers are not finite, where several segments meet in one product.

A chunk is made of matrix products over its tokens, and there a weight of zero does not hide another
segment's infinity or NaN. So segments with such numbers are computed with zeros, and their results
are NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .chunk import FORGET, START


class NotFinite:
    """The segments of `(batch, length, heads)` tokens in which some number is not finite.

    Args:
        g: Decays with the starts of segments in them, per key channel or per head.
        tokens: More arrays of `(batch, length, heads, features)`.
        first: A state that belongs to the first segment, `(batch, heads, ...)`, if there is one.
        last: One that belongs to the last segment.
    """

    def __init__(
        self,
        g: jax.Array,
        *tokens: jax.Array,
        first: jax.Array | None = None,
        last: jax.Array | None = None,
    ) -> None:
        start = g < FORGET
        self._start = start if g.ndim == 3 else start[..., 0]
        here = _any_not_finite(g if g.ndim == 4 else g[..., None], 1)
        for array in tokens:
            here |= _any_not_finite(array, 1)
        if first is not None:
            here = here.at[:, 0].set(here[:, 0] | _any_not_finite(first, 2))
        if last is not None:
            here = here.at[:, -1].set(here[:, -1] | _any_not_finite(last, 2))
        self.so_far = self._or_since_start(here, self._start)
        # From the end, a segment begins behind the start of the one after it.
        turned = jnp.roll(self._start, -1, axis=1)[:, ::-1]
        self.anywhere = self.so_far | self._or_since_start(here[:, ::-1], turned)[:, ::-1]

    @staticmethod
    def _or_since_start(here: jax.Array, start: jax.Array) -> jax.Array:
        def either(
            a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return a[0] | b[0], jnp.where(b[0], b[1], a[1] | b[1])

        found: jax.Array = jax.lax.associative_scan(either, (start, here), axis=1)[1]
        return found

    def hidden(self, *tokens: jax.Array) -> tuple[jax.Array, ...]:
        """The tokens with zeros in those segments."""
        return tuple(jnp.where(_like(self.anywhere, x), jnp.zeros_like(x), x) for x in tokens)

    def hidden_decay(self, g: jax.Array) -> jax.Array:
        """The decays likewise, but for the starts."""
        hidden = jnp.where(_like(self._start, g), START, 0.0).astype(g.dtype)
        return jnp.where(_like(self.anywhere, g), hidden, g)

    def hidden_state(self, state: jax.Array | None, token: int) -> jax.Array | None:
        """A state with zeros where the segment of its token, 0 or -1, is one of those."""
        if state is None:
            return None
        return jnp.where(self.anywhere[:, token, :, None, None], jnp.zeros_like(state), state)

    def shown(self, result: jax.Array) -> jax.Array:
        """Outputs, NaN from the number that is not finite to the end of its segment."""
        return jnp.where(_like(self.so_far, result), jnp.nan, result).astype(result.dtype)

    def shown_gradient(self, gradient: jax.Array) -> jax.Array:
        """Gradients of tokens, NaN in those segments."""
        return jnp.where(_like(self.anywhere, gradient), jnp.nan, gradient).astype(gradient.dtype)

    def shown_state(self, state: jax.Array, token: int) -> jax.Array:
        """A state, or its gradient, NaN where the segment of its token is one of those."""
        bad = self.anywhere[:, token, :, None, None]
        return jnp.where(bad, jnp.nan, state).astype(state.dtype)


def _any_not_finite(x: jax.Array, axes: int) -> jax.Array:
    return jnp.any(~jnp.isfinite(x), axis=tuple(range(x.ndim - axes, x.ndim)))


def _like(flags: jax.Array, x: jax.Array) -> jax.Array:
    return flags if x.ndim == flags.ndim else flags[..., None]
