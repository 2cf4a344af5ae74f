"""The forward pass of the loss on GPU, by Pallas' Triton backend: no logit leaves the chip.

A program computes one block of logits and writes two numbers per row, the log-sum-exp of the block
and (with label smoothing) the sum of its logits; XLA combines the blocks. The logit of the label is
a product of two vectors per row, which XLA computes from the gathered weights.

There is no Triton backward pass. The gradient of a block of rows, (rows x features) in float32,
does not fit into registers, so a kernel would have to add to memory atomically, or compute the
logits again for every part of the features. `xla.py` computes the gradients with the loss, by
three calls of cuBLAS per block of rows and nothing twice.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation, Supports

from ..implementations import implementation_of
from ..limits import COUNT, TRITON_SIDE, TritonBlocks
from ..triton_blocks import compiler_params, load, part, products, store
from . import xla
from .arguments import Arguments, Sizes, same_dtype


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyGpuConfig(TritonBlocks):
    """Blocks of the forward kernel, how it is launched, and what XLA's gradients take at a time.

    Args:
      block_m: rows, a power of two.
      block_n: words, a power of two.
      block_k: features of a step, a power of two.
      num_warps: warps of a program.
      num_stages: steps that are loaded ahead.
      backward_block_m: rows of the loss with its gradients.
      backward_block_n: words whose part of the gradient of `weight` is updated at a time.
    """

    block_k: Annotated[int, TRITON_SIDE] = 32
    backward_block_m: Annotated[int, COUNT] = 1024
    backward_block_n: Annotated[int, COUNT] = 16384

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> Self:
        """Not measured: 16 KiB of each operand in a step."""
        sizes = Sizes.of(inv)
        return cls(128, 128, 64 if sizes.itemsize == 2 else 32, 8, 3, *xla.gradient_blocks(sizes))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[Self]:
        gradient_blocks = xla.gradient_blocks(Sizes.of(inv))
        return [
            cls(*blocks, num_warps, num_stages, *gradient_blocks)
            for blocks in ((128, 128, 32), (128, 128, 64), (128, 256, 32), (64, 128, 64))
            for num_warps in (4, 8)
            for num_stages in (2, 3)
        ]


def losses(call: Arguments, cfg: LinearCrossEntropyGpuConfig, interpret: bool = False) -> jax.Array:
    """The loss of every row; 0 where the label is to be ignored."""
    from jax.experimental import pallas as pl

    (rows, features), words = call.hidden.shape, call.words
    word_blocks = pl.cdiv(words, cfg.block_n)
    biases = () if call.bias is None else (call.bias,)

    def body(hidden_ref: Any, weight_ref: Any, *refs: Any) -> None:
        lse_ref, sum_ref = refs[len(biases) :]
        first_row = pl.program_id(0) * cfg.block_m
        row, my_rows = part(first_row, cfg.block_m, rows)
        word, my_words = part(pl.program_id(1) * cfg.block_n, cfg.block_n, words)
        (sums,) = products(
            lambda inner: hidden_ref.at[row, inner],
            [lambda i: weight_ref.at[(word, i) if call.vocab_first else (i, word)]],
            (my_rows, my_words),
            features,
            cfg,
            transposed=call.vocab_first,
        )

        def masked(logits: jax.Array, other: float) -> jax.Array:
            return logits if my_words is None else jnp.where(my_words[None, :], logits, other)

        bias = load(refs[0].at[word], my_words)[None, :] if biases else None
        logits = call.logits(sums, bias)
        real = masked(logits, -jnp.inf)
        largest = jnp.max(real, axis=1)  # every block has a word, so it is a number
        total = jnp.sum(jnp.exp(real - largest[:, None]), axis=1)
        place = pl.ds(pl.program_id(1) * rows + first_row, cfg.block_m)
        store(lse_ref.at[place], largest + jnp.log(total), my_rows)
        if call.label_smoothing:
            store(sum_ref.at[place], jnp.sum(masked(logits, 0.0), axis=1), my_rows)

    per_block = jax.ShapeDtypeStruct((word_blocks * rows,), jnp.float32)
    sums_shape = per_block if call.label_smoothing else per_block.update(shape=(1,))
    lse, sums = pl.pallas_call(
        body,
        # Neighbouring programs share their part of the weight, the larger array.
        grid=(pl.cdiv(rows, cfg.block_m), word_blocks),
        out_shape=[per_block, sums_shape],
        compiler_params=compiler_params(cfg),
        interpret=interpret,
        name="linear_cross_entropy_forward",
    )(call.hidden, call.weight, *biases)
    row_lse = jax.nn.logsumexp(lse.reshape(word_blocks, rows), axis=0)
    picked = _label_logits(call)
    total = picked
    if call.label_smoothing:
        total = jnp.sum(sums.reshape(word_blocks, rows), axis=0)
    found = call.loss(row_lse, picked, total, row_lse)
    return jnp.where(call.counts, found, 0.0)


def _label_logits(call: Arguments) -> jax.Array:
    known = (call.labels >= 0) & (call.labels < call.words)
    index = jnp.where(known, call.labels, 0)
    rows = jnp.take(call.weight, index, axis=call.words_axis)
    rows = rows if call.vocab_first else rows.T
    products = jnp.sum(call.hidden.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
    bias = None if call.bias is None else jnp.take(call.bias, index)
    return jnp.where(known, call.logits(products, bias), jnp.nan)


def run(call: Arguments, cfg: Any, save: bool) -> tuple[jax.Array, Any]:
    """The loss; summed or averaged with `save`, it comes with its gradients from cuBLAS."""
    if save and call.reduction != "none":
        return xla.run(call, cfg, save)
    return call.reduced(losses(call, cfg)), None


PALLAS_GPU = implementation_of(
    Arguments.of,
    run,
    xla.backward,
    name="triton",
    devices=("gpu",),
    config=LinearCrossEntropyGpuConfig,
    supports=Supports(
        dtypes=("float32", "bfloat16", "float16"), without=("vocab_axes",), rules=(same_dtype,)
    ),
)
