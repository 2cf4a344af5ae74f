"""What `rms_norm` and `layer_norm` ask of their arguments, and how they call their kernel."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.arguments import checked_floating, checked_number, given_options
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
    name = kernel.op_id
    x = checked_floating(name, "x", x)
    weight, bias, residual = (
        None if value is None else checked_floating(name, argument, value)
        for argument, value in (("weight", weight), ("bias", bias), ("residual", residual))
    )
    _check_shapes(name, x, weight, bias, residual)
    eps = checked_number(name, "eps", eps, least=0)
    weight_offset = checked_number(name, "weight_offset", weight_offset)
    if weight_offset and weight is None:
        raise ValueError(
            f"{name}: weight_offset={weight_offset!r} is added to the weight, and none is given"
        )
    options: dict[str, Any] = {
        "weight_offset": weight_offset or None,
        "bias": bias,
        "residual": residual,
    }
    given = {option: value for option, value in options.items() if value is not None}
    given |= given_options(name, implementation, cfg)
    weights = () if weight is None else (weight,)
    return kernel(x, *weights, eps=eps, **given)


def _check_shapes(
    name: str,
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> None:
    """Raise an error that says which arrays do not fit together."""
    shape = x.shape
    if not shape or 0 in shape:
        raise ValueError(
            f"{name}: x has shape {shape}; it must be (..., features), with no empty axis"
        )
    for argument, array in (("weight", weight), ("bias", bias)):
        if array is not None and array.shape != shape[-1:]:
            raise ValueError(
                f"{name}: {argument} has shape {array.shape}; for x of shape {shape} it must be "
                f"{shape[-1:]}, one number per feature"
            )
    if residual is not None and (residual.shape, residual.dtype) != (shape, x.dtype):
        raise ValueError(
            f"{name}: residual is {residual.dtype}{list(residual.shape)}; it must be like x, "
            f"{x.dtype}{list(shape)}"
        )
