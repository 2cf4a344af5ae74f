"""Derivatives of derivatives of calls on a mesh: as without one, or refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import modules
from ejkernel.ops import Kernel, Partitioning
from tests.settings.test_vmap_on_a_mesh import Config

KINDS = [pytest.param(AxisType.Explicit, id="explicit"), pytest.param(AxisType.Auto, id="auto")]


class WithoutARule(Kernel[Config, jax.Array]):
    partitioning = Partitioning("r k -> r k", independent="r")

    def heuristic_cfg(self, inv):
        return Config()

    def run(self, x, *, cfg):
        return jnp.sin(x) * x


CALLS = {
    "rms_norm": lambda x: modules.rms_norm(x, jnp.linspace(1.0, 2.0, 8)),
    "without_a_rule": WithoutARule(),
}


def _loss(function):
    return lambda x: jnp.sum(jnp.cos(function(x)))


DERIVATIVES = {
    "reverse-over-reverse": lambda f: jax.grad(
        lambda x: jnp.sum(jnp.sin(jax.grad(_loss(f))(x) * 3))
    ),
    "forward-over-reverse": lambda f: lambda x: jax.jvp(jax.grad(_loss(f)), (x,), (x,))[1],
    "each-row": lambda f: jax.vmap(jax.hessian(lambda row: _loss(f)(row[None]))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(name, kind):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    for what, derivative in DERIVATIVES.items():
        expected = jax.jit(derivative(CALLS[name]))(x)
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, P("x")))
            found = jax.jit(derivative(CALLS[name]))(placed)
        np.testing.assert_allclose(
            np.asarray(found), np.asarray(expected), atol=1e-4, rtol=1e-4, err_msg=what
        )


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_is_refused_with_the_reason(kind):
    mesh, kernel = jax.make_mesh((4,), ("x",), axis_types=(kind,)), WithoutARule()
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("x")))
        with pytest.raises(TypeError, match="without_a_rule@v1 on a mesh has a gradient rule"):
            jax.jit(lambda x: jax.jvp(kernel, (x,), (x,)))(x)
