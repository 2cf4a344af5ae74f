"""What a call of a norm may look like: checked, and as implementations read it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import jax.numpy as jnp

from ..arguments import checked_floating, checked_number

if TYPE_CHECKING:
    from . import NormConfig

Output = jax.Array | tuple[jax.Array, jax.Array]
"""The output; with a residual, also the sum that was normalised."""


class Options(TypedDict, total=False):
    """The keywords of both norms that do not decide what is returned."""

    eps: float
    weight_offset: float
    implementation: str | None
    cfg: NormConfig | None


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call, from the arguments of the kernel."""

    x: jax.Array  # (..., features)
    weight: jax.Array | None = None  # (features,), and so is the bias
    _: dataclasses.KW_ONLY
    eps: float
    centered: bool  # whether the mean is subtracted: layer norm
    bias: jax.Array | None = None
    residual: jax.Array | None = None  # like x
    weight_offset: float = 0.0
    feature_axes: tuple[str, ...] = ()  # mesh axes that divide the features, inside a `shard_map`


def rows_and_features(x: Any) -> tuple[int, int]:
    """How many rows an array has, and their length."""
    return x.size // x.shape[-1], x.shape[-1]


def per_feature(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """One number per feature with as many axes as the rows have."""
    return jnp.expand_dims(numbers, tuple(range(like.ndim - 1)))


def checked(
    name: str, x: Any, weight: Any, *, eps: Any, weight_offset: Any, **others: Any
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong.

    The others are `residual` and `bias`, each an array or None.
    """
    arrays = {
        argument: checked_floating(name, argument, array)
        for argument, array in {"x": x, "weight": weight, **others}.items()
        if argument == "x" or array is not None
    }
    _check_shapes(name, **arrays)
    options: dict[str, Any] = {"eps": checked_number(name, "eps", eps, least=0)}
    if offset := checked_number(name, "weight_offset", weight_offset):
        if weight is None:
            raise ValueError(
                f"{name}: weight_offset={offset!r} is added to the weight, and none is given"
            )
        options["weight_offset"] = offset
    positional = [arrays.pop(argument) for argument in ("x", "weight") if argument in arrays]
    return tuple(positional), options | arrays


def _check_shapes(
    name: str, *, x: jax.Array, residual: jax.Array | None = None, **features: jax.Array
) -> None:
    shape = x.shape
    if not shape or 0 in shape:
        raise ValueError(
            f"{name}: x has shape {shape}; it must be (..., features), with no empty axis"
        )
    for argument, array in features.items():
        if array.shape != shape[-1:]:
            raise ValueError(
                f"{name}: {argument} has shape {array.shape}; for x of shape {shape} it must be "
                f"{shape[-1:]}, one number per feature"
            )
    if residual is not None and (residual.shape, residual.dtype) != (shape, x.dtype):
        raise ValueError(
            f"{name}: residual is {residual.dtype}{list(residual.shape)}; it must be like x, "
            f"{x.dtype}{list(shape)}"
        )
