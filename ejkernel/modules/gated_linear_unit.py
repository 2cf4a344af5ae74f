"""`gated_linear_unit`: SwiGLU, GeGLU and their relatives."""

from __future__ import annotations

import jax

from ejkernel.kernels.arguments import given_options
from ejkernel.kernels.gated_linear_unit import GatedLinearUnit, GatedLinearUnitConfig
from ejkernel.kernels.gated_linear_unit.arguments import checked

_kernel = GatedLinearUnit()


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

    Differentiable in `x`, weights and biases. Sums are in float32 (float64 for float64).

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
      implementation: one by name (`"xla"`, `"pallas"`, `"triton"`); by default the device's best.
      cfg: a config of one implementation, which then runs; by default the tuned one of the store,
        else a heuristic.

    Returns:
      `(..., n)`, of `x`'s dtype.

    >>> import jax
    >>> x, w_gate, w_up = (jax.random.normal(jax.random.key(i), s) for i, s in
    ...                    enumerate([(2, 10, 16), (16, 32), (16, 32)]))
    >>> gated_linear_unit(x, w_gate, w_up).shape
    (2, 10, 32)
    """
    biases = (b_gate, b_up)
    arrays, options = checked(x, w_gate, w_up, activation, biases, precision, recompute)
    return _kernel(*arrays, **options, **given_options("gated_linear_unit", implementation, cfg))
