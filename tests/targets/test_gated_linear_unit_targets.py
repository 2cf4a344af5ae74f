"""The gated linear unit, compiled for devices that are not here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel import targets
from ejkernel.kernels.gated_linear_unit import GatedLinearUnit

USABLE = {entry.target.name for entry in targets.available() if entry.usable}
NAMES = ("tpu-v5e", "tpu-v6e", "cuda-sm80", "cuda-sm90")


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


class AndSave(GatedLinearUnit):
    """The forward pass of training, which writes the projections too."""

    implementations = tuple(
        dataclasses.replace(item, forward=item.forward_with_residuals)
        for item in GatedLinearUnit.implementations
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", [GatedLinearUnit(), AndSave()], ids=["infer", "train"])
@pytest.mark.parametrize(
    ("shapes", "dtype", "activation"),
    [
        ([(2048, 1024), (1024, 4096), (1024, 4096)], jnp.bfloat16, "silu"),
        ([(1000, 768), (768, 2048)], jnp.float32, "gelu"),
        ([(8, 512), (512, 1408), (512, 1408)], jnp.bfloat16, "gelu_tanh"),
    ],
    ids=["llama", "stacked", "decode"],
)
def test_the_heuristic_config_compiles(name, kernel, shapes, dtype, activation):
    if name not in USABLE:
        pytest.skip(f"nothing compiles for {name} here; `make targets` installs what does")
    call = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    implementation = kernel.implementation("pallas" if name.startswith("tpu") else "triton")
    heuristic = implementation.heuristic(kernel.bind(*call, activation=activation))
    result = targets.check(kernel, *call, target=name, configs=[heuristic], activation=activation)
    assert [entry.full_text for entry in result if not entry.compiles] == []
    if name.startswith("cuda"):
        assert not any(entry.spilled_bytes for entry in result)
