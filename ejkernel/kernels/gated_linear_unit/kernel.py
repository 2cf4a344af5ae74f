"""The gated linear unit as a kernel."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning

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
        return Partitioning(
            f"... k, {weights} -> ... n",
            keywords={"b_gate": "n", "b_up": "n"},
            independent="n",
        )

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return True
