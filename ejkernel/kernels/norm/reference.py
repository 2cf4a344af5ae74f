"""RMS norm and layer norm written the obvious way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..dtypes import accumulation_dtype
from .arguments import Arguments, Output, per_feature


def rms_norm_reference(
    x: jax.Array, weight: jax.Array | None = None, *, eps: float = 1e-6, **options: Any
) -> Output:
    r"""Root-mean-square normalisation of the last axis.

    .. math::
        o_j = \frac{x_j}{\sqrt{\tfrac{1}{d} \sum_l x_l^2 + \epsilon}} \; (w_j + \text{offset})

    Arguments and results are those of :func:`ejkernel.modules.rms_norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm_reference(jnp.array([1.0, 1.0, -1.0]), eps=0.0).tolist()
        [1.0, 1.0, -1.0]
    """
    return _normalised(Arguments(x, weight, eps=eps, centered=False, **options))


def layer_norm_reference(
    x: jax.Array, weight: jax.Array | None = None, *, eps: float = 1e-5, **options: Any
) -> Output:
    r"""Normalisation of the last axis to mean 0 and variance 1.

    .. math::
        \mu = \tfrac{1}{d} \sum_l x_l, \qquad
        o_j = \frac{x_j - \mu}{\sqrt{\tfrac{1}{d} \sum_l (x_l - \mu)^2 + \epsilon}} \;
        (w_j + \text{offset}) + b_j

    Arguments and results are those of :func:`ejkernel.modules.layer_norm`; ``bias`` is a keyword.

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm_reference(jnp.array([4.0, 6.0]), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    return _normalised(Arguments(x, weight, eps=eps, centered=True, **options))


def _normalised(call: Arguments) -> Output:
    summed = call.x if call.residual is None else call.x + call.residual
    values = summed.astype(accumulation_dtype(call.x.dtype))
    if call.centered:
        values = values - jnp.mean(values, axis=-1, keepdims=True)
    out = values / jnp.sqrt(jnp.mean(values**2, axis=-1, keepdims=True) + call.eps)
    if call.weight is not None:
        out = out * per_feature(call.weight.astype(out.dtype) + call.weight_offset, out)
    if call.bias is not None:
        out = out + per_feature(call.bias.astype(out.dtype), out)
    out = out.astype(call.x.dtype)
    return out if call.residual is None else (out, summed)
