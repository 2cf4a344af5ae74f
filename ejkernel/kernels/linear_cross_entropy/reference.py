"""The loss written the obvious way: the definition that every fast version is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype
from .options import scale_below_cap


def linear_cross_entropy_reference(
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
    reduction: str = "mean",
) -> jax.Array:
    r"""Cross entropy of ``softmax(hidden @ weight)``, with all logits in memory.

    For a row :math:`h` of ``hidden`` with label :math:`y`, vocabulary size :math:`V`, smoothing
    :math:`\epsilon` and soft cap :math:`c`:

    .. math::
        a_j &= \text{scale} \, (h \cdot W_j + b_j), \qquad
        l_j = c \tanh(a_j / c) \quad (\text{without a cap } l_j = a_j), \\
        \mathrm{lse} &= \log \sum_j e^{l_j}, \\
        \text{loss} &= \mathrm{lse} - (1 - \epsilon) \, l_y
            - \tfrac{\epsilon}{V} \sum_j l_j + z \, \mathrm{lse}^2 .

    Args:
        hidden: ``(..., d)``.
        weight: ``(d, vocab)``, or ``(vocab, d)`` with ``vocab_first``.
        labels: ``(...)``, integers. A row whose label is ``ignore_index`` counts for nothing; one
            with any other label that is not in the vocabulary has the loss NaN, and a gradient of
            NaN.
        bias: ``(vocab,)``.
        reduction: ``"none"`` for the loss of every row, ``"sum"``, or ``"mean"`` over the rows that
            count (0 if there are none).

    Returns:
        Float32 (float64 for float64 input): a scalar, or ``(...)`` with ``reduction="none"``.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, weight = jnp.zeros((3, 2)), jnp.zeros((2, 8))  # equal logits: log 8
        >>> loss = linear_cross_entropy_reference(hidden, weight, jnp.array([0, 5, -100]))
        >>> round(float(loss), 4)
        2.0794
    """
    dtype = accumulation_dtype(hidden.dtype)
    matrix = weight.T if vocab_first else weight
    counts = labels != ignore_index
    hidden = jnp.where(counts[..., None], hidden, jnp.zeros_like(hidden))
    logits = jnp.matmul(hidden.astype(dtype), matrix.astype(dtype), precision="highest")
    if bias is not None:
        logits = logits + jnp.expand_dims(bias.astype(dtype), tuple(range(logits.ndim - 1)))
    factor = softmax_scale
    if logits_soft_cap is not None:
        logits = jnp.tanh(scale_below_cap(softmax_scale, logits_soft_cap) * logits)
        factor = logits_soft_cap
    # Relative to the row's largest, and multiplied only then: see `xla`. What is subtracted from
    # all logits changes no gradient.
    largest = jnp.max if factor > 0 else jnp.min
    best = jax.lax.stop_gradient(largest(logits, axis=-1, keepdims=True))
    below = factor * (logits - best)
    log_sum = jnp.log(jnp.sum(jnp.exp(below), axis=-1))
    index = jnp.where(counts, labels, 0)
    known = (index >= 0) & (index < logits.shape[-1])
    picked = jnp.take_along_axis(below, jnp.where(known, index, 0)[..., None], axis=-1)[..., 0]
    loss = log_sum - (1.0 - label_smoothing) * picked - label_smoothing * jnp.mean(below, axis=-1)
    if z_loss:
        loss = loss + z_loss * (factor * best[..., 0] + log_sum) ** 2
    loss = jnp.where(counts, loss * jnp.where(known, 1.0, jnp.nan).astype(dtype), 0.0)
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    return total if reduction == "sum" else total / jnp.maximum(jnp.sum(counts), 1).astype(dtype)
