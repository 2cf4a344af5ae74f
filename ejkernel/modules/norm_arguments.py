"""What `rms_norm` and `layer_norm` ask of their arguments, and how they call their kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.norm import NormConfig, NormKernel


def normalised(
    kernel: NormKernel,
    x: jax.Array,
    weight: jax.Array | None,
    *,
    eps: float,
    weight_offset: float,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    cfg: NormConfig | None = None,
) -> Any:
    """Check the arguments and call the kernel, without what was not given."""
    check(kernel.op_id, x, weight, bias, residual, eps, weight_offset)
    options: dict[str, Any] = {
        "weight_offset": float(weight_offset) or None,
        "bias": bias,
        "residual": residual,
        "implementation": implementation,
        "cfg": cfg,
    }
    given = {name: value for name, value in options.items() if value is not None}
    weights = () if weight is None else (weight,)
    return kernel(x, *weights, eps=float(eps), **given)


def check(
    name: str, x: Any, weight: Any, bias: Any, residual: Any, eps: Any, weight_offset: Any
) -> None:
    """Raise an error that says what is wrong with the arguments."""
    shape = jnp.shape(x)
    if not shape or 0 in shape:
        raise ValueError(
            f"{name}: x has shape {shape}; it must be (..., features), with no empty axis"
        )
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    for argument, array in arrays.items():
        if array is None:
            continue
        dtype = jnp.result_type(array)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{name}: {argument} is {dtype}; it must be a floating type, such as float32 or "
                "bfloat16"
            )
    for argument in ("weight", "bias"):
        array = arrays[argument]
        if array is not None and jnp.shape(array) != shape[-1:]:
            raise ValueError(
                f"{name}: {argument} has shape {jnp.shape(array)}; for x of shape {shape} it must "
                f"be {shape[-1:]}, one number per feature"
            )
    if residual is not None and (residual.shape, residual.dtype) != (shape, x.dtype):
        raise ValueError(
            f"{name}: residual is {residual.dtype}{list(residual.shape)}; it must be like x, "
            f"{x.dtype}{list(shape)}"
        )
    for argument, value in (("eps", eps), ("weight_offset", weight_offset)):
        if isinstance(value, jax.core.Tracer) or not isinstance(value, (int, float)):
            raise TypeError(
                f"{name}: {argument} must be a number known while tracing, got {value!r}"
            )
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"{name}: eps={eps!r} must be a finite number, not negative")
    if weight_offset and weight is None:
        raise ValueError(
            f"{name}: weight_offset={weight_offset!r} is added to the weight, and none is given"
        )
