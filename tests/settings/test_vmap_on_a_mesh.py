"""`vmap` over an axis that is sharded: values and gradients as without a mesh, and it stays so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.settings.examples import EXAMPLES

CASES = [
    pytest.param(example, kind, id=f"{example}-{kind.name.lower()}")
    for example in EXAMPLES
    for kind in (AxisType.Explicit, AxisType.Auto)
]


@pytest.mark.parametrize(("example", "kind"), CASES)
def test_the_mapped_axis_is_sharded(example, kind):
    arrays = {n: jnp.stack([a] * 4) for n, a in example.inputs().items()}
    arrays = {
        n: a * jnp.arange(1.0, 1.4, 0.1).reshape(4, *(1,) * (a.ndim - 1))
        if jnp.issubdtype(a.dtype, jnp.floating)
        else a
        for n, a in arrays.items()
    }
    fixed = {n: a for n, a in arrays.items() if not jnp.issubdtype(a.dtype, jnp.inexact)}
    free = {n: a for n, a in arrays.items() if n not in fixed}

    def run(free, fixed):
        out = jax.vmap(lambda a: example(**a))({**free, **fixed})

        def loss(free):
            mapped = jax.vmap(lambda a: example(**a))({**free, **fixed})
            return sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in mapped)

        return out, jax.grad(loss)(free)

    expected = jax.jit(run)(free, fixed)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        placed = jax.device_put((free, fixed), NamedSharding(mesh, PartitionSpec("x")))
        program = jax.jit(run).lower(*placed).compile()
        found = program(*placed)
    assert "all-gather" not in program.as_text()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, np.abs(np.asarray(other)).max())
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=3e-5 * scale, rtol=0)
        assert one.sharding.spec[0] in ("x", ("x",))
