"""The Pallas norms, compiled for TPU and CUDA where the compilers are installed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel import targets
from ejkernel.kernels.norm import LayerNorm, RmsNorm
from ejkernel.ops import Kernel

USABLE = {entry.target.name for entry in targets.available() if entry.usable}
TARGETS = ("tpu-v5e", "tpu-v6e", "cuda-sm80", "cuda-sm90")


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


def and_gradient(implementation):
    """A norm and its gradient as one program, for the compilers."""

    def both(x, weight, dout, *, cfg, **options):
        out, saved = implementation.forward_with_residuals(x, weight, cfg=cfg, **options)
        given = (dout, dout) if "residual" in options else dout
        return out, implementation.backward(saved, None, given, x, weight, cfg=cfg, **options)

    return dataclasses.replace(
        implementation,
        forward=both,
        space=lambda inv: implementation.space(inv)[:4],
        forward_with_residuals=None,
        backward=None,
    )


class RmsNormAndGradient(Kernel):
    implementations = tuple(map(and_gradient, RmsNorm.implementations))


class LayerNormAndGradient(Kernel):
    implementations = tuple(map(and_gradient, LayerNorm.implementations))


KERNELS = {"rms_norm": RmsNormAndGradient(), "layer_norm": LayerNormAndGradient()}


@pytest.mark.parametrize("operation", sorted(KERNELS))
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4096, 1024), jnp.bfloat16), ((2, 1000, 4096), jnp.float32), ((100, 770), jnp.bfloat16)],
)
@pytest.mark.parametrize("target", TARGETS)
def test_every_config_compiles_forward_and_backward(operation, shape, dtype, target):
    if target not in USABLE:
        pytest.skip(f"nothing compiles for {target} here; `make targets` installs what does")
    x = jax.ShapeDtypeStruct(shape, dtype)
    weight = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    options = {"residual": x} | ({"bias": weight} if operation == "layer_norm" else {})
    result = targets.check(KERNELS[operation], x, weight, x, eps=1e-6, target=target, **options)
    assert not result.infeasible, str(result)
