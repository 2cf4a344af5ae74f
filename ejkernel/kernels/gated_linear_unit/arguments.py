"""What a call of the gated linear unit may look like: checked, and as implementations read it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from ..arguments import (
    check_axes,
    check_one_dtype,
    checked_choice,
    checked_flag,
    checked_floating,
    checked_precision,
)
from .reference import ACTIVATIONS

_NAME = "gated_linear_unit"
_OTHER_NAMES = {"swish": "silu", "gelu_exact": "gelu", "gelu_approximate": "gelu_tanh"}
BIASES = ("b_gate", "b_up")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call, with all leading axes of `x` in one.

    One array of both weights is never cut into two: that would copy it, which for few rows takes
    longer than the product.
    """

    x: jax.Array  # (rows, k)
    weights: tuple[jax.Array, ...]  # (k, n) twice, or one (k, 2 n)
    biases: dict[str, jax.Array]  # those that are given
    shapes: list[tuple[int, ...]]  # of `x` and the weights as they were given
    activation: str
    precision: Any = None
    recompute: bool = False

    @staticmethod
    def of(*arrays: Any, b_gate: Any = None, b_up: Any = None, **options: Any) -> Arguments:
        """From the arguments of the kernel."""
        x, *weights = arrays
        matrices = tuple(w.reshape(w.shape[0], -1) for w in weights)
        biases = {n: b for n, b in zip(BIASES, (b_gate, b_up), strict=True) if b is not None}
        shapes = [array.shape for array in arrays]
        return Arguments(x.reshape(-1, x.shape[-1]), matrices, biases, shapes, **options)

    def biased(self, sums: Iterable[jax.Array], biases: Iterable[Any]) -> list[jax.Array]:
        """The projections from both products, and from what a kernel reads of each given bias."""
        read = iter(biases)
        named = zip(BIASES, sums, strict=True)
        return [s + next(read).astype(s.dtype) if n in self.biases else s for n, s in named]

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.activation](gate) * up

    def results(self, out: jax.Array, *projections: jax.Array) -> tuple[jax.Array, Any]:
        """The output in the shape of the call, and what the gradient needs of the forward pass."""
        return out.reshape(*self.shapes[0][:-1], out.shape[-1]), projections or None


def sizes(x: Any, *weights: Any) -> tuple[int, int, int]:
    """`m`, `n` and `k` of the two products `(m, k) @ (k, n)`."""
    columns = math.prod(weights[0].shape[1:])
    return math.prod(x.shape[:-1]), columns if len(weights) == 2 else columns // 2, x.shape[-1]


def checked(
    x: Any, w_gate: Any, w_up: Any, activation: Any, biases: Any, precision: Any, recompute: Any
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """The arguments and keywords of the kernel from those of a user; errors name what is wrong."""
    given = {"x": x, "w_gate": w_gate} | ({} if w_up is None else {"w_up": w_up})
    arrays = {name: checked_floating(_NAME, name, array) for name, array in given.items()}
    check_one_dtype(_NAME, arrays)
    shape = arrays["w_gate"].shape
    holds_both = shape[1:-1] == (2,) or (len(shape) == 2 and shape[1] % 2 == 0)
    if w_up is None and not holds_both:
        raise ValueError(
            f"{_NAME}: w_gate has shape {shape} and w_up is not given; then w_gate must hold both "
            "weights, (k, 2, n) or (k, 2 n)"
        )
    weight = "k 2 n" if w_up is None and len(shape) == 3 else "k n"
    layouts = {"x": "... k", "w_gate": weight, "w_up": weight}
    both = "; w_gate may hold both weights, (k, 2, n) or (k, 2 n), without w_up"
    check_axes(_NAME, {n: (array, layouts[n]) for n, array in arrays.items()}, advice=both)
    if isinstance(activation, str):
        activation = _OTHER_NAMES.get(activation, activation)
    options = {
        "activation": checked_choice(_NAME, "activation", activation, tuple(ACTIVATIONS)),
        "precision": None if precision is None else checked_precision(_NAME, precision),
        "recompute": checked_flag(_NAME, "recompute", recompute) or None,
    }
    named = zip(BIASES, biases, strict=True)
    biases = {n: checked_floating(_NAME, n, bias) for n, bias in named if bias is not None}
    columns = sizes(*arrays.values())[1]
    if w_up is None and list(biases) == ["b_gate"] and biases["b_gate"].size == 2 * columns:
        biases = dict(zip(BIASES, biases["b_gate"].reshape(2, columns), strict=True))
    for name, bias in biases.items():
        if bias.shape != (columns,):
            raise ValueError(f"{_NAME}: {name} has shape {bias.shape}; it must be ({columns},)")
    options |= biases
    return tuple(arrays.values()), {n: value for n, value in options.items() if value is not None}
