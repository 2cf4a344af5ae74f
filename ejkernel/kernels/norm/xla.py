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
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops import Invocation, device_kind

from ..dtypes import accumulation_dtype
from ..limits import COUNT
from ..row_blocks import in_row_blocks
from .arguments import Arguments, Output, per_feature, rows_and_features

Moments = tuple[jax.Array | None, jax.Array]
"""The mean of each row, of layer norm only, and its factor, each `(..., 1)`."""


@dataclasses.dataclass(frozen=True)
class NormXlaConfig:
    """How many rows the backward pass computes at a time; as many as there are means no blocks.

    In blocks, the array between its two steps stays in the cache and takes no memory.
    """

    backward_block_m: Annotated[int, COUNT] = 256

    @classmethod
    def heuristic(cls, inv: Invocation[Any, Any]) -> NormXlaConfig:
        """Blocks where arrays are larger than a CPU's caches; other devices have none of that kind.

        From interleaved timings (16 to 16,384 rows of 256 to 4096 features, two Zen 3 cores):
        blocks are worth their loop when the arrays are larger than the caches; 8 million elements
        take 0.8 to 1.0 of the time then. Up to 3 million, one block takes 0.65 to 0.95 of the time
        of several; with 4 million it was anything between 0.7 and 1.4. Blocks of 128 to 512
        thousand elements are equally good.
        """
        rows, features = rows_and_features(inv.args[0])
        if device_kind() != "cpu" or rows * features <= 3 * 2**20:
            return cls(rows)
        return cls(min(rows, max(8, 2**18 // features)))

    @classmethod
    def space(cls, inv: Invocation[Any, Any]) -> list[NormXlaConfig]:
        rows, features = rows_and_features(inv.args[0])
        sizes = (min(rows, max(8, size)) for size in (2**17 // features, 2**19 // features, rows))
        return [cls(size) for size in dict.fromkeys(sizes)]


def normalise(call: Arguments, cfg: NormXlaConfig) -> tuple[Output, Moments]:
    """The output and the moments; nothing is reshaped, because leading axes may be sharded."""
    summed = call.x if call.residual is None else call.x + call.residual
    values = summed.astype(accumulation_dtype(call.x.dtype))
    mean = _mean(values, call.feature_axes) if call.centered else None
    values = values if mean is None else values - mean
    rstd = lax.rsqrt(_mean(values * values, call.feature_axes) + call.eps)
    out = values * rstd
    if (scale := _scale_of(call)) is not None:
        out = out * per_feature(scale, out)
    if call.bias is not None:
        out = out + per_feature(call.bias.astype(values.dtype), out)
    out = out.astype(call.x.dtype)
    return out if call.residual is None else (out, summed), (mean, rstd)


def differentiate(
    call: Arguments, moments: Moments, cotangents: Any, cfg: NormXlaConfig
) -> tuple[jax.Array | None, ...]:
    """The gradients of `x`, weight and bias; the last two in the dtype of the accumulation."""
    dout, dsummed = cotangents
    rows, columns = rows_and_features(call.x)
    features = columns * _parts(call.feature_axes)
    scale = _scale_of(call)

    def compute(x: jax.Array, dout: jax.Array, moments: Moments) -> tuple[jax.Array, Any]:
        gradient = dout.astype(accumulation_dtype(x.dtype))
        values, (mean, rstd) = x.astype(gradient.dtype), moments
        if mean is not None:
            values = values - mean
        product = gradient * values
        # One after the other: the cube alone leaves float32 for rows below 1e-13 and above 1e12.
        average = _row_sums(product, scale, call.feature_axes) / features
        shrink = rstd * (rstd * (rstd * average))
        scaled = gradient if scale is None else gradient * per_feature(scale, gradient)
        dx = rstd * scaled - values * shrink
        if mean is not None:
            dx = dx - (rstd / features) * _row_sums(gradient, scale, call.feature_axes)
        factors = rstd[..., 0]
        dweight = None if call.weight is None else _column_sums(factors, product)
        dbias = None if call.bias is None else _column_sums(jnp.ones_like(factors), gradient)
        return dx.astype(x.dtype), (dweight, dbias)

    arrays = (call.x, dout, moments)
    if cfg.backward_block_m >= rows:
        dx, sums = compute(*arrays)
    else:
        flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), arrays)
        dx, sums = in_row_blocks(compute, flat, cfg.backward_block_m, like=call.weight)
        dx = dx.reshape(call.x.shape)
    return dx if dsummed is None else (dx + dsummed).astype(dx.dtype), *sums


def _scale_of(call: Arguments) -> jax.Array | None:
    """The factor of each feature, or None if there is none."""
    if call.weight is None:
        return None
    scale = call.weight.astype(accumulation_dtype(call.x.dtype))
    return scale + call.weight_offset if call.weight_offset else scale


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
    """The sum of all rows, each times its factor."""
    leading = tuple(range(factors.ndim))
    contracted = ((leading, leading), ((), ()))
    return lax.dot_general(factors, matrix, contracted, precision=lax.Precision.HIGHEST)
