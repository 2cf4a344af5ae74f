r"""The loss in plain JAX: some rows at a time, gradients in the same sweep.

Only the logits of ``rows`` rows exist at a time. When the loss is differentiated, their softmax is
at hand right then, so the gradients of these rows are computed at once,

.. math::
    \mathrm{dh} = G \, W^T, \qquad \mathrm{dW} \mathrel{+}= h^T G ,

with :math:`G` the gradient of the logits, instead of computing the logits a second time in the
backward pass: three large products in all, as many as the plain loss needs with all its logits in
memory. This takes the gradient of each row's loss beforehand, which is known when rows are summed
or averaged: up to one factor, that is applied in the end.

``dW`` is too large to be added to as a whole (the product would exist beside it), so it is updated
for ``vocab`` words at a time.

Example:
    >>> import jax.numpy as jnp
    >>> hidden, weight, labels = jnp.ones((5, 4)), jnp.ones((4, 10)), jnp.arange(5)
    >>> losses(hidden, weight, labels, None, LossOptions(), rows=2).shape
    (5,)
    >>> found = losses_and_gradients(
    ...     hidden, weight, labels, jnp.ones(5), None, LossOptions(), rows=2, vocab=4
    ... )
    >>> found.dhidden.shape, found.dweight.shape
    ((5, 4), (4, 10))
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.core.varying import vary_alike

from ..dtypes import accumulation_dtype
from ..slicing import put_in_dim, take_in_dim
from .options import LossOptions


class LossAndGradients(NamedTuple):
    """Losses of the rows, and the gradients of a weighted sum of them."""

    losses: jax.Array
    dhidden: jax.Array
    dweight: jax.Array
    dbias: jax.Array | None


def losses(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    options: LossOptions,
    *,
    rows: int,
) -> jax.Array:
    """The loss of every row; 0 where the label is to be ignored.

    Args:
        hidden: ``(n, d)``.
        weight: ``(d, vocab)``, or ``(vocab, d)`` with ``options.vocab_first``.
        labels: ``(n,)``.
        bias: ``(vocab,)`` or None.
        options: What is computed.
        rows: Most rows whose logits exist at a time.
    """
    chunks = _Chunks.of(hidden.shape[0], rows)

    def of_rows(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, labels = part
        unscaled = _unscaled_logits(hidden, weight, bias, options)
        return _Softmax.of(unscaled, options).losses(labels, options)

    if chunks.count == 1:
        return of_rows((hidden, labels))
    split = (chunks.split(hidden), chunks.split(labels, fill=options.ignore_index))
    result: jax.Array = lax.map(of_rows, split)
    return result.reshape(-1)[: hidden.shape[0]]


def losses_and_gradients(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    factors: jax.Array,
    bias: jax.Array | None,
    options: LossOptions,
    *,
    rows: int,
    vocab: int,
) -> LossAndGradients:
    """The loss of every row, and the gradients of ``sum(factors * losses)``.

    Args:
        hidden: As in :func:`losses`, and so are the arguments that are not listed here.
        factors: ``(n,)``; rows to be ignored are treated as if theirs were 0.
        vocab: Words for which the gradient of the weight is updated at a time.

    Returns:
        ``dhidden`` has the dtype of ``hidden``; the sums over rows are in the accumulation's.
    """
    dtype = accumulation_dtype(hidden.dtype)
    factors = jnp.where(labels != options.ignore_index, factors.astype(dtype), 0.0)
    chunks = _Chunks.of(hidden.shape[0], rows)
    padded = chunks.pad(hidden)
    padded_labels = chunks.pad(labels, fill=options.ignore_index)
    padded_factors = chunks.pad(factors)

    def add(i: Any, sums: LossAndGradients | None) -> LossAndGradients:
        h, y, f = (chunks.take(a, i) for a in (padded, padded_labels, padded_factors))
        unscaled = _unscaled_logits(h, weight, bias, options)
        softmax = _Softmax.of(unscaled, options)
        words = lax.broadcasted_iota(jnp.int32, unscaled.shape, 1) + options.first_word(
            unscaled.shape[1]
        )
        gradient = options.product_gradients(
            options.scaled(unscaled),
            softmax.exponentials * (1.0 / softmax.total),
            softmax.lse,
            words == y[:, None],
            f[:, None],
            options.vocabulary(unscaled.shape[1]),
        )
        # Products of a matrix in bfloat16 with one in float32 would be computed in float32.
        factor = gradient.astype(weight.dtype)
        words_axis = 0 if options.vocab_first else 1
        dhidden = _product(factor, weight, (1, words_axis), dtype).astype(hidden.dtype)
        dbias = None if bias is None else jnp.dot(jnp.ones_like(f), gradient, precision="highest")
        row_losses = softmax.losses(y, options)
        if sums is None:
            dweight = _weight_gradient(h, factor, options, dtype)
            return LossAndGradients(row_losses, dhidden, dweight, dbias)
        return LossAndGradients(
            chunks.put(sums.losses, row_losses, i),
            chunks.put(sums.dhidden, dhidden, i),
            _add_weight_gradient(sums.dweight, h, factor, options, vocab),
            None if dbias is None or sums.dbias is None else sums.dbias + dbias,
        )

    if chunks.count == 1:
        return add(0, None)
    empty = LossAndGradients(
        jnp.zeros(chunks.padded, dtype),
        jnp.zeros_like(padded),
        jnp.zeros_like(weight, dtype),
        None if bias is None else jnp.zeros_like(bias, dtype),
    )
    empty = vary_alike(empty, hidden, weight, labels, factors, bias)
    sums: LossAndGradients = lax.fori_loop(0, chunks.count, add, empty)
    n = hidden.shape[0]
    return sums._replace(losses=sums.losses[:n], dhidden=sums.dhidden[:n])


class _Softmax(NamedTuple):
    """A softmax before its division, and what losses need of its logits.

    Logits are subtracted from the largest of their row before they are multiplied. A compiler fuses
    a multiplication and a subtraction behind it into one that does not round in between: of logits
    of 1e10 the largest would then differ from itself by hundreds.
    """

    unscaled: jax.Array
    best: jax.Array  # (rows, 1), the unscaled logit of which the largest is made
    exponentials: jax.Array
    total: jax.Array  # (rows, 1)
    lse: jax.Array  # (rows, 1)

    @staticmethod
    def of(unscaled: jax.Array, options: LossOptions) -> _Softmax:
        sign = 1.0 if options.factor > 0 else -1.0
        best = jnp.max(sign * unscaled, axis=-1, keepdims=True)
        best = sign * (lax.pmax(best, options.vocab_axes) if options.vocab_axes else best)
        exponentials = jnp.exp(options.scaled(unscaled - best))
        total = options.over_vocabulary(jnp.sum(exponentials, axis=-1, keepdims=True))
        lse = options.scaled(best) + jnp.log(total)
        return _Softmax(unscaled, best, exponentials, total, lse)

    def losses(self, labels: jax.Array, options: LossOptions) -> jax.Array:
        words = self.unscaled.shape[-1]
        vocab = options.vocabulary(words)
        known = (labels >= 0) & (labels < vocab)
        place = labels - options.first_word(words)
        here = known & (place >= 0) & (place < words)
        index = jnp.where(here, place, 0)[:, None]
        picked = options.scaled(jnp.take_along_axis(self.unscaled, index, axis=-1) - self.best)
        picked = picked[:, 0]
        if options.vocab_axes:
            picked = options.over_vocabulary(jnp.where(here, picked, 0.0))
        total = picked
        if options.label_smoothing:
            below = options.scaled(self.unscaled - self.best)
            total = options.over_vocabulary(jnp.sum(below, axis=-1))
        found = options.loss(
            jnp.log(self.total[:, 0]),
            jnp.where(known, picked, jnp.nan),
            total,
            vocab,
            self.lse[:, 0],
        )
        return jnp.where(labels == options.ignore_index, 0.0, found)


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Rows in equal chunks: 1000 rows, at most 512 at a time, are 500 and 500."""

    count: int
    size: int

    @staticmethod
    def of(n: int, rows: int) -> _Chunks:
        count = max(1, -(-n // max(1, rows)))
        return _Chunks(count, -(-n // count))

    @property
    def padded(self) -> int:
        return self.count * self.size

    def pad(self, array: jax.Array, fill: int = 0) -> jax.Array:
        widths = [(0, self.padded - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths, constant_values=fill) if widths[0][1] else array

    def split(self, array: jax.Array, fill: int = 0) -> jax.Array:
        return self.pad(array, fill).reshape(self.count, self.size, *array.shape[1:])

    def take(self, array: jax.Array, i: Any) -> jax.Array:
        return take_in_dim(array, i * self.size, self.size)

    def put(self, array: jax.Array, part: jax.Array, i: Any) -> jax.Array:
        return put_in_dim(array, part, i * self.size)


def _unscaled_logits(
    hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, options: LossOptions
) -> jax.Array:
    products = _product(
        hidden, weight, (1, 1 if options.vocab_first else 0), accumulation_dtype(hidden.dtype)
    )
    return options.unscaled(products, None if bias is None else bias[None, :])


def _product(a: jax.Array, b: jax.Array, contracted: tuple[int, int], dtype: Any) -> jax.Array:
    axes = ((contracted[:1], contracted[1:]), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _weight_gradient(
    hidden: jax.Array, gradient: jax.Array, options: LossOptions, dtype: Any
) -> jax.Array:
    """The gradient of the weights of the words that ``gradient`` has columns for."""
    hidden = hidden.astype(gradient.dtype)
    pair = (gradient, hidden) if options.vocab_first else (hidden, gradient)
    return _product(*pair, (0, 0), dtype)


def _add_weight_gradient(
    dweight: jax.Array, hidden: jax.Array, gradient: jax.Array, options: LossOptions, vocab: int
) -> jax.Array:
    axis = 0 if options.vocab_first else 1
    size = dweight.shape[axis]
    vocab = min(vocab, size)

    def add(start: Any, words: int, dweight: jax.Array) -> jax.Array:
        part = take_in_dim(gradient, start, words, axis=1)
        found = _weight_gradient(hidden, part, options, dweight.dtype)
        found = found + take_in_dim(dweight, start, words, axis)
        return put_in_dim(dweight, found, start, axis)

    whole = size // vocab
    dweight = lax.fori_loop(0, whole, lambda j, sums: add(j * vocab, vocab, sums), dweight)
    return add(whole * vocab, size % vocab, dweight) if size % vocab else dweight
