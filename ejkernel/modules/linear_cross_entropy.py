"""`linear_cross_entropy`: a language model's loss without its logits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropy, LinearCrossEntropyConfig

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
      labels: `(...)`, integers from 0 to the size of the vocabulary, or `ignore_index`. The loss of
        a row with any other label is NaN.
      bias: `(vocabulary,)`, added to the logits.
      vocab_first: the weight is laid out as an embedding table.
      ignore_index: rows with this label count for nothing.
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
    _check(hidden, weight, labels, bias, vocab_first)
    _check_numbers(label_smoothing, logits_soft_cap, z_loss, softmax_scale, ignore_index)
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"{_NAME}: reduction={reduction!r} must be one of {', '.join(map(repr, _REDUCTIONS))}"
        )
    options: dict[str, Any] = {
        "bias": bias,
        "vocab_first": bool(vocab_first) or None,
        "label_smoothing": float(label_smoothing) or None,
        "logits_soft_cap": None if logits_soft_cap is None else float(logits_soft_cap),
        "z_loss": float(z_loss) or None,
        "softmax_scale": None if softmax_scale == 1.0 else float(softmax_scale),
        "implementation": implementation,
        "cfg": cfg,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return _kernel(
        hidden, weight, labels, ignore_index=int(ignore_index), reduction=reduction, **given
    )


def _check(hidden: Any, weight: Any, labels: Any, bias: Any, vocab_first: Any) -> None:
    shapes = {"hidden": jnp.shape(hidden), "weight": jnp.shape(weight), "labels": jnp.shape(labels)}
    for name, array in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if array is not None and not jnp.issubdtype(jnp.result_type(array), jnp.floating):
            raise TypeError(
                f"{_NAME}: {name} is {jnp.result_type(array)}; it must be a floating type, such as "
                "float32 or bfloat16"
            )
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise TypeError(f"{_NAME}: labels is {jnp.result_type(labels)}; it must be an integer type")
    if isinstance(vocab_first, jax.core.Tracer) or vocab_first not in (True, False):
        raise TypeError(f"{_NAME}: vocab_first must be True or False, got {vocab_first!r}")
    layout = "(vocabulary, features)" if vocab_first else "(features, vocabulary)"
    if len(shapes["weight"]) != 2:
        raise ValueError(f"{_NAME}: weight has shape {shapes['weight']}; it must be {layout}")
    for name, shape in shapes.items():
        if 0 in shape:
            raise ValueError(f"{_NAME}: {name} has shape {shape}; no axis may be empty")
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
    if bias is not None and jnp.shape(bias) != (vocab,):
        raise ValueError(
            f"{_NAME}: bias has shape {jnp.shape(bias)}; it must be {(vocab,)}, one number per word"
        )


def _check_numbers(
    label_smoothing: Any, logits_soft_cap: Any, z_loss: Any, softmax_scale: Any, ignore_index: Any
) -> None:
    numbers: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
        "label_smoothing": (label_smoothing, lambda x: 0 <= x < 1, "at least 0 and below 1"),
        "logits_soft_cap": (logits_soft_cap, lambda x: x > 0, "positive, or None"),
        "z_loss": (z_loss, lambda x: x >= 0, "not negative"),
        "softmax_scale": (softmax_scale, lambda x: x != 0, "not 0"),
    }
    for name, (value, allowed, said) in numbers.items():
        if value is None and name == "logits_soft_cap":
            continue
        if isinstance(value, jax.core.Tracer) or not isinstance(value, (int, float)):
            raise TypeError(f"{_NAME}: {name} must be a number known while tracing, got {value!r}")
        if not (math.isfinite(value) and allowed(value)):
            raise ValueError(f"{_NAME}: {name}={value!r} must be finite and {said}")
    if isinstance(ignore_index, jax.core.Tracer) or not isinstance(ignore_index, int):
        raise TypeError(f"{_NAME}: ignore_index must be an int, got {ignore_index!r}")
