"""RMS norm and layer norm written the obvious way."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype

Output = jax.Array | tuple[jax.Array, jax.Array]
"""The output; with a residual, also the sum that was normalised."""


def rms_norm_reference(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> Output:
    r"""Root-mean-square normalisation of the last axis.

    .. math::
        o_j = \frac{x_j}{\sqrt{\tfrac{1}{d} \sum_l x_l^2 + \epsilon}} \; (w_j + \text{offset})

    Args:
        x: ``(..., d)``.
        weight: ``(d,)``; without it nothing is multiplied.
        residual: Shape and dtype of ``x``. Then ``x + residual``, in that dtype, is normalised.
        eps: Added to the mean square.
        weight_offset: Added to the weight.

    Returns:
        The output, in the dtype of ``x``, computed in float32 (float64 for float64); with
        ``residual`` also the sum that was normalised.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm_reference(jnp.array([1.0, 1.0, -1.0]), eps=0.0).tolist()
        [1.0, 1.0, -1.0]
    """
    summed = x if residual is None else x + residual
    values = summed.astype(accumulation_dtype(x.dtype))
    out = _scaled(values, weight, eps, weight_offset).astype(x.dtype)
    return out if residual is None else (out, summed)


def layer_norm_reference(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
) -> Output:
    r"""Normalisation of the last axis to mean 0 and variance 1.

    .. math::
        \mu = \tfrac{1}{d} \sum_l x_l, \qquad
        o_j = \frac{x_j - \mu}{\sqrt{\tfrac{1}{d} \sum_l (x_l - \mu)^2 + \epsilon}} \;
        (w_j + \text{offset}) + b_j

    Arguments and results are those of :func:`rms_norm_reference`; ``bias``, ``(d,)``, is added.

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm_reference(jnp.array([4.0, 6.0]), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    summed = x if residual is None else x + residual
    values = summed.astype(accumulation_dtype(x.dtype))
    values = values - jnp.mean(values, axis=-1, keepdims=True)
    out = _scaled(values, weight, eps, weight_offset)
    if bias is not None:
        out = out + jnp.expand_dims(bias.astype(out.dtype), tuple(range(out.ndim - 1)))
    out = out.astype(x.dtype)
    return out if residual is None else (out, summed)


def _scaled(
    values: jax.Array, weight: jax.Array | None, eps: float, weight_offset: float
) -> jax.Array:
    """Values divided by the root of their mean square, times the weight."""
    out = values / jnp.sqrt(jnp.mean(values**2, axis=-1, keepdims=True) + eps)
    if weight is None:
        return out
    scale = weight.astype(out.dtype) + weight_offset
    return out * jnp.expand_dims(scale, tuple(range(out.ndim - 1)))
