"""The gated linear unit as a kernel."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning
from ejkernel.ops.core.work import Work, traffic

from .arguments import sizes
from .pallas_gpu import PALLAS_GPU
from .pallas_tpu import PALLAS_TPU
from .plain import two_projections
from .reference import gated_linear_unit_reference
from .xla import XLA


class GatedLinearUnit(Kernel[Any, jax.Array]):
    """`activation(x @ w_gate) * (x @ w_up)`, with its own gradient.

    Arguments are `x (..., k)` and `w_gate, w_up`, each `(k, n)`, or both in one `(k, 2 n)` or
    `(k, 2, n)`; keywords are `activation` and, optional, `b_gate`, `b_up`, `precision` and
    `recompute`. Use `ejkernel.modules.gated_linear_unit`, which checks them.
    """

    implementations = (PALLAS_TPU, PALLAS_GPU, XLA)
    reference = staticmethod(gated_linear_unit_reference)
    plain = staticmethod(two_projections)
    near_shapes = NearShapes(
        *(Dimension(argument=0, axis=axis, rounding="nearest") for axis in (0, -2)), within=2.0
    )

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        weights = "k n, k n"
        if len(inv.args) == 2:
            weights = "k two n" if len(inv.args[1].shape) == 3 else "k (two n)"
        biases = {"b_gate": "n", "b_up": "n"}
        return Partitioning(f"... k, {weights} -> ... n", keywords=biases, independent="n")

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return True

    def work(self, inv: Invocation[Any, Any]) -> Work:
        """Two products with the weights, and as much for the gradients of both sides."""
        x, *weights = inv.args
        columns = sizes(x, *weights)[1]
        products = 2.0 + 2.0 * ("0" in inv.differentiated)
        products += sum(2 / len(weights) for i in ("1", "2") if i in inv.differentiated)
        out = jax.ShapeDtypeStruct((*x.shape[:-1], columns), x.dtype)
        return Work(2.0 * products * x.size * columns, traffic(inv, out))
