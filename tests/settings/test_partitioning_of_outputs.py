"""Kernels of users on a mesh: outputs that lack a sharded dimension, or have a summed one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Kernel, Partitioning

KINDS = [pytest.param(AxisType.Explicit, id="explicit"), pytest.param(AxisType.Auto, id="auto")]


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 1


class OwnColumns(Kernel[Config, jax.Array]):
    """The second output knows nothing of the columns: devices that share them out all have it."""

    partitioning = Partitioning("r k, k n -> r n, r k", independent="r n")

    def heuristic_cfg(self, inv):
        return Config()

    def run(self, x, w, *, cfg):
        return x @ w, jnp.exp(x)


class OwnColumnsInOnePiece(OwnColumns):
    def custom_vjp(self, args, cfg, kwargs, cotangents):
        (x, w), (dout, dexp) = args, cotangents
        return dout @ w.T + dexp * jnp.exp(x), x.T @ dout


class OwnColumnsWithResiduals(OwnColumns):
    def fwd_with_residuals(self, x, w, *, cfg):
        return self.run(x, w, cfg=cfg), jnp.exp(x)

    def vjp(self, residuals, out, dout, x, w, *, cfg):
        return dout[0] @ w.T + dout[1] * residuals, x.T @ dout[0]


class SummedAndKept(OwnColumns):
    """The depth is summed over in the first output; the second one has it."""

    partitioning = Partitioning("r k, k n -> r n, r k", independent="r n", summed="k")


class Talks(OwnColumns):
    """Talks to the other devices itself; JAX differentiates it."""

    partitioning = Partitioning(
        "r k, k n -> r n, r k, r", independent="r n", across={"k": "depth_axes"}
    )

    def run(self, x, w, *, cfg, depth_axes=()):
        def over_depth(part):
            return jax.lax.psum(part, depth_axes) if depth_axes else part

        square = over_depth(jnp.sum(x**2, -1))
        return over_depth(x @ w), x * square[:, None], square


class TalksWithARule(OwnColumns):
    """A rule of its own is given the whole gradient of an output that all devices have."""

    partitioning = Partitioning("r k, k -> r", independent="r", across={"k": "depth_axes"})

    def run(self, x, w, *, cfg, depth_axes=()):
        part = x @ w
        return jax.lax.psum(part, depth_axes) if depth_axes else part

    def custom_vjp(self, args, cfg, kwargs, cotangents):
        (x, w), (dout,) = args, cotangents
        return dout[:, None] * w, dout @ x


SHARDINGS = {
    "columns": (P(), P(None, ("x", "y"))),
    "rows-columns": (P("x"), P(None, "y")),
    "rows-depth": (P("x", "y"), P("y")),
    "depth-columns": (P(None, "x"), P("x", "y")),
    "one-of-them": (P("x", "y"), P()),
}


def _loss(outputs):
    leaves = jax.tree.leaves(outputs)
    return sum(jnp.sum(jnp.tanh(out / 8)) * number for number, out in enumerate(leaves, 1))


def _run(function, arrays):
    return function(*arrays), jax.grad(lambda *a: _loss(function(*a)), (0, 1))(*arrays)


@pytest.mark.parametrize(
    "mapped", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one", "mapped"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cls",
    [
        OwnColumns,
        OwnColumnsInOnePiece,
        OwnColumnsWithResiduals,
        SummedAndKept,
        Talks,
        TalksWithARule,
    ],
)
def test_values_and_gradients(cls, kind, mapped):
    kernel = cls()
    x = jax.random.normal(jax.random.key(0), (4, 8))
    w = jax.random.normal(jax.random.key(1), (8,) if cls is TalksWithARule else (8, 4))
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)

    def of(function):
        return lambda x, w: (
            jax.vmap(lambda f: _run(function, (x * f, w)))(jnp.arange(1.0, 4.0))
            if mapped
            else _run(function, (x, w))
        )

    expected = of(lambda *a: kernel.run(*a, cfg=Config()))(x, w)
    for name, specs in SHARDINGS.items():
        specs = [P(*spec[: a.ndim]) for spec, a in zip(specs, (x, w), strict=True)]
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(a, NamedSharding(mesh, spec))
                for a, spec in zip((x, w), specs, strict=True)
            ]
            found = jax.jit(of(kernel))(*placed)
        for path, value in jax.tree_util.tree_leaves_with_path(expected):
            np.testing.assert_allclose(
                np.asarray(dict(jax.tree_util.tree_leaves_with_path(found))[path]),
                np.asarray(value),
                atol=1e-4,
                rtol=1e-4,
                err_msg=f"{name} {path}",
            )
