"""`vmap` over an axis that is sharded: values and gradients as without a mesh, and it stays so."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Kernel, Partitioning
from tests.settings.examples import EXAMPLES, Example

KINDS = [pytest.param(AxisType.Explicit, id="explicit"), pytest.param(AxisType.Auto, id="auto")]


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 1


class _Product(Kernel[Config, tuple]):
    """A kernel of a user's own, with a gradient rule and an output that lacks the columns."""

    partitioning = Partitioning("r k, k n -> r n, r k", independent="r n", summed="k")

    def heuristic_cfg(self, inv):
        return Config()

    def run(self, x, w, *, cfg):
        return x @ w, jnp.exp(x)

    def fwd_with_residuals(self, x, w, *, cfg):
        return self.run(x, w, cfg=cfg), jnp.exp(x)

    def vjp(self, residuals, out, dout, x, w, *, cfg):
        return dout[0] @ w.T + dout[1] * residuals, x.T @ dout[0]


class _ProductWithoutARule(Kernel[Config, tuple]):
    partitioning = _Product.partitioning
    heuristic_cfg = _Product.heuristic_cfg
    run = _Product.run


class _OfAUser(Example):
    def __call__(self, x, w):
        kernel = _Product if self.name == "product" else _ProductWithoutARule
        return jax.tree.leaves(kernel()(x, w))


OF_USERS = [
    _OfAUser(
        name,
        {"x": "r k", "w": "k n"},
        ("r n", "r k"),
        {"r": 4, "k": 8, "n": 6},
        shardable=("r",),
        local=(),
        name=name,
    )
    for name in ("product", "product_without_a_rule")
]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a call is mapped, on a mesh with the axes x and y.

    Arrays get as many leading dimensions as there are `mapped`, sharded over these axes; the first
    dimension that the operation can keep apart is sharded over `inside`.
    """

    mapped: tuple[str | tuple[str, ...] | None, ...]
    inside: str | None = None
    axis: int = 0
    only_the_first: bool = False
    gradient_inside: bool = False
    spmd_axis_name: tuple[str, ...] | None = None

    def inputs(self, example: Example):
        """Arrays, their partition specs, and which are mapped along which axis."""
        arrays, specs, axes = {}, {}, {}
        for number, (name, array) in enumerate(example.inputs().items()):
            dims = dict.fromkeys(example.shardable[0].split(), self.inside)
            spec = list(example.spec(example.arrays[name], dims))
            if self.only_the_first and number > 0:
                arrays[name], specs[name], axes[name] = array, P(), None
                continue
            for sharded in reversed(self.mapped):
                floating = jnp.issubdtype(array.dtype, jnp.floating)
                examples = [array * (1 + 0.1 * i) if floating else array for i in range(4)]
                array = jnp.stack(examples, self.axis)
                spec.insert(self.axis, sharded)
            arrays[name], specs[name], axes[name] = array, P(*spec), self.axis
        return arrays, specs, axes

    def function(self, example: Example, axes):
        """Outputs and gradients, as a function of the arrays with and without gradients."""

        def every(function, count, in_axes):
            for _ in range(count):
                function = jax.vmap(function, in_axes, spmd_axis_name=self.spmd_axis_name)
            return function

        def one(free, fixed):
            return example(**free, **fixed)

        def loss_of_one(free, fixed):
            return _loss(one(free, fixed))

        def run(free, fixed):
            in_axes = ({n: axes[n] for n in free}, {n: axes[n] for n in fixed} or None)
            mapped = every(one, len(self.mapped), in_axes)
            if self.gradient_inside:
                gradients = every(jax.grad(loss_of_one), len(self.mapped), in_axes)
            else:
                gradients = jax.grad(lambda free, fixed: _loss(mapped(free, fixed)))
            return mapped(free, fixed), gradients(free, fixed)

        return run


def _loss(outputs):
    return sum(jnp.sum(jnp.sin(out.astype(jnp.float32) / 8)) for out in outputs)


def _check(example: Example, way: Way, kind: AxisType):
    arrays, specs, axes = way.inputs(example)
    fixed = {n: a for n, a in arrays.items() if not jnp.issubdtype(a.dtype, jnp.inexact)}
    free = {n: a for n, a in arrays.items() if n not in fixed}
    run = way.function(example, axes)
    expected = jax.jit(run)(free, fixed)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        placed = [jax.device_put(some, {n: shardings[n] for n in some}) for some in (free, fixed)]
        program = jax.jit(run).lower(*placed).compile()
        found = program(*placed)
    for word in ("all-gather", "all-to-all", "collective-permute"):
        assert word not in program.as_text()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, np.abs(np.asarray(other)).max())
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=3e-5 * scale, rtol=0)
    for out in found[0]:
        for entry, sharded in zip(out.sharding.spec, way.mapped, strict=False):
            assert entry in (sharded, (sharded,))
    for name, gradient in found[1].items():
        wanted = NamedSharding(mesh, specs[name])
        assert gradient.sharding.is_equivalent_to(wanted, gradient.ndim), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_mapped_axis_is_sharded(example, kind):
    _check(example, Way(mapped=(("x", "y"),)), kind)


WAYS = {
    "nested": Way(mapped=("x", "y")),
    "nested-inner-sharded": Way(mapped=(None, "x")),
    "sharded-inside-too": Way(mapped=("x",), inside="y"),
    "sharded-inside-only": Way(mapped=(None,), inside="x"),
    "another-axis": Way(mapped=("x",), axis=1),
    "one-argument": Way(mapped=("x",), only_the_first=True),
    "gradient-inside": Way(mapped=(("x", "y"),), gradient_inside=True),
    "nested-gradient-inside": Way(mapped=("x", "y"), gradient_inside=True),
    "spmd-axis-name": Way(mapped=(("x", "y"),), spmd_axis_name=("x", "y")),
}
# Operations whose gathers and reshapes JAX itself does not map over a sharded axis.
HARD = [e for e in EXAMPLES if str(e) in ("flash_attention", "grouped_matmul")]
HARD_WAYS = ("nested", "sharded-inside-too", "one-argument", "gradient-inside")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("example", OF_USERS, ids=str)
def test_a_kernel_of_a_user_in_every_way(example, way, kind):
    _check(example, WAYS[way], kind)


@pytest.mark.parametrize("way", HARD_WAYS)
@pytest.mark.parametrize("example", HARD, ids=str)
def test_what_jax_does_not_map_by_itself(example, way):
    _check(example, WAYS[way], AxisType.Explicit)


def test_the_definition_is_mapped_too():
    (example,) = (e for e in EXAMPLES if str(e) == "flash_attention")
    _check(example.by_definition(), WAYS["sharded-inside-too"], AxisType.Explicit)


def test_an_array_that_all_examples_share_is_no_residual_of_each():
    mesh, kernel, w = jax.make_mesh((2, 2), ("x", "y")), _Product(), jnp.ones((64, 64))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((64, 4, 64)), NamedSharding(mesh, P(None, "x")))
        _, pull = jax.vjp(lambda x: jax.vmap(kernel, (0, None))(x, w), x)
        assert max(leaf.size for leaf in jax.tree.leaves(pull)) < 64 * w.size
