r"""The loss in plain JAX: some rows at a time, gradients in the same sweep.

Only the logits of a block of rows exist at a time. When the loss is differentiated, their softmax
is at hand right then, so the gradients of these rows are computed at once,

.. math::
    \mathrm{dh} = G \, W^T, \qquad \mathrm{dW} \mathrel{+}= h^T G ,

with :math:`G` the gradient of the logits, instead of computing the logits a second time in the
backward pass: three large products in all, as many as the plain loss needs with all its logits in
memory. This takes the gradient of each row's loss beforehand, which is known when rows are summed
or averaged: up to one factor, that is applied in the end.

``dW`` is too large to be added to as a whole (the product would exist next to it), so it is updated
for some words at a time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, device_kind

from ..dot import dot
from ..dtypes import accumulation_dtype
from ..implementations import implementation_of
from ..limits import COUNT
from ..row_blocks import in_row_blocks
from ..slicing import put_in_dim, take_in_dim
from .arguments import Arguments, Sizes

Gradients = tuple[jax.Array, jax.Array, jax.Array | None]
"""Of `hidden`, `weight` and `bias`, where there is one."""


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyXlaConfig:
    """How much is computed at a time.

    Args:
      block_m: rows, if the loss is not differentiated.
      backward_block_m: rows of the loss with its gradients.
      backward_block_n: words whose part of the gradient of `weight` is updated at a time.
    """

    block_m: Annotated[int, COUNT] = 256
    backward_block_m: Annotated[int, COUNT] = 256
    backward_block_n: Annotated[int, COUNT] = 8192

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        sizes = Sizes.of(inv)
        return cls(loss_rows(sizes), *gradient_blocks(sizes))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        # The passes do not share anything, so each is varied while the other stays as it is.
        base, sizes = cls.heuristic(inv), Sizes.of(inv)
        blocks = [rows for rows in (128, 256, 512, 1024) if rows < 2 * sizes.rows]
        words = dict.fromkeys(min(words, sizes.vocab) for words in (1024, 8192, sizes.vocab))
        return [
            *(dataclasses.replace(base, block_m=rows) for rows in blocks),
            *(cls(base.block_m, m, n) for m in blocks for n in words),
        ]


def run(
    call: Arguments, cfg: LinearCrossEntropyXlaConfig, save: bool
) -> tuple[jax.Array, Gradients | None]:
    """The loss, and with `save` the gradients of the sum of the rows' losses.

    Without a reduction, the gradients of the rows' losses are not known yet: the logits have to be
    computed again.
    """
    if save and call.reduction != "none":
        losses, gradients = losses_and_gradients(call, call.sum_gradients(), cfg)
        return call.reduced(losses), gradients

    def block(hidden: jax.Array, labels: jax.Array) -> tuple[jax.Array, None]:
        return _Softmax.of(_unscaled_logits(hidden, call), call).losses(labels, call), None

    rows, like = (call.hidden, call.labels), (call.weight, call.bias)
    losses, _ = in_row_blocks(block, rows, _even(cfg.block_m, call), like)
    return call.reduced(losses), None


def backward(
    call: Arguments, cfg: Any, gradients: Gradients | None, dout: jax.Array
) -> tuple[Any, ...]:
    """The gradients, computed here or only multiplied with that of the result."""
    if gradients is None:
        return call.gradients(*losses_and_gradients(call, call.row_gradients(dout), cfg)[1])
    # In float16 the gradient of a mean is so small that it would be rounded to zero; stored is that
    # of the sum.
    factor = dout * call.share()
    return call.gradients(
        *jax.tree.map(lambda a: (a.astype(factor.dtype) * factor).astype(a.dtype), gradients)
    )


def losses_and_gradients(
    call: Arguments, factors: jax.Array, cfg: Any
) -> tuple[jax.Array, Gradients]:
    """The loss of every row, and the gradients of ``sum(factors * losses)``.

    That of `hidden` has the dtype of `hidden`; the sums over rows are in the accumulation's.
    """
    weight, dtype = call.weight, accumulation_dtype(call.hidden.dtype)
    factors = jnp.where(call.counts, factors.astype(dtype), 0.0)

    def block(hidden: jax.Array, labels: jax.Array, factors: jax.Array) -> tuple[Any, Any]:
        unscaled = _unscaled_logits(hidden, call)
        softmax = _Softmax.of(unscaled, call)
        word = lax.broadcasted_iota(jnp.int32, unscaled.shape, 1) + call.first_word
        gradient = call.product_gradients(
            call.scaled(unscaled),
            softmax.exponentials * (1.0 / softmax.total),
            softmax.lse,
            word == labels[:, None],
            factors[:, None],
        )
        # Products of a matrix in bfloat16 with one in float32 would be computed in float32.
        narrow = gradient.astype(weight.dtype)
        dhidden = dot(narrow, weight, (1, call.words_axis), dtype=dtype).astype(hidden.dtype)
        dbias = None
        if call.bias is not None:
            dbias = jnp.dot(jnp.ones_like(factors), gradient, precision="highest")
        return (softmax.losses(labels, call), dhidden), (hidden, narrow, dbias)

    def add(sums: Any, parts: Any) -> Any:
        hidden, gradient, dbias = parts
        if sums is None:
            return _weight_gradient(hidden, gradient, call), dbias
        dweight = _add_weight_gradient(sums[0], hidden, gradient, call, cfg.backward_block_n)
        return dweight, None if dbias is None else sums[1] + dbias

    rows, like = (call.hidden, call.labels, factors), (weight, call.bias)
    size = _even(cfg.backward_block_m, call)
    (losses, dhidden), (dweight, dbias) = in_row_blocks(block, rows, size, like, add)
    return losses, (dhidden, dweight, dbias)


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
    def of(unscaled: jax.Array, call: Arguments) -> _Softmax:
        most, most_of_all = (jnp.max, lax.pmax) if call.factor > 0 else (jnp.min, lax.pmin)
        best = most(unscaled, axis=-1, keepdims=True)
        if call.vocab_axes:
            best = most_of_all(best, call.vocab_axes)  # type: ignore[no-untyped-call]
        exponentials = jnp.exp(call.scaled(unscaled - best))
        total = call.over_vocabulary(jnp.sum(exponentials, axis=-1, keepdims=True))
        lse = call.scaled(best) + jnp.log(total)
        return _Softmax(unscaled, best, exponentials, total, lse)

    def losses(self, labels: jax.Array, call: Arguments) -> jax.Array:
        known = (labels >= 0) & (labels < call.vocabulary)
        place = labels - call.first_word
        here = known & (place >= 0) & (place < call.words)
        index = jnp.where(here, place, 0)[:, None]
        picked = call.scaled(jnp.take_along_axis(self.unscaled, index, axis=-1) - self.best)
        picked = picked[:, 0]
        if call.vocab_axes:
            picked = call.over_vocabulary(jnp.where(here, picked, 0.0))
        total = picked
        if call.label_smoothing:
            total = call.over_vocabulary(jnp.sum(call.scaled(self.unscaled - self.best), axis=-1))
        log_sum, lse = jnp.log(self.total[:, 0]), self.lse[:, 0]
        found = call.loss(log_sum, jnp.where(known, picked, jnp.nan), total, lse)
        return jnp.where(labels == call.ignore_index, 0.0, found)


def _even(block_m: int, call: Arguments) -> int:
    """Rows of blocks of about one size: 1000 rows, at most 512 at a time, are 500 and 500."""
    rows = call.hidden.shape[0]
    return -(-rows // -(-rows // block_m))


def _unscaled_logits(hidden: jax.Array, call: Arguments) -> jax.Array:
    products = dot(hidden, call.weight, (1, 1 - call.words_axis))
    return call.unscaled(products, None if call.bias is None else call.bias[None, :])


def _weight_gradient(hidden: jax.Array, gradient: jax.Array, call: Arguments) -> jax.Array:
    """The gradient of the weights of the words that ``gradient`` has columns for."""
    dtype = accumulation_dtype(hidden.dtype)
    hidden = hidden.astype(gradient.dtype)
    pair = (gradient, hidden) if call.vocab_first else (hidden, gradient)
    return dot(*pair, (0, 0), dtype=dtype)


def _add_weight_gradient(
    dweight: jax.Array, hidden: jax.Array, gradient: jax.Array, call: Arguments, block_n: int
) -> jax.Array:
    axis, block_n = call.words_axis, min(block_n, call.words)

    def add(start: Any, words: int, dweight: jax.Array) -> jax.Array:
        part = take_in_dim(gradient, start, words, axis=1)
        found = _weight_gradient(hidden, part, call)
        found = found + take_in_dim(dweight, start, words, axis)
        return put_in_dim(dweight, found, start, axis)

    whole, rest = divmod(call.words, block_n)
    dweight = lax.fori_loop(0, whole, lambda j, sums: add(j * block_n, block_n, sums), dweight)
    return add(whole * block_n, rest, dweight) if rest else dweight


def loss_rows(sizes: Sizes) -> int:
    """Rows whose logits exist at a time, if only the loss is wanted.

    On a CPU (interleaved timings, two Zen 3 cores): logits are read again and should be near, so
    4 MiB of them, or 256 rows; 1024 rows of 10,000 words took 1.7 times as long. Elsewhere: logits
    of 256 MiB.
    """
    most = 2**20 if device_kind() == "cpu" else 2**26
    return min(sizes.rows, max(256, most // sizes.vocab))


def gradient_blocks(sizes: Sizes) -> tuple[int, int]:
    """With gradients: rows at a time, and words whose weights are updated at a time.

    On a CPU (interleaved timings, two Zen 3 cores), by the size of the weight's gradient, which
    every block of rows reads and writes:

    * Up to 32 MiB that is cheap, and logits should be near: about 8 MiB of them, all words at a
      time. 1024 rows of 64 features and 10,000 words took 0.5 of the time of one block, 0.8 of
      that of 4096 words at a time; 13 other sizes 0.88 to 1.0 of that of 1024 words. Fewer than
      256 rows took up to 1.1 of the time of 256, and with 1024 features 512 rows 0.96 of it.
    * Beyond, few blocks are fast ones: 512 rows of 50,257 words and 1024 features took 1.0 of the
      plain loss's time in one block, 1.6 in two, 2.1 in four. Logits of 128 MiB are allowed, and
      256 rows whatever they need. The product that is added to the gradient should stay in the
      cache: 1024 words of 1024 features, 4 MiB.

    Elsewhere: logits of 256 MiB, and few enough steps that each fills the device.
    """
    if device_kind() != "cpu":
        return loss_rows(sizes), min(sizes.vocab, 16384)
    if sizes.features * sizes.vocab <= 2**23:
        near = 2 ** round(math.log2(2**21 / sizes.vocab))
        return min(sizes.rows, max(256, sizes.features // 2, near)), sizes.vocab
    rows = max(256, 2**25 // sizes.vocab)
    return min(sizes.rows, rows), min(sizes.vocab, max(256, 2**20 // sizes.features))


XLA = implementation_of(Arguments.of, run, backward, name="xla", config=LinearCrossEntropyXlaConfig)
