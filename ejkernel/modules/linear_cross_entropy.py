"""`linear_cross_entropy`: a language model's loss without its logits in memory."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropy, LinearCrossEntropyConfig
from ejkernel.kernels.linear_cross_entropy.arguments import IGNORED, checked
from ejkernel.ops.utils.serialize import is_symbolic

_kernel = LinearCrossEntropy()


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    vocab_first: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logits_soft_cap: float | None = None,
    z_loss: float = 0.0,
    softmax_scale: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    implementation: str | None = None,
    cfg: LinearCrossEntropyConfig | None = None,
) -> jax.Array:
    r"""Cross entropy of `softmax(hidden @ weight + bias)` with labels, the logits never in memory.

    Differentiable in `hidden`, `weight` and `bias`. With `reduction="mean"` or `"sum"` the
    gradients are computed with the loss, so that nothing is computed twice; with `"none"` the
    logits are computed again in the backward pass. Accumulation is in float32 whatever the input's
    dtype (in float64 for float64).

    Args:
      hidden: `(..., features)`.
      weight: `(features, vocabulary)`, or `(vocabulary, features)` with `vocab_first`.
      labels: `(...)`, integers of any dtype, from 0 to below the size of the vocabulary, or
        `ignore_index`. The loss of a row with any other label is NaN, and so is its gradient,
        unless that of the row's loss is 0 (`jax.numpy.where` left the loss out).
      bias: `(vocabulary,)`, added to the logits.
      vocab_first: the weight is laid out as an embedding table.
      ignore_index: rows with this label count for nothing, whatever is in them. It need not be a
        number that the dtype of the labels can hold.
      label_smoothing: the share of the target that is spread evenly over the vocabulary.
      logits_soft_cap: `c` in `c · tanh(logits / c)`, as Gemma has it; None for none.
      z_loss: factor of the squared log-sum-exp, which is added to the loss of a row.
      softmax_scale: factor on the logits, before the soft cap.
      reduction: `"mean"` over the rows that count (0 if there are none), `"sum"`, or `"none"` for
        the loss of every row.
      implementation: `"xla"`, `"pallas"` (TPU) or `"triton"` (GPU); by default the first that
        supports the call on this device.
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

    Returns:
      A scalar, or `(...)` with `reduction="none"`, in float32 (float64 for float64).

    >>> import jax, jax.numpy as jnp
    >>> hidden, weight = jnp.zeros((2, 3, 4)), jnp.zeros((4, 16))  # equal logits: log 16
    >>> labels = jnp.array([[1, 2, -100], [15, 0, -100]])
    >>> round(float(linear_cross_entropy(hidden, weight, labels)), 4)
    2.7726
    >>> jax.grad(linear_cross_entropy, argnums=1)(hidden, weight, labels).shape
    (4, 16)
    """
    arrays, options = checked(
        hidden,
        weight,
        labels,
        bias,
        vocab_first=vocab_first,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logits_soft_cap=logits_soft_cap,
        z_loss=z_loss,
        softmax_scale=softmax_scale,
        reduction=reduction,
    )
    options |= given_options("linear_cross_entropy", implementation, cfg)
    if reduction == "none" or not is_symbolic(arrays[0].shape[0]) or implementation == "reference":
        return _kernel(*arrays, **options)
    # The rows of an unknown number of entries each by themselves, and then their sum.
    rows = _kernel(*arrays, **{**options, "reduction": "none"})
    count = jnp.maximum(jnp.sum(arrays[2] != IGNORED), 1).astype(rows.dtype)
    return rows.sum() / count if reduction == "mean" else rows.sum()
