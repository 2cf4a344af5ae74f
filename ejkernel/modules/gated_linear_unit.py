"""`gated_linear_unit`: SwiGLU, GeGLU and their relatives."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.gated_linear_unit import ACTIVATIONS, GatedLinearUnit, GatedLinearUnitConfig

_kernel = GatedLinearUnit()

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
    weights = _checked_weights(x, w_gate, w_up)
    columns = weights[0].shape[1] // (2 if len(weights) == 1 else 1)
    biases = _checked_biases(b_gate, b_up, columns, stacked=len(weights) == 1)
    options: dict[str, Any] = {"activation": _activation(activation)}
    options.update({name: bias for name, bias in biases.items() if bias is not None})
    if precision is not None:
        options["precision"] = _precision(precision)
    if isinstance(recompute, jax.core.Tracer) or recompute not in (True, False):
        raise TypeError(f"gated_linear_unit: recompute must be True or False, got {recompute!r}")
    if recompute:
        options["recompute"] = True
    if implementation is not None:
        options["implementation"] = implementation
    if cfg is not None:
        options["cfg"] = cfg
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _kernel(rows, *weights, **options).reshape(*x.shape[:-1], columns)


def _checked_weights(x: Any, w_gate: Any, w_up: Any) -> tuple[jax.Array, ...]:
    given = {"x": x, "w_gate": w_gate} | ({} if w_up is None else {"w_up": w_up})
    for name, array in given.items():
        shape, dtype = jnp.shape(array), jnp.result_type(array)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"gated_linear_unit: {name} is {dtype}; it must be a floating type, such as "
                "float32 or bfloat16"
            )
        if 0 in shape:
            raise ValueError(f"gated_linear_unit: {name} has shape {shape}; no axis may be empty")
    if len({array.dtype for array in given.values()}) > 1:
        shown = ", ".join(f"{name} {array.dtype}" for name, array in given.items())
        raise TypeError(
            f"gated_linear_unit: all arrays must have one dtype, got {shown}; cast them"
        )
    if jnp.ndim(x) < 1:
        raise ValueError(f"gated_linear_unit: x has shape {jnp.shape(x)}; it must be (..., k)")
    if w_up is None:
        return (_checked_stack(x, w_gate),)
    if w_gate.ndim != 2 or w_gate.shape != w_up.shape:
        raise ValueError(
            f"gated_linear_unit: w_gate has shape {w_gate.shape} and w_up {w_up.shape}; both must "
            "be (k, n), or w_gate both weights, (k, 2, n) or (k, 2 n), without w_up"
        )
    _check_depth(x, w_gate)
    return w_gate, w_up


def _checked_stack(x: Any, w: Any) -> jax.Array:
    good = (w.ndim == 3 and w.shape[1] == 2) or (w.ndim == 2 and w.shape[1] % 2 == 0)
    if not good:
        raise ValueError(
            f"gated_linear_unit: w_gate has shape {w.shape} and w_up is not given; then w_gate "
            "must hold both weights, (k, 2, n) or (k, 2 n)"
        )
    _check_depth(x, w)
    stacked: jax.Array = w.reshape(w.shape[0], -1)
    return stacked


def _check_depth(x: Any, w: Any) -> None:
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"gated_linear_unit: the last axis of x {x.shape} has {x.shape[-1]} elements and the "
            f"first of w_gate {w.shape} has {w.shape[0]}; these must be equal"
        )


def _checked_biases(
    b_gate: Any, b_up: Any, columns: int, *, stacked: bool
) -> dict[str, jax.Array | None]:
    if stacked and b_up is None and b_gate is not None and jnp.size(b_gate) == 2 * columns:
        both = jnp.asarray(b_gate).reshape(2, columns)
        b_gate, b_up = both[0], both[1]
    for name, bias in (("b_gate", b_gate), ("b_up", b_up)):
        if bias is None:
            continue
        if jnp.shape(bias) != (columns,):
            raise ValueError(
                f"gated_linear_unit: {name} has shape {jnp.shape(bias)}; it must be ({columns},)"
            )
        if not jnp.issubdtype(jnp.result_type(bias), jnp.floating):
            raise TypeError(
                f"gated_linear_unit: {name} is {jnp.result_type(bias)}; it must be a floating type"
            )
    return {"b_gate": b_gate, "b_up": b_up}


def _activation(activation: Any) -> str:
    name = _OTHER_NAMES.get(activation, activation) if isinstance(activation, str) else None
    if name not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(
            f"gated_linear_unit: activation is {activation!r}; it must be one of {known}"
        )
    return str(name)


def _precision(precision: Any) -> str:
    try:
        return jax.lax.Precision(precision).name.lower()
    except ValueError as error:
        raise ValueError(
            f"gated_linear_unit: precision is {precision!r}; it must be 'default', 'high' or "
            "'highest'"
        ) from error
