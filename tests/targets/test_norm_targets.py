"""The Pallas norms, compiled for TPU and CUDA where the compilers are installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel import targets
from ejkernel.kernels.layer_norm import LayerNorm
from ejkernel.kernels.rms_norm import RmsNorm
from ejkernel.ops import Kernel

USABLE = {entry.target.name for entry in targets.available() if entry.usable}
TARGETS = ("tpu-v5e", "tpu-v6e", "cuda-sm80", "cuda-sm90")
KERNELS = {"rms_norm": RmsNorm(), "layer_norm": LayerNorm()}


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


class Both(Kernel):
    """A norm and its gradient as one program, for the compilers."""

    def __init__(self, norm):
        super().__init__(name=f"{norm.op_id}_and_gradient")
        self.norm = norm
        self.supports = norm.supports

    def _both(self, suffix, x, weight, dout, cfg, **options):
        forward = getattr(self.norm, f"fwd_with_residuals_{suffix}")
        backward = getattr(self.norm, f"vjp_{suffix}")
        out, saved = forward(x, weight, cfg=cfg, **options)
        given = (dout, dout) if "residual" in options else dout
        return out, backward(saved, out, given, x, weight, cfg=cfg, **options)

    def run_pallas(self, x, weight, dout, *, cfg, **options):
        return self._both("pallas", x, weight, dout, cfg, **options)

    def run_triton(self, x, weight, dout, *, cfg, **options):
        return self._both("triton", x, weight, dout, cfg, **options)

    def heuristic_cfg_pallas(self, inv):
        return self.norm.heuristic_cfg_pallas(inv)

    def heuristic_cfg_triton(self, inv):
        return self.norm.heuristic_cfg_triton(inv)

    def candidate_cfgs_pallas(self, inv):
        return self.norm.candidate_cfgs_pallas(inv)

    def candidate_cfgs_triton(self, inv):
        return self.norm.candidate_cfgs_triton(inv)[:4]


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
    kernel = Both(KERNELS[operation])
    result = targets.check(kernel, x, weight, x, eps=1e-6, target=target, **options)
    assert not result.infeasible, str(result)
