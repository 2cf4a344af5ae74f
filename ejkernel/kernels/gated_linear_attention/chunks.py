r"""Gated linear attention chunk by chunk: what XLA, TPU and GPU share.

**One chunk of one head** holds :math:`C` tokens, so ``q``, ``k`` and ``g`` are ``(C, key_dim)``,
``v`` is ``(C, value_dim)``, and the state is transposed, :math:`T = S^\top`, because then the decay
of a chunk is a row that is broadcast. The scale is already in ``q``. With the sums of the decays
from the chunk's beginning to a token, and from behind a token to the chunk's end,

.. math::
    P_t = \sum_{u \le t} g_u, \quad R_j = \sum_{u > j} g_u, \quad
    A_{tj} = \sum_d q_{td} \, k_{jd} \, e^{\sum_{j < u \le t} g_{ud}} \;\; (j \le t), \\
    O = A V + (Q \odot e^{P}) \, T^\top, \qquad
    T' = e^{\sum g} \odot T + V^\top (K \odot e^{R}) .

**No positive exponents, no differences.** :math:`A` would be one matrix product if its exponent
were split into :math:`e^{P_t} e^{-P_j}`, but :math:`e^{-P_j}` overflows under strong decay, and a
difference of sums has lost the small decays behind a large one. Instead the chunk is halved
again and again. At the level of halves of :math:`s` tokens, a pair of a token in a right half and
one in its left half is split at the middle: :math:`X_t` is the decay from the middle to :math:`t`,
:math:`X_j` that from :math:`j` to the middle. Both are exponentials of plain sums of :math:`g`,
:math:`X = e^{W_s g}` with a matrix :math:`W_s` of zeros and ones, and

.. math::
    A = \operatorname{diag}(q_t \cdot k_t) +
        \sum_{s = 1, 2, 4, \dots} M_s \odot (Q \odot X_s)(K \odot X_s)^\top ,

where :math:`M_s` marks those pairs. The gradient of ``g`` is, likewise, made of sums alone.

If ``g`` is one number per token, ``(C, 1)``, the exponents form a matrix :math:`L (g_u [u > j])`
with the lower triangle :math:`L`, and :math:`A = Q K^\top \odot e^{\dots}` needs no levels.

Everything is two-dimensional products, elementwise arithmetic and sums over one axis, which is what
the Pallas compilers take; the XLA implementation maps it over rows.

**From chunk to chunk.** Implementations differ in how they walk. A walk takes a function of one
chunk of one row, ``step(state, *inputs) -> (next state, outputs)``, and applies it in order, or in
reverse, to arrays ``(rows, chunks, ...)``; states are ``(rows, value_dim, key_dim)``. In order, the
states before the chunks are outputs too, the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ejkernel.ops import Implementation

from ..dot import dot
from .arguments import Arguments, Gradients, implementation, like_given, with_features
from .segments import NotFinite

Precision: TypeAlias = lax.Precision | lax.DotAlgorithmPreset
Level: TypeAlias = int | Array
Sums = TypeVar("Sums")
Step = Callable[..., tuple[Array, tuple[Array, ...]]]
Arrays = dict[str, Any]
Walk = Callable[..., tuple[Array, ...]]
"""`walk(step, state, inputs, outputs, reverse=)`: the outputs, of the shapes and dtypes given under
their names, and the state after the last step."""

MOST_TOKENS = 1024
"""Limit of a chunk: the weights of its tokens for each other are all in memory."""


@dataclass(frozen=True)
class Chunk:
    """The products of one chunk.

    Args:
        size: Tokens, a power of two.
        precision: Of the products.
        exact: Of the products with zeros and ones, that is sums: that of float32 in some form.
        unrolled: Whether the levels are written out one after the other, or are a loop.
        dtype: Of everything that goes in and comes out.
    """

    size: int
    precision: Precision = lax.Precision.HIGHEST
    exact: Precision = lax.Precision.HIGHEST
    unrolled: bool = True
    dtype: DTypeLike = jnp.float32

    def forward(
        self, state: Array, q: Array, k: Array, v: Array, g: Array | None = None
    ) -> tuple[Array, Array]:
        """The transposed state after the chunk, and the outputs."""
        since_begin, to_end, whole = self._decays(g, q)
        before = _rows_reached(self._dot_t(_decayed(q, since_begin), state), since_begin)
        out = self._dot(self._inside(q, k, g), v) + before
        return _decayed(state, whole) + self._dot(v.T, _decayed(k, to_end)), out

    def backward(
        self, state: Array, dstate: Array, dout: Array, q: Array, k: Array, v: Array, g: Any = None
    ) -> Gradients:
        """Gradients, from the state before the chunk and the gradient of the one after it."""
        since_begin, to_end, whole = self._decays(g, q)
        d_early, d_late = self._dot(dout, state), self._dot(v, dstate)
        inside = self._inside(q, k, g)
        dq, dk, dg = self._inside_backward(q, k, g, self._dot_t(dout, v))
        dv = self._dot(inside.T, dout)
        dv = dv + _rows_reached(self._dot_t(_decayed(k, to_end), dstate), to_end)
        dstate_before = _decayed(dstate, whole) + self._dot(dout.T, _decayed(q, since_begin))
        if g is not None:
            early = self._sum(self._triangle().T, _decayed(q * d_early, since_begin))
            late = self._sum(self._behind().T, _decayed(k * d_late, to_end))
            by_channel = (
                _rows_reached(early, since_begin)
                + _rows_reached(late, to_end)
                + jnp.sum(_decayed(dstate * state, whole), axis=0, keepdims=True)
            )
            if g.shape[1] == 1:
                by_channel = jnp.sum(by_channel, axis=1, keepdims=True)
            dg = by_channel if dg is None else dg + by_channel
        dq, dk = dq + _decayed(d_early, since_begin), dk + _decayed(d_late, to_end)
        return dq, dk, dv, dg, dstate_before

    def _decays(self, g: Array | None, like: Array) -> tuple[Array | None, ...]:
        """From the chunk's beginning to each token, from behind it to the end, and of all."""
        if g is None:
            return None, None, None
        # One number per token is spread over the channels: a product with one column is not
        # something that matrix units do.
        g = jnp.broadcast_to(g, like.shape)
        sums = self._sum(self._triangle(), g), self._sum(self._behind(), g)
        return *map(jnp.exp, sums), jnp.exp(jnp.sum(g, axis=0, keepdims=True))

    def _inside(self, q: Array, k: Array, g: Array | None) -> Array:
        """The weights of the chunk's tokens for each other, zero above the diagonal."""
        t, j = self._token(0), self._token(1)
        scores = self._dot_t(q, k)
        if g is None or g.shape[1] == 1:
            return jnp.where(j <= t, _decayed(scores, self._between(g)), 0.0)

        def add_level(level: Level, weights: Array) -> Array:
            decay = jnp.exp(self._sum(self._middle(level), g))
            return jnp.where(self._pairs(level), self._dot_t(q * decay, k * decay), weights)

        return self._for_levels(add_level, jnp.where(j == t, scores, 0.0))

    def _inside_backward(
        self, q: Array, k: Array, g: Array | None, dweights: Array
    ) -> tuple[Array, Array, Array | None]:
        t, j = self._token(0), self._token(1)
        if g is None or g.shape[1] == 1:
            decay, dg = self._between(g), None
            dscores = jnp.where(j <= t, _decayed(dweights, decay), 0.0)
            if decay is not None:
                terms = jnp.where(j <= t, _decayed(dweights * self._dot_t(q, k), decay), 0.0)
                dbetween = self._sum(self._triangle().T, terms)
                between = (j < t) & (decay != 0.0)
                dg = jnp.sum(jnp.where(between, dbetween, 0.0), axis=1, keepdims=True)
            return self._dot(dscores, k), self._dot(dscores.T, q), dg
        diagonal = jnp.where(j == t, dweights, 0.0)

        def add_level(level: Level, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dg = sums
            decay = jnp.exp(self._sum(self._middle(level), g))
            dscores = jnp.where(self._pairs(level), dweights, 0.0)
            dq_level = _decayed(self._dot(dscores, k * decay), decay)
            dk_level = _decayed(self._dot(dscores.T, q * decay), decay)
            terms = q * dq_level + k * dk_level
            # Zero times what has overflown, in another segment, would be NaN.
            terms = jnp.where(jnp.abs(terms) < jnp.inf, terms, 0.0)
            dg = dg + self._sum(self._middle(level).T, terms)
            return dq + dq_level, dk + dk_level, dg

        start = self._dot(diagonal, k), self._dot(diagonal.T, q), jnp.zeros_like(g)
        return self._for_levels(add_level, start)

    def _between(self, g: Array | None) -> Array | None:
        """The decay per head from token j to a later token t; none elsewhere."""
        if g is None:
            return None
        later = self._token(1) < self._token(0)
        return jnp.exp(self._sum(self._triangle(), jnp.where(later, g + self._zeros(), 0.0)))

    def _for_levels(self, add: Callable[[Level, Sums], Sums], sums: Sums) -> Sums:
        """`add` for every level, which is the logarithm of the size of a half."""
        count = self.size.bit_length() - 1
        if not self.unrolled:
            result: Sums = lax.fori_loop(0, count, add, sums)
            return result
        for level in range(count):
            sums = add(level, sums)
        return sums

    def _pairs(self, level: Level) -> Array:
        """Is t in a right half, and j in the left half of the same pair?"""
        t, j = self._token(0) >> level, self._token(1) >> level
        return (t == j + 1) & (t & 1 == 1)

    def _middle(self, level: Level) -> Array:
        """Which u lie between a token and the middle of its pair of halves."""
        t, u = self._token(0), self._token(1)
        # In a right half those up to t, in a left half those behind it.
        right = (t >> level) & 1
        between = jnp.where(right == 1, t - u, u - t - 1) >= 0
        return self._ones_where((t >> level == u >> level) & between)

    def _triangle(self) -> Array:
        return self._ones_where(self._token(1) <= self._token(0))

    def _behind(self) -> Array:
        return self._ones_where(self._token(1) > self._token(0))

    def _token(self, axis: int) -> Array:
        return lax.broadcasted_iota(jnp.int32, (self.size, self.size), axis)

    def _zeros(self) -> Array:
        return jnp.zeros((self.size, self.size), self.dtype)

    def _ones_where(self, condition: Array) -> Array:
        return jnp.where(condition, 1.0, self._zeros())

    def _dot(self, a: Array, b: Array, axis: int = 0, precision: Precision | None = None) -> Array:
        precision = self.precision if precision is None else precision
        return dot(a, b, (1, axis), dtype=self.dtype, precision=precision)

    def _dot_t(self, a: Array, b: Array) -> Array:
        return self._dot(a, b, axis=1)

    def _sum(self, ones: Array, terms: Array) -> Array:
        return self._dot(ones, terms, precision=self.exact)


def _decayed(x: Array, decay: Array | None) -> Array:
    """``x`` after a decay; of what is forgotten not even an infinity is left."""
    if decay is None:
        return x
    return jnp.where(decay == 0.0, 0.0, x * decay)


def _rows_reached(x: Array, decay: Array | None) -> Array:
    """The rows of which a decay leaves something in some channel, zeros for the others.

    A product with a row of zeros would do, were there no infinities in the state.
    """
    if decay is None:
        return x
    return jnp.where(jnp.max(decay, axis=1, keepdims=True) == 0.0, 0.0, x)


def forward(call: Arguments, chunk: Chunk, walk: Walk) -> tuple[Array, Array, Array]:
    """The outputs, the last state, and the states before the chunks as `backward` reads them.

    With segments, nothing of one of them is in another.
    """

    def step(state: Array, *tokens: Array) -> tuple[Array, tuple[Array, ...]]:
        q, *rest = (x.astype(chunk.dtype) for x in tokens)
        after, out = chunk.forward(state, call.scale * q, *rest)
        return after, (out,)

    found = NotFinite(call) if call.segments else None
    call = found.call if found else call
    state = call.state_rows(call.initial_state).swapaxes(1, 2)
    inputs = _named(call, chunk.size)
    rows, chunks, *_ = inputs["v"].shape
    outputs = {
        "states": jax.ShapeDtypeStruct((rows, chunks, *state.shape[1:]), state.dtype),
        "out": jax.ShapeDtypeStruct(inputs["v"].shape, call.q.dtype),
    }
    states, out, last = walk(step, state, inputs, outputs, reverse=False)
    out = _from_chunks(out, call.q)
    last = call.state_by_batch(last.swapaxes(1, 2))
    return *(found.shown(out, last) if found else (out, last)), states


def backward(
    call: Arguments, chunk: Chunk, walk: Walk, states: Array, dout: Array, dstate: Array | None
) -> Gradients:
    """The gradients, from the states of `forward` and the gradients of its results."""

    def step(dstate: Array, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
        *tokens, dout, state = (x.astype(chunk.dtype) for x in arrays)
        # The scale may stand at the queries or at the gradient; there, dq needs it too.
        *found, dstate = chunk.backward(state, dstate, call.scale * dout, *tokens)
        return dstate, tuple(x for x in found if x is not None)

    found = NotFinite(call, dout, dstate) if call.segments else None
    if found:
        call, dout, dstate = found.call, found.dout, found.dstate
    tokens = _named(call, chunk.size)
    inputs = {**tokens, "dout": _in_chunks(dout, chunk.size), "states": states}
    outputs = {f"d{n}": jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in tokens.items()}
    dlast = call.state_rows(dstate).swapaxes(1, 2)
    *made, dfirst = walk(step, dlast, inputs, outputs, reverse=True)
    # None for the decay, if there is none.
    by_token = jax.tree.map(_from_chunks, (*made, None)[:4], call.tokens)
    gradients = (*by_token, call.state_by_batch(dfirst.swapaxes(1, 2)))
    return found.shown_gradients(gradients) if found else gradients


def pallas_implementation(
    prepare: Callable[[Arguments, Any], tuple[Chunk, Walk]], **declared: Any
) -> Implementation[Any, Any]:
    """One that stores the states between chunks for its gradient.

    `prepare(call, cfg)` gives its products and its walk.
    """
    return implementation(
        lambda call, cfg: forward(call, *prepare(call, cfg)),
        lambda call, cfg, *rest: backward(call, *prepare(call, cfg), *rest),
        **declared,
    )


def _named(call: Arguments, size: int) -> Arrays:
    tokens = zip("qkvg", call.tokens, strict=True)
    return {name: _in_chunks(x, size) for name, x in tokens if x is not None}


def _in_chunks(x: Array, size: int) -> Array:
    """``(rows, chunks, size, features)``, with zeros appended to whole chunks.

    A token of zeros adds nothing to the state, lets nothing decay, and reads nothing.
    """
    x = with_features(x)
    batch, length, heads, features = x.shape
    chunks = -(-length // size)
    x = x.swapaxes(1, 2).reshape(batch * heads, length, features)
    x = jnp.pad(x, ((0, 0), (0, chunks * size - length), (0, 0)))
    return x.reshape(batch * heads, chunks, size, features)


def _from_chunks(x: Array, like: Array) -> Array:
    """The inverse of `_in_chunks`, in the shape (but for features) and dtype of `like`."""
    batch, length, heads = like.shape[:3]
    x = x.reshape(x.shape[0], -1, x.shape[3])[:, :length]
    return like_given(x.reshape(batch, heads, length, x.shape[2]).swapaxes(1, 2), like)
