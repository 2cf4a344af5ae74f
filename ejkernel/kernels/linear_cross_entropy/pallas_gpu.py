"""The forward pass of the loss on GPU, by Pallas' Triton backend: no logit leaves the chip.

A program computes one tile of logits and writes two numbers per row, the log-sum-exp of the tile
and (with label smoothing) the sum of its logits; XLA combines the tiles. The logit of the label is
a product of two vectors per row, which XLA computes from the gathered weights.

There is no Triton backward pass. The gradient of a block of rows, (rows x features) in float32,
does not fit into registers, so a kernel would have to add to memory atomically, or compute the
logits again for every part of the features. `xla.py` computes the gradients beside the loss with
three calls of cuBLAS per chunk of rows and nothing twice.

Example:
    >>> import jax.numpy as jnp
    >>> from .options import LossOptions
    >>> hidden, weight, labels = jnp.zeros((8, 4)), jnp.zeros((4, 16)), jnp.arange(8)
    >>> tile = dict(rows=16, vocab=16, depth=16, num_warps=4, num_stages=2, interpret=True)
    >>> round(float(losses(hidden, weight, labels, None, LossOptions(), **tile)[0]), 4)  # log 16
    2.7726
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .options import LossOptions


def losses(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    options: LossOptions,
    *,
    rows: int,
    vocab: int,
    depth: int,
    num_warps: int,
    num_stages: int,
    interpret: bool = False,
) -> jax.Array:
    """The loss of every row; 0 where the label is to be ignored.

    Args:
        hidden: ``(n, d)``.
        weight: ``(d, vocab)``, or ``(vocab, d)`` with ``options.vocab_first``.
        labels: ``(n,)``.
        bias: ``(vocab,)`` or None.
        options: What is computed.
        rows: Rows of a tile, a power of two of at least 16.
        vocab: Words of a tile, a power of two of at least 16.
        depth: Features of a step, a power of two of at least 16.
        num_warps: Warps of a program.
        num_stages: Steps that are loaded ahead.
        interpret: Run on any device, slowly.
    """
    n, features = hidden.shape
    words_axis = 0 if options.vocab_first else 1
    words = weight.shape[words_axis]
    tiles = pl.cdiv(words, vocab)
    biases = () if bias is None else (bias,)

    def body(hidden_ref: Any, weight_ref: Any, *refs: Any) -> None:
        lse_ref, sum_ref = refs[len(biases) :]
        row = pl.program_id(0) * rows + jnp.arange(rows)
        word = pl.program_id(1) * vocab + jnp.arange(vocab)
        row_real, word_real = row < n, word < words

        def add(step: Any, products: jax.Array) -> jax.Array:
            feature = step * depth + jnp.arange(depth)
            real = feature < features
            left = plgpu.load(
                hidden_ref.at[row[:, None], feature[None, :]],
                mask=row_real[:, None] & real[None, :],
                other=0.0,
            )
            if options.vocab_first:
                right = plgpu.load(
                    weight_ref.at[word[:, None], feature[None, :]],
                    mask=word_real[:, None] & real[None, :],
                    other=0.0,
                ).T
            else:
                right = plgpu.load(
                    weight_ref.at[feature[:, None], word[None, :]],
                    mask=real[:, None] & word_real[None, :],
                    other=0.0,
                )
            product: jax.Array = plgpu.dot(left, right)
            return products + product

        zero = jnp.zeros((rows, vocab), jnp.float32)
        products = lax.fori_loop(0, pl.cdiv(features, depth), add, zero)
        bias_tile = None
        if bias is not None:
            bias_tile = plgpu.load(refs[0].at[word], mask=word_real, other=0.0)[None, :]
        logits = options.logits(products, bias_tile)
        masked = jnp.where(word_real[None, :], logits, -jnp.inf)
        largest = jnp.max(masked, axis=1)  # every tile has a word, so it is a number
        total = jnp.sum(jnp.exp(masked - largest[:, None]), axis=1)
        where = pl.program_id(1) * n + row
        plgpu.store(lse_ref.at[where], largest + jnp.log(total), mask=row_real)
        if options.label_smoothing:
            sums = jnp.sum(jnp.where(word_real[None, :], logits, 0.0), axis=1)
            plgpu.store(sum_ref.at[where], sums, mask=row_real)

    per_tile = jax.ShapeDtypeStruct((tiles * n,), jnp.float32)
    lse, sums = pl.pallas_call(
        body,
        # Neighbouring programs share their part of the weight, the larger array.
        grid=(pl.cdiv(n, rows), tiles),
        out_shape=[per_tile, per_tile if options.label_smoothing else per_tile.update(shape=(1,))],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="linear_cross_entropy_forward",
    )(hidden, weight, *biases)
    row_lse = jax.nn.logsumexp(lse.reshape(tiles, n), axis=0)
    picked = _label_logits(hidden, weight, labels, bias, options)
    total = jnp.sum(sums.reshape(tiles, n), axis=0) if options.label_smoothing else picked
    found = options.loss(row_lse, picked, total, words, row_lse)
    return jnp.where(labels == options.ignore_index, 0.0, found)


def default_tile(itemsize: int) -> tuple[int, int, int]:
    """Rows, words and depth of a tile: 16 KiB of each operand in a step."""
    return 128, 128, 64 if itemsize == 2 else 32


def _label_logits(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    options: LossOptions,
) -> jax.Array:
    axis = 0 if options.vocab_first else 1
    known = (labels >= 0) & (labels < weight.shape[axis])
    index = jnp.where(known, labels, 0)
    rows = jnp.take(weight, index, axis=axis)
    rows = rows if options.vocab_first else rows.T
    products = jnp.sum(hidden.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
    logits = options.logits(products, None if bias is None else jnp.take(bias, index))
    return jnp.where(known, logits, jnp.nan)
