"""The grouped matrix product and its gradients, compiled for devices that are not here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel import targets
from ejkernel.kernels.grouped_matmul import GroupedMatmul
from ejkernel.ops import Kernel

USABLE = {entry.target.name for entry in targets.available() if entry.usable}
NAMES = ("tpu-v5e", "tpu-v6e", "cuda-sm80", "cuda-sm90")


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


class Backward(Kernel):
    """Both gradients of a grouped product, as an operation that can be checked."""

    def __init__(self, implementation):
        super().__init__(name=f"grouped_matmul_backward_{implementation.name}")
        self._implementation = implementation

    def heuristic_cfg(self, inv):
        return 0

    def run(self, *args, cfg):
        *call, dout = args
        cfg = self._implementation.heuristic(GroupedMatmul().bind(*call))
        return self._implementation.backward(None, None, dout, *call, cfg=cfg)[:2]


def shapes(m, k, n, groups, dtype):
    return (
        jax.ShapeDtypeStruct((m, k), dtype),
        jax.ShapeDtypeStruct((groups, k, n), dtype),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
        jax.ShapeDtypeStruct((m, n), dtype),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "call",
    [
        shapes(4096, 2048, 1024, 8, jnp.bfloat16),
        shapes(1000, 768, 320, 16, jnp.float32),
        shapes(64, 512, 1408, 64, jnp.bfloat16),
    ],
    ids=lambda call: f"{call[0].shape}x{call[1].shape}",
)
def test_the_heuristic_config_compiles_in_both_directions(name, call):
    if name not in USABLE:
        pytest.skip(f"nothing compiles for {name} here; `make targets` installs what does")
    kernel = GroupedMatmul()
    implementation = kernel.implementation("pallas" if name.startswith("tpu") else "triton")
    cfg = implementation.heuristic(kernel.bind(*call[:3]))
    forward = targets.check(kernel, *call[:3], target=name, configs=[cfg])
    assert [entry.full_text for entry in forward if not entry.compiles] == []
    if name.startswith("cuda"):
        assert not any(entry.spilled_bytes for entry in forward)
    backward = targets.check(Backward(implementation), *call, target=name, configs=[0])
    assert [entry.full_text for entry in backward if not entry.compiles] == []
