"""`linear_cross_entropy`: a language model's loss without its logits in memory."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.arguments import (
    checked_choice,
    checked_flag,
    checked_floating,
    checked_integer,
    checked_integers,
    checked_number,
    checked_soft_cap,
    given_options,
    refuse_empty,
)
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropy, LinearCrossEntropyConfig
from ejkernel.kernels.linear_cross_entropy.options import IGNORED, UNKNOWN
from ejkernel.ops.utils.serialize import is_symbolic

_kernel = LinearCrossEntropy()

_NAME = "linear_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")


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
    gradients are computed beside the loss, so that nothing is computed twice; with `"none"` the
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
        serves the call on this device.
      cfg: block sizes; by default the tuned ones of the store, else a heuristic.

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
    hidden = checked_floating(_NAME, "hidden", hidden)
    weight = checked_floating(_NAME, "weight", weight)
    labels = checked_integers(_NAME, "labels", labels)
    bias = None if bias is None else checked_floating(_NAME, "bias", bias)
    vocab_first = checked_flag(_NAME, "vocab_first", vocab_first)
    _check_shapes(hidden, weight, labels, bias, vocab_first)
    scale = checked_number(_NAME, "softmax_scale", softmax_scale)
    if scale == 0:
        raise ValueError(f"{_NAME}: softmax_scale={softmax_scale!r} must be finite and not 0")
    smoothing = checked_number(_NAME, "label_smoothing", label_smoothing, least=0, below=1)
    options: dict[str, Any] = {
        "bias": bias,
        "vocab_first": vocab_first or None,
        "label_smoothing": smoothing or None,
        "logits_soft_cap": (
            None if logits_soft_cap is None else checked_soft_cap(_NAME, logits_soft_cap)
        ),
        "z_loss": checked_number(_NAME, "z_loss", z_loss, least=0) or None,
        "softmax_scale": None if scale == 1.0 else scale,
    }
    given = {name: value for name, value in options.items() if value is not None}
    given |= given_options(_NAME, implementation, cfg)
    ignored = checked_integer(_NAME, "ignore_index", ignore_index, least=-(2**31), most=2**31 - 1)
    reduction = checked_choice(_NAME, "reduction", reduction, _REDUCTIONS)  # type: ignore[assignment]
    vocab = weight.shape[0 if vocab_first else 1]
    known = _int32_labels(labels, ignored, vocab)
    if reduction != "none" and is_symbolic(hidden.shape[0]) and implementation != "reference":
        # The rows of an unknown number of entries each by themselves, and then their sum.
        rows = _kernel(hidden, weight, known, reduction="none", **given)
        count = jnp.maximum(jnp.sum(known != IGNORED), 1).astype(rows.dtype)
        return rows.sum() / count if reduction == "mean" else rows.sum()
    return _kernel(hidden, weight, known, reduction=reduction, **given)


def _int32_labels(labels: jax.Array, ignore_index: int, vocab: int) -> jax.Array:
    """Labels as kernels read them, whatever their dtype: those to be ignored are `IGNORED`.

    `ignore_index` and the size of the vocabulary need not fit into the dtype of the labels: -100 as
    a uint8 is 156, which may be a word.
    """
    wide = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    limits = np.iinfo(wide.dtype)
    in_vocabulary = (wide >= 0) & (wide <= min(vocab - 1, int(limits.max)))
    numbers = jnp.where(in_vocabulary, wide, 0).astype(jnp.int32)
    found = jnp.where(in_vocabulary, numbers, jnp.int32(UNKNOWN))
    if not limits.min <= ignore_index <= limits.max:
        return found  # no label is this number
    return jnp.where(wide == ignore_index, jnp.int32(IGNORED), found)


def _check_shapes(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    vocab_first: bool,
) -> None:
    shapes = {"hidden": hidden.shape, "weight": weight.shape, "labels": labels.shape}
    layout = "(vocabulary, features)" if vocab_first else "(features, vocabulary)"
    if len(shapes["weight"]) != 2:
        raise ValueError(f"{_NAME}: weight has shape {shapes['weight']}; it must be {layout}")
    for name, array in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        refuse_empty(_NAME, name, array)
    features, vocab = shapes["weight"][::-1] if vocab_first else shapes["weight"]
    if not shapes["hidden"] or shapes["hidden"][-1] != features:
        other = "vocab_first=False" if vocab_first else "vocab_first=True"
        turned = shapes["hidden"][-1:] == (vocab,)
        hint = f"; is it the other way round ({other})?" if turned else ""
        raise ValueError(
            f"{_NAME}: hidden has shape {shapes['hidden']} and weight, {layout}, has shape "
            f"{shapes['weight']}; their features must be equal{hint}"
        )
    if shapes["labels"] != shapes["hidden"][:-1]:
        raise ValueError(
            f"{_NAME}: labels has shape {shapes['labels']}; for hidden of shape {shapes['hidden']} "
            f"it must be {shapes['hidden'][:-1]}, one label per row"
        )
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(
            f"{_NAME}: bias has shape {bias.shape}; it must be {(vocab,)}, one number per word"
        )
