"""What the implementations in Pallas share: their passes around a module of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .options import Options as CallOptions
from .passes import Gradients, Options, Passes, Results, Sizes, passes_of
from .xla import differentiate_with_bias

NOT_SERVED = ("dropout_rate", "dropout_key", "sequence_axis")
"""Keywords of calls that are left to XLA."""


def passes_by_kernels(heuristic: Callable[..., Any], kernels: Callable[[], Any]) -> Passes:
    """The passes around the `forward` and the `backward` of a module.

    `kernels` imports it: Pallas takes a while, so that is done when one of them is traced.
    """

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, sizes: Sizes, options: Options
    ) -> tuple[jax.Array, jax.Array]:
        out, lse = kernels().forward(q, k, v, CallOptions(**options), **sizes)
        return out, lse

    def differentiate(results: Results, sizes: Sizes, options: Options) -> Gradients:
        gradients: Gradients = kernels().backward(results, CallOptions(**options), **sizes)
        return gradients

    return passes_of(heuristic, attend, differentiate, differentiate_with_bias)
