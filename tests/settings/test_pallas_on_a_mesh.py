"""Pallas kernels of sharded calls are lowered with the shapes of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel import targets
from ejkernel.modules import flash_attention, rms_norm
from ejkernel.targets.lowering import standing_on

FUNCTIONS = {
    "attention": (lambda q: flash_attention(q, q, q, causal=True), (8, 256, 4, 128), (2, 256)),
    "norm": (lambda x: rms_norm(x, jnp.ones(256, x.dtype)), (8, 64, 256), (2, 64)),
}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    ("target", "platform", "call"),
    [("tpu-v5e", "tpu", "tpu_custom_call"), ("cuda-sm90", "cuda", "__gpu$xla.gpu.triton")],
    ids=["tpu", "cuda"],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_have_local_shapes(name, target, platform, call, gradient):
    if platform == "cuda" and jax.__version_info__ >= (0, 11):
        pytest.skip("this JAX asks the mesh, which is one of CPUs here, what its GPU can do")
    function, shape, local = FUNCTIONS[name]
    if gradient:
        forward = function
        function = jax.grad(lambda x: jnp.sum(forward(x).astype(jnp.float32)))
    mesh = jax.make_mesh((4,), ("x",))
    x = jax.device_put(jnp.ones(shape, jnp.bfloat16), NamedSharding(mesh, PartitionSpec("x")))
    with standing_on(targets.find(target)):
        text = jax.jit(function).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert call in text
    assert "all_gather" not in text
    assert f"tensor<{local[0]}x{local[1]}x" in text
