"""RMS norm written the obvious way: the definition that every fast version is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype


def rms_norm_reference(
    x: jax.Array,
    *,
    weight: jax.Array | None = None,
    residual: jax.Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
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
    out = values / jnp.sqrt(jnp.mean(values**2, axis=-1, keepdims=True) + eps)
    if weight is not None:
        scale = weight.astype(out.dtype) + weight_offset
        out = out * jnp.expand_dims(scale, tuple(range(out.ndim - 1)))
    out = out.astype(x.dtype)
    return out if residual is None else (out, summed)
