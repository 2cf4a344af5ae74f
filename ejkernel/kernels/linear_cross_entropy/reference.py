"""The loss written the obvious way: the definition that every fast version is tested against."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype
from .arguments import Arguments, scale_below_cap


def linear_cross_entropy_reference(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, **options: Any
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

    Arguments are those of :class:`.kernel.LinearCrossEntropy`. A row with the label
    ``ignore_index`` counts for nothing; one with any other label that is not in the vocabulary has
    the loss NaN, and a gradient of NaN. The result is in float32 (float64 for float64).

    >>> hidden, weight = jnp.zeros((3, 2)), jnp.zeros((2, 8))  # equal logits: log 8
    >>> loss = linear_cross_entropy_reference(hidden, weight, jnp.array([0, 5, -100]))
    >>> round(float(loss), 4)
    2.0794
    """
    call = Arguments.of(hidden, weight, labels, **options)
    dtype = accumulation_dtype(hidden.dtype)
    matrix = weight.T if call.vocab_first else weight
    logits = jnp.matmul(call.hidden.astype(dtype), matrix.astype(dtype), precision="highest")
    if call.bias is not None:
        logits = logits + call.bias.astype(dtype)[None, :]
    factor = call.softmax_scale
    if call.logits_soft_cap is not None:
        logits = jnp.tanh(scale_below_cap(factor, call.logits_soft_cap) * logits)
        factor = call.logits_soft_cap
    # Relative to the row's largest, and multiplied only then: see `xla`. What is subtracted from
    # all logits changes no gradient.
    largest = jnp.max if factor > 0 else jnp.min
    best = jax.lax.stop_gradient(largest(logits, axis=-1, keepdims=True))
    below = factor * (logits - best)
    log_sum = jnp.log(jnp.sum(jnp.exp(below), axis=-1))
    index = jnp.where(call.counts, call.labels, 0)
    known = (index >= 0) & (index < logits.shape[-1])
    picked = jnp.take_along_axis(below, jnp.where(known, index, 0)[:, None], axis=-1)[:, 0]
    smoothing = call.label_smoothing
    loss = log_sum - (1.0 - smoothing) * picked - smoothing * jnp.mean(below, axis=-1)
    if call.z_loss:
        loss = loss + call.z_loss * (factor * best[:, 0] + log_sum) ** 2
    loss = jnp.where(call.counts, loss * jnp.where(known, 1.0, jnp.nan).astype(dtype), 0.0)
    if call.reduction == "none":
        return loss.reshape(call.shape)
    count = jnp.maximum(jnp.sum(call.counts), 1).astype(dtype)
    return jnp.sum(loss) / count if call.reduction == "mean" else jnp.sum(loss)
