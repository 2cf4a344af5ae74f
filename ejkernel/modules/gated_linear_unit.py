"""`gated_linear_unit`: SwiGLU, GeGLU and their relatives."""

from __future__ import annotations

import math
from typing import Any

import jax

from ejkernel.kernels.arguments import (
    checked_choice,
    checked_flag,
    checked_floating,
    checked_precision,
    given_options,
    refuse_empty,
)
from ejkernel.kernels.gated_linear_unit import ACTIVATIONS, GatedLinearUnit, GatedLinearUnitConfig

_kernel = GatedLinearUnit()
_NAME = "gated_linear_unit"

_OTHER_NAMES = {"swish": "silu", "gelu_exact": "gelu", "gelu_approximate": "gelu_tanh"}


def gated_linear_unit(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None = None,
    *,
    activation: str = "silu",
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    precision: str | jax.lax.Precision | None = None,
    recompute: bool = False,
    implementation: str | None = None,
    cfg: GatedLinearUnitConfig | None = None,
) -> jax.Array:
    r"""Two projections of `x`, of which one gates the other: `f(x w_gate) · (x w_up)`.

    Differentiable in `x`, weights and biases. Sums are kept in float32 (float64 for float64).

    Args:
      x: `(..., k)`.
      w_gate: `(k, n)`. Or both weights in one array, without `w_up`: `(k, 2, n)`, or `(k, 2 n)`
        with the gate's columns first.
      w_up: `(k, n)`.
      activation: `"silu"` (SwiGLU), `"gelu"` (GeGLU, with the error function), `"gelu_tanh"`
        (its approximation), `"relu"` (ReGLU), `"sigmoid"` (the first GLU), `"identity"` (bilinear).
      b_gate: `(n,)`, added to the gate before `f`. With both weights in one array also both
        biases in one: `(2, n)` or `(2 n,)`.
      b_up: `(n,)`, added to the other projection.
      precision: of the products, as in `jax.lax.dot`: `"default"`, `"high"`, `"highest"`.
      recompute: the gradient computes both projections again, some rows at a time, instead of
        keeping them: a third more products, and no memory but that of inputs and outputs.
      implementation: demand one (`"xla"`, `"pallas"`, `"triton"`); by default the device's best.
      cfg: tiles; by default the tuned ones of the store, else a heuristic.

    Returns:
      `(..., n)`, of `x`'s dtype.

    >>> import jax
    >>> x, w_gate, w_up = (jax.random.normal(jax.random.key(i), s) for i, s in
    ...                    enumerate([(2, 10, 16), (16, 32), (16, 32)]))
    >>> gated_linear_unit(x, w_gate, w_up).shape
    (2, 10, 32)
    """
    x, w_gate = checked_floating(_NAME, "x", x), checked_floating(_NAME, "w_gate", w_gate)
    w_up = None if w_up is None else checked_floating(_NAME, "w_up", w_up)
    weights = _checked_weights(x, w_gate, w_up)
    columns = math.prod(weights[0].shape[1:]) // (2 if len(weights) == 1 else 1)
    biases = _checked_biases(b_gate, b_up, columns, stacked=len(weights) == 1)
    options: dict[str, Any] = {"activation": _activation(activation)}
    options.update({name: bias for name, bias in biases.items() if bias is not None})
    if precision is not None:
        options["precision"] = checked_precision(_NAME, precision)
    if checked_flag(_NAME, "recompute", recompute):
        options["recompute"] = True
    options |= given_options(_NAME, implementation, cfg)
    return _kernel(x, *weights, **options)


def _checked_weights(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array | None
) -> tuple[jax.Array, ...]:
    given = {"x": x, "w_gate": w_gate} | ({} if w_up is None else {"w_up": w_up})
    for name, array in given.items():
        refuse_empty(_NAME, name, array)
    if len({array.dtype for array in given.values()}) > 1:
        shown = ", ".join(f"{name} {array.dtype}" for name, array in given.items())
        raise TypeError(
            f"gated_linear_unit: all arrays must have one dtype, got {shown}; cast them"
        )
    if x.ndim < 1:
        raise ValueError(f"gated_linear_unit: x has shape {x.shape}; it must be (..., k)")
    if w_up is None:
        return (_checked_stack(x, w_gate),)
    if w_gate.ndim != 2 or w_gate.shape != w_up.shape:
        raise ValueError(
            f"gated_linear_unit: w_gate has shape {w_gate.shape} and w_up {w_up.shape}; both must "
            "be (k, n), or w_gate both weights, (k, 2, n) or (k, 2 n), without w_up"
        )
    _check_depth(x, w_gate)
    return w_gate, w_up


def _checked_stack(x: jax.Array, w: jax.Array) -> jax.Array:
    good = (w.ndim == 3 and w.shape[1] == 2) or (w.ndim == 2 and w.shape[1] % 2 == 0)
    if not good:
        raise ValueError(
            f"gated_linear_unit: w_gate has shape {w.shape} and w_up is not given; then w_gate "
            "must hold both weights, (k, 2, n) or (k, 2 n)"
        )
    _check_depth(x, w)
    return w


def _check_depth(x: Any, w: Any) -> None:
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"gated_linear_unit: the last axis of x {x.shape} has {x.shape[-1]} elements and the "
            f"first of w_gate {w.shape} has {w.shape[0]}; these must be equal"
        )


def _checked_biases(
    b_gate: Any, b_up: Any, columns: int, *, stacked: bool
) -> dict[str, jax.Array | None]:
    b_gate = None if b_gate is None else checked_floating(_NAME, "b_gate", b_gate)
    b_up = None if b_up is None else checked_floating(_NAME, "b_up", b_up)
    if stacked and b_up is None and b_gate is not None and b_gate.size == 2 * columns:
        both = b_gate.reshape(2, columns)
        b_gate, b_up = both[0], both[1]
    for name, bias in (("b_gate", b_gate), ("b_up", b_up)):
        if bias is not None and bias.shape != (columns,):
            raise ValueError(
                f"gated_linear_unit: {name} has shape {bias.shape}; it must be ({columns},)"
            )
    return {"b_gate": b_gate, "b_up": b_up}


def _activation(activation: Any) -> str:
    if isinstance(activation, str):
        activation = _OTHER_NAMES.get(activation, activation)
    return checked_choice(_NAME, "activation", activation, tuple(ACTIVATIONS))
