r"""Normalisation of rows in plain JAX, with the gradient written out.

With :math:`c = x` (RMS norm) or :math:`c = x - \operatorname{mean}(x)` (layer norm), :math:`d` the
row's length, :math:`s` the scale (the weight plus its offset) and :math:`b` the bias:

.. math::
    r = \left(\tfrac{1}{d} \textstyle\sum_j c_j^2 + \epsilon\right)^{-1/2}, \qquad
    o_j = r \, c_j \, s_j + b_j .

**Backward.** With the gradient :math:`g` of a row's output and :math:`p_j = g_j c_j`:

.. math::
    \mathrm{dx}_j = r \, g_j s_j - \tfrac{r^3}{d} \, c_j \textstyle\sum_l p_l s_l
        \; \left[ - \tfrac{r}{d} \textstyle\sum_l g_l s_l \right], \qquad
    \mathrm{ds} = \textstyle\sum_{\text{rows}} r \, p, \qquad
    \mathrm{db} = \textstyle\sum_{\text{rows}} g ,

where the bracket belongs to layer norm. So all sums are products of a matrix (:math:`p` or
:math:`g`) with a vector, along its rows and along its columns: one array is written, and XLA's
matrix routines, which use all cores, do the rest. Autodiff of the plain formula writes two arrays
and sums them with reductions that are slower, columns above all.

Arithmetic is in float32, or float64 where the input is.

Example:
    >>> import jax.numpy as jnp
    >>> x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    >>> out, moments = forward(x, eps=0.0, centered=False)
    >>> [[round(float(v), 3) for v in row] for row in out]
    [[0.849, 1.131], [0.849, 1.131]]
    >>> backward(x, jnp.ones_like(x), moments, centered=False, rows=1).dx.shape
    (2, 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.core.varying import vary_alike

from ..dtypes import accumulation_dtype
from ..slicing import put_in_dim, take_in_dim


class Moments(NamedTuple):
    """What the backward pass needs of the forward pass, per row: `(..., 1)`."""

    mean: jax.Array | None  # of layer norm only
    rstd: jax.Array


class Gradients(NamedTuple):
    """Gradients of one call; None for what it did not have."""

    dx: jax.Array
    dweight: jax.Array | None
    dbias: jax.Array | None


def forward(
    x: jax.Array,
    *,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float,
    weight_offset: float = 0.0,
    centered: bool,
    feature_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, Moments]:
    """Normalise the last axis.

    Args:
        x: ``(..., d)``.
        weight: ``(d,)``, or None for ones.
        bias: ``(d,)``, or None for zeros.
        eps: Added to the mean square.
        weight_offset: Added to the weight.
        centered: Whether the mean is subtracted first (layer norm).
        feature_axes: Mesh axes over which the features are sharded, inside of a ``shard_map``.

    Returns:
        The output, in the shape and dtype of ``x``, and the moments of the rows.
    """
    values = x.astype(accumulation_dtype(x.dtype))
    mean = _mean(values, feature_axes) if centered else None
    values = values if mean is None else values - mean
    rstd = lax.rsqrt(_mean(values * values, feature_axes) + eps)
    out = values * rstd
    scale = scale_of(weight, weight_offset, values.dtype)
    if scale is not None:
        out = out * _per_feature(scale, out)
    if bias is not None:
        out = out + _per_feature(bias.astype(values.dtype), out)
    return out.astype(x.dtype), Moments(mean, rstd)


def backward(
    x: jax.Array,
    dout: jax.Array,
    moments: Moments,
    *,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    weight_offset: float = 0.0,
    centered: bool,
    rows: int | None = None,
    feature_axes: tuple[str, ...] = (),
) -> Gradients:
    """Gradients of the inputs of :func:`forward`.

    Args:
        x: As in :func:`forward`, and so are the arguments that are not listed here.
        dout: Gradient of the loss with respect to the output.
        moments: Second result of :func:`forward`.
        rows: How many rows are worked on at a time; None for all. Then the array between the two
            steps of the computation stays in the cache, and no memory is needed for it.

    Returns:
        Gradients with the shapes of their inputs; ``dx`` has the dtype of ``x``, the others are
        sums over all rows and have that of the accumulation.
    """
    features = x.shape[-1] * _parts(feature_axes)
    dtype = accumulation_dtype(x.dtype)
    scale = scale_of(weight, weight_offset, dtype)

    def whole(x: jax.Array, dout: jax.Array, moments: Moments) -> Gradients:
        gradient = dout.astype(dtype)
        values = x.astype(dtype) if moments.mean is None else x.astype(dtype) - moments.mean
        product = gradient * values
        # One after the other: the cube alone leaves float32 for rows below 1e-13 and above 1e12.
        rstd = moments.rstd
        shrink = rstd * (rstd * (rstd * (_row_sums(product, scale, feature_axes) / features)))
        scaled = gradient if scale is None else gradient * _per_feature(scale, gradient)
        dx = moments.rstd * scaled - values * shrink
        if moments.mean is not None:
            dx = dx - (moments.rstd / features) * _row_sums(gradient, scale, feature_axes)
        return Gradients(
            dx.astype(x.dtype),
            None if weight is None else _column_sums(moments.rstd[..., 0], product),
            None if bias is None else _column_sums(jnp.ones_like(moments.rstd[..., 0]), gradient),
        )

    count = x.size // max(x.shape[-1], 1)
    if rows is None or rows >= count:
        return whole(x, dout, moments)
    return _in_blocks(whole, x, dout, moments, rows)


def default_rows(rows: int, features: int) -> int | None:
    """Rows of a block of the backward pass that are good, not best, on a CPU; None for all.

    From interleaved timings (16 to 16,384 rows of 256 to 4096 features, two Zen 3 cores): blocks
    are worth their loop when the arrays are larger than the caches; 8 million elements take 0.8 to
    1.0 of the time then. Up to 3 million, one block takes 0.65 to 0.95 of the time of several; with
    4 million it was anything between 0.7 and 1.4. Blocks of 128 to 512 thousand elements are
    equally good.
    """
    if rows * features <= 3 * 2**20:
        return None
    return min(rows, max(8, 2**18 // max(features, 1)))


def scale_of(
    weight: jax.Array | None, weight_offset: float, dtype: jax.typing.DTypeLike
) -> jax.Array | None:
    """The factor of each feature, or None if there is none."""
    if weight is None:
        return None
    scale = weight.astype(dtype)
    return scale + weight_offset if weight_offset else scale


def _per_feature(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """One number per feature with as many axes as the rows have."""
    return jnp.expand_dims(numbers, tuple(range(like.ndim - 1)))


def _row_sums(
    matrix: jax.Array, scale: jax.Array | None, feature_axes: tuple[str, ...]
) -> jax.Array:
    """The sum of each row, `(..., 1)`, weighted by ``scale``."""
    if scale is None:
        sums = jnp.sum(matrix, axis=-1, keepdims=True)
    else:
        # On a TPU products of float32 are rounded to bfloat16 unless told otherwise.
        sums = jnp.dot(matrix, scale, precision=lax.Precision.HIGHEST)[..., None]
    return lax.psum(sums, feature_axes) if feature_axes else sums


def _mean(values: jax.Array, feature_axes: tuple[str, ...]) -> jax.Array:
    """The mean of each row, `(..., 1)`."""
    mean = jnp.mean(values, axis=-1, keepdims=True)
    return lax.psum(mean, feature_axes) / _parts(feature_axes) if feature_axes else mean


def _parts(axes: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(axis) for axis in axes)


def _column_sums(factors: jax.Array, matrix: jax.Array) -> jax.Array:
    """The sum of all rows, each times its factor. Not reshaped: leading axes may be sharded."""
    leading = tuple(range(factors.ndim))
    contracted = ((leading, leading), ((), ()))
    return lax.dot_general(factors, matrix, contracted, precision=lax.Precision.HIGHEST)


def _in_blocks(
    whole: Callable[[jax.Array, jax.Array, Moments], Gradients],
    x: jax.Array,
    dout: jax.Array,
    moments: Moments,
    rows: int,
) -> Gradients:
    """``whole``, for some rows at a time; the rows that do not fill a block come last."""
    features = x.shape[-1]
    flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), (x, dout, moments))
    count = flat[0].shape[0]
    full = count // rows

    def add(start: Any, size: int, sums: Any) -> Gradients:
        part = whole(*jax.tree.map(lambda a: take_in_dim(a, start, size), flat))
        return Gradients(
            put_in_dim(sums.dx, part.dx, start),
            None if sums.dweight is None else sums.dweight + part.dweight,
            None if sums.dbias is None else sums.dbias + part.dbias,
        )

    kinds = jax.eval_shape(whole, x, dout, moments)
    sums: Gradients = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)
    sums = vary_alike(sums._replace(dx=sums.dx.reshape(-1, features)), flat)
    sums = lax.fori_loop(0, full, lambda i, sums: add(i * rows, rows, sums), sums)
    if count % rows:
        sums = add(full * rows, count % rows, sums)
    return sums._replace(dx=sums.dx.reshape(x.shape))
