"""Gated linear attention as a kernel."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.ops import Dimension, Invocation, Kernel, NearShapes, Partitioning
from ejkernel.ops.core.work import Work, traffic

from ..sizes import default_scale
from .pallas_gpu import PALLAS_GPU
from .pallas_tpu import PALLAS_TPU
from .reference import gated_linear_attention_reference
from .xla import XLA


class GatedLinearAttention(Kernel[Any, Any]):
    """`S_t = diag(exp(g_t)) S_{t-1} + k_tᵀ v_t`, `o_t = scale · q_t S_t`.

    Arguments are `q, k, v` as `(batch, length, heads, features)`, and `g` if there is a decay;
    keywords `scale`, and `initial_state`, `return_state` and `segments` (there are starts of
    segments in `g`) where they are wanted. Use
    `ejkernel.modules.gated_linear_attention`, which checks them.
    """

    implementations = (PALLAS_TPU, PALLAS_GPU, XLA)
    reference = staticmethod(gated_linear_attention_reference)
    near_shapes = NearShapes(
        *(Dimension(axis=axis, rounding="nearest") for axis in (0, 1)), within=4.0
    )

    def partitioning(self, inv: Invocation[Any, Any]) -> Partitioning:
        decay = ""
        if len(inv.args) == 4:
            decay = ", b t h d" if len(inv.args[3].shape) == 4 else ", b t h"
        state = ", b h d e" if inv.kwargs.get("return_state") else ""
        return Partitioning(
            f"b t h d, b t h d, b t h e{decay} -> b t h e{state}",
            keywords={"initial_state": "b h d e"},
            independent="b h",
        )

    def work(self, inv: Invocation[Any, Any]) -> Work:
        """Two multiply-adds per token and element of the state, and the decay, if there is one.

        As much again for each side of these products in the backward pass. Implementations that
        work off whole chunks do more than that, to do it faster.
        """
        q, _, v = inv.args[:3]
        elements = q.size * v.shape[3]
        passes = 3 if inv.differentiated else 1
        flops = passes * elements * (5 if len(inv.args) == 4 else 4)
        out = jax.ShapeDtypeStruct(v.shape, q.dtype)
        return Work(float(flops), traffic(inv, out))

    def default_keywords(self, *args: Any) -> dict[str, Any]:
        return default_scale("scale", *args)

    def make_inputs(self, inv: Invocation[Any, Any], key: jax.Array) -> tuple[Any, Any]:
        """Random numbers, but decays that decay: with growth nothing would stay finite."""

        def fill(index: int, like: Any) -> jax.Array:
            return jax.random.normal(jax.random.fold_in(key, index), like.shape, like.dtype)

        arrays = [fill(index, like) for index, like in enumerate(inv.args)]
        arrays[3:] = map(jax.nn.log_sigmoid, arrays[3:])
        state = {n: fill(4, x) for n, x in inv.kwargs.items() if n == "initial_state"}
        return tuple(arrays), {**inv.kwargs, **state}

    def entries_are_independent(self, *args: Any, **options: Any) -> bool:
        return True
