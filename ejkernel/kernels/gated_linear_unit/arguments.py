"""What a call of the gated linear unit may look like: checked, and as implementations read it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from ..arguments import (
    check_one_dtype,
    checked_choice,
    checked_flag,
    checked_floating,
    checked_precision,
    refuse_empty,
)
from .activations import ACTIVATIONS

_NAME = "gated_linear_unit"
_BIASES = ("b_gate", "b_up")
_OTHER_NAMES = {"swish": "silu", "gelu_exact": "gelu", "gelu_approximate": "gelu_tanh"}

Weights = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call, with all leading axes of `x` in one.

    One array of both weights is never cut into two: that would copy it, which for few rows takes
    longer than the product.
    """

    x: jax.Array  # (rows, k)
    weights: Weights  # (k, n) twice, or one (k, 2 n)
    biases: tuple[jax.Array | None, jax.Array | None]
    activation: str
    precision: Any = None
    recompute: bool = False

    @staticmethod
    def of(
        x: jax.Array, *weights: jax.Array, b_gate: Any = None, b_up: Any = None, **options: Any
    ) -> Arguments:
        """From the arguments of the kernel."""
        matrices = tuple(w.reshape(w.shape[0], -1) for w in weights)
        return Arguments(x.reshape(-1, x.shape[-1]), matrices, (b_gate, b_up), **options)


def width_of(weights: Weights) -> int:
    """Columns of the output."""
    columns = math.prod(weights[0].shape[1:])
    return columns if len(weights) == 2 else columns // 2


def checked(
    x: Any, w_gate: Any, w_up: Any, activation: Any, biases: Any, precision: Any, recompute: Any
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong."""
    given = {"x": x, "w_gate": w_gate} | ({} if w_up is None else {"w_up": w_up})
    arrays = {name: checked_floating(_NAME, name, array) for name, array in given.items()}
    for name, array in arrays.items():
        refuse_empty(_NAME, name, array)
    check_one_dtype(_NAME, arrays)
    x, *weights = arrays.values()
    _check_shapes(x, *weights)
    if isinstance(activation, str):
        activation = _OTHER_NAMES.get(activation, activation)
    activation = checked_choice(_NAME, "activation", activation, tuple(ACTIVATIONS))
    options: dict[str, Any] = {"activation": activation}
    options |= _checked_biases(biases, width_of(tuple(weights)), stacked=w_up is None)
    if precision is not None:
        options["precision"] = checked_precision(_NAME, precision)
    if checked_flag(_NAME, "recompute", recompute):
        options["recompute"] = True
    return (x, *weights), options


def _check_shapes(x: jax.Array, w: jax.Array, w_up: jax.Array | None = None) -> None:
    if x.ndim < 1:
        raise ValueError(f"{_NAME}: x has shape {x.shape}; it must be (..., k)")
    if w_up is not None and (w.ndim != 2 or w.shape != w_up.shape):
        raise ValueError(
            f"{_NAME}: w_gate has shape {w.shape} and w_up {w_up.shape}; both must "
            "be (k, n), or w_gate both weights, (k, 2, n) or (k, 2 n), without w_up"
        )
    stacked = (w.ndim == 3 and w.shape[1] == 2) or (w.ndim == 2 and w.shape[1] % 2 == 0)
    if w_up is None and not stacked:
        raise ValueError(
            f"{_NAME}: w_gate has shape {w.shape} and w_up is not given; then w_gate "
            "must hold both weights, (k, 2, n) or (k, 2 n)"
        )
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{_NAME}: the last axis of x {x.shape} has {x.shape[-1]} elements and the "
            f"first of w_gate {w.shape} has {w.shape[0]}; these must be equal"
        )


def _checked_biases(given: Any, columns: int, *, stacked: bool) -> dict[str, jax.Array]:
    named = zip(_BIASES, given, strict=True)
    biases = {n: checked_floating(_NAME, n, bias) for n, bias in named if bias is not None}
    if stacked and list(biases) == ["b_gate"] and biases["b_gate"].size == 2 * columns:
        biases = dict(zip(_BIASES, biases["b_gate"].reshape(2, columns), strict=True))
    for name, bias in biases.items():
        if bias.shape != (columns,):
            raise ValueError(f"{_NAME}: {name} has shape {bias.shape}; it must be ({columns},)")
    return biases
