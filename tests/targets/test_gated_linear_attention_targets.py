"""The Pallas kernels of gated linear attention, compiled where the compilers are installed."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from ejkernel import targets
from ejkernel.kernels.gated_linear_attention import GatedLinearAttention
from ejkernel.ops import Kernel

USABLE = {entry.target.name for entry in targets.available() if entry.usable}
TARGETS = ("tpu-v5e", "tpu-v6e", "cuda-sm80", "cuda-sm90")


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


def both(implementation, q, k, v, g, dout, *, cfg, scale):
    out, states = implementation.forward_with_residuals(q, k, v, g, cfg=cfg, scale=scale)
    gradients = implementation.backward(states, None, dout, q, k, v, g, cfg=cfg, scale=scale)
    return out, gradients


class Both(Kernel):
    """The operation and its gradient as one program, for the compilers."""

    implementations = tuple(
        dataclasses.replace(
            item,
            forward=partial(both, item),
            forward_with_residuals=None,
            backward=None,
            space=lambda inv: [],
        )
        for item in GatedLinearAttention.implementations
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dim", "dtype", "decay"),
    [(64, jnp.bfloat16, "channel"), (128, jnp.float32, "channel"), (64, jnp.float32, "head")],
)
def test_the_heuristic_compiles_forward_and_backward(dim, dtype, decay, target):
    if target not in USABLE:
        pytest.skip(f"nothing compiles for {target} here; `make targets` installs what does")
    tokens = jax.ShapeDtypeStruct((1, 1000, 4, dim), dtype)
    shape = tokens.shape if decay == "channel" else tokens.shape[:3]
    g = jax.ShapeDtypeStruct(shape, jnp.float32)
    (entry,) = targets.check(
        Both("both"), tokens, tokens, tokens, g, tokens, target=target, scale=1.0
    )
    assert entry.compiles, entry.reason
