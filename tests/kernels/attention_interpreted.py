"""Implementations of attention for devices that are not here: interpreted, called as users call."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention import (
    FlashAttention,
    FlashAttentionGpuConfig,
    FlashAttentionTpuConfig,
)
from ejkernel.kernels.flash_attention.arguments import checked_window
from ejkernel.kernels.flash_attention.pallas_gpu import kernels as pallas_gpu
from ejkernel.kernels.flash_attention.pallas_tpu import call as pallas_tpu_call
from ejkernel.kernels.flash_attention.pallas_tpu import kernels as pallas_tpu

KERNEL = FlashAttention()
CONFIGS = {
    "pallas": FlashAttentionTpuConfig(
        block_q=32, block_k=16, backward_block_q=16, backward_block_k=32
    ),
    "triton": FlashAttentionGpuConfig(
        block_q=32,
        block_k=16,
        num_warps=4,
        num_stages=1,
        backward_block_q=16,
        backward_block_k=32,
        backward_num_warps=4,
        backward_num_stages=1,
    ),
}


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Pallas functions run here, in tiles as small as no TPU has them."""
    monkeypatch.setattr(pallas_tpu_call, "LANES", 16)
    for module in (pallas_tpu, pallas_gpu):
        for name in ("forward", "backward"):
            monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))


def interpreted(implementation: str, constant: Collection[str] = ()) -> Any:
    """An implementation with its gradient; keywords that are `constant` are not differentiated."""
    cfg = CONFIGS[implementation]
    chosen = KERNEL.implementation(implementation)
    ahead, back = chosen.forward_with_residuals, chosen.backward

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
        names = [name for name, x in options.items() if isinstance(x, jax.core.Tracer)]
        learned = {name: options.pop(name) for name in names if name not in constant}
        for name, x in options.items():
            options[name] = jnp.asarray(x) if isinstance(x, np.ndarray) else x
        options.setdefault("causal", False)
        options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
        if "window" in options:
            options["window"] = checked_window(options["window"], options["causal"])

        @jax.custom_vjp
        def run(q: jax.Array, k: jax.Array, v: jax.Array, learned: dict[str, jax.Array]) -> Any:
            return ahead(q, k, v, cfg=cfg, **options, **learned)[0]

        def save(q: jax.Array, k: jax.Array, v: jax.Array, learned: dict[str, jax.Array]) -> Any:
            out, rest = ahead(q, k, v, cfg=cfg, **options, **learned)
            return out, (rest, out, q, k, v, learned)

        def pull_back(saved: Any, dout: Any) -> Any:
            rest, out, q, k, v, learned = saved
            told = {"cfg": cfg, "differentiated": frozenset(learned)}
            *gradients, named = back(rest, out, dout, q, k, v, **told, **options, **learned)
            return (*gradients, {name: named[name] for name in learned})

        run.defvjp(save, pull_back)
        return run(q, k, v, learned)

    return attention
