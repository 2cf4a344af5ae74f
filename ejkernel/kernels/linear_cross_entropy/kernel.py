"""The loss as a kernel."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning
from ejkernel.ops.core.work import Work, traffic

from .arguments import Sizes
from .pallas_gpu import PALLAS_GPU
from .pallas_tpu import PALLAS_TPU
from .reference import linear_cross_entropy_reference
from .xla import XLA


class LinearCrossEntropy(Kernel[Any, jax.Array]):
    """Cross entropy of `softmax(hidden @ weight)` without the logits in memory.

    Arguments are `hidden, weight, labels`, keywords those of the reference. Use
    `ejkernel.modules.linear_cross_entropy`, which checks them.
    """

    implementations = (PALLAS_TPU, PALLAS_GPU, XLA)
    reference = staticmethod(linear_cross_entropy_reference)
    near_shapes = NearShapes(
        *(Dimension(argument=(0, 2), axis=axis, rounding="nearest") for axis in (0, -2)),
        Dimension(argument=1, rounding="nearest"),
        within=2.0,
    )

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        weight = "v d" if inv.kwargs.get("vocab_first") else "d v"
        whole = inv.kwargs.get("reduction", "mean") != "none"
        return Partitioning(
            f"... d, {weight}, ... -> {'' if whole else '...'}",
            keywords={"bias": "v"},
            across={"v": "vocab_axes", **({"...": "row_axes"} if whole else {})},
        )

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return bool(options["reduction"] == "none")

    def make_inputs(
        self, inv: Invocation[Any, Any], key: jax.Array
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Logits of ordinary size, and labels from the whole vocabulary."""
        hidden, weight, labels = inv.args
        keys, sizes = jax.random.split(key, 4), Sizes.of(inv)
        made = (
            jax.random.normal(keys[0], hidden.shape, hidden.dtype),
            jax.random.normal(keys[1], weight.shape, weight.dtype) * sizes.features**-0.5,
            jax.random.randint(keys[2], labels.shape, 0, sizes.vocab, labels.dtype),
        )
        options = dict(inv.kwargs)
        if (bias := options.get("bias")) is not None:
            options["bias"] = jax.random.normal(keys[3], bias.shape, bias.dtype)
        return made, options

    def work(self, inv: Invocation[Any, Any]) -> Work:
        """The logits once, and a product of the same size for each of the two gradients."""
        sizes = Sizes.of(inv)
        products = 1 + len({"0", "1"}.intersection(inv.differentiated))
        each = inv.kwargs.get("reduction", "mean") == "none"
        out = jax.ShapeDtypeStruct((sizes.rows if each else 1,), inv.args[0].dtype)
        return Work(2.0 * products * sizes.rows * sizes.features * sizes.vocab, traffic(inv, out))
