"""Every operation × kind of mesh × sharded dimension × pass: right, and it stays sharded."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import modules
from tests.settings.examples import EXAMPLES, Example

PAIRS = [
    pytest.param(example, dims, id=f"{example}-{dims.replace(' ', '')}")
    for example in EXAMPLES
    for dims in example.shardable
]
KINDS = [pytest.param(AxisType.Explicit, id="explicit"), pytest.param(AxisType.Auto, id="auto")]


def _mesh(kind, shape=(4,), names=("x",)):
    """A mesh of axes of one kind, or of one kind each."""
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(names)
    return jax.make_mesh(shape, names, axis_types=kinds)


def _placed(example: Example, arrays, mesh, axes):
    specs = example.specs(axes)
    return {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in arrays.items()}


def _axes(dims: str, axis: str | tuple[str, ...] = "x"):
    return dict.fromkeys(dims.split(), axis)


def _assert_close(found, expected):
    found, expected = jax.tree.map(np.asarray, (found, expected))
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(other, value, atol=3e-5 * scale, rtol=0, err_msg=str(path))


def _spec_of(array) -> tuple:
    entries = [None if e in (None, ()) else e for e in array.sharding.spec]
    entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries]
    return (*entries, *(None,) * (array.ndim - len(entries)))


def test_every_operation_has_an_example():
    assert {example.operation for example in EXAMPLES} == set(modules.OPERATIONS)


@functools.cache
def _expected(example: Example):
    """Outputs and gradients without any mesh."""
    arrays = example.inputs()
    return jax.jit(lambda a: (example(**a), example.gradients(a)))(arrays)


def _check_on_mesh(example: Example, mesh, axes):
    """Outputs and gradients are right and sharded, and nothing is gathered for them."""
    with jax.set_mesh(mesh):
        placed = _placed(example, example.inputs(), mesh, axes)
        program = jax.jit(lambda a: (example(**a), example.gradients(a))).lower(placed).compile()
        out, gradients = program(placed)
    text = program.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    _assert_close((out, gradients), _expected(example))
    for array, names in zip(out, example.outputs, strict=True):
        assert _spec_of(array) == tuple(example.spec(names, axes))
    for name, array in gradients.items():
        assert _spec_of(array) == tuple(example.specs(axes)[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("example", "dims"), PAIRS)
def test_one_dimension_is_sharded(example, dims, kind):
    if kind is AxisType.Explicit:  # types remember an axis of one device, too
        mesh, axes = _mesh(kind, (1, 2, 2), ("one", "x", "y")), _axes(dims, ("one", "x", "y"))
    else:
        mesh, axes = _mesh(kind), _axes(dims)
    _check_on_mesh(example, mesh, axes)


# JAX 0.12 leaves a custom call "Sharding" in such programs, which its CPU backend does not have.
MIXED_AXES_COMPILE = jax.__version_info__ < (0, 11)
MIXED = (AxisType.Explicit, AxisType.Auto)


@pytest.mark.parametrize(
    ("example", "kinds"),
    [
        pytest.param(e, kinds, id=f"{e}-{name}")
        for e in EXAMPLES
        if len(e.shardable) > 1
        for name, kinds in (
            ("explicit", (AxisType.Explicit,) * 2),
            # The way of mixed axes leads through that of auto ones.
            ("auto", (AxisType.Auto,) * 2)
            if e.operation == "grouped_matmul" or not MIXED_AXES_COMPILE
            else ("mixed", MIXED),
        )
    ],
)
def test_two_dimensions_are_sharded(example, kinds):
    first, second = example.shardable[:2]
    axes = {**_axes(first, "x"), **_axes(second, "y")}
    _check_on_mesh(example, _mesh(kinds, (2, 2), ("x", "y")), axes)


@pytest.mark.parametrize("example", {e.operation: e for e in EXAMPLES}.values(), ids=str)
def test_a_mesh_of_one_device(example):
    axes = {**_axes(example.shardable[0], "x"), **_axes(example.shardable[-1], "y")}
    _check_on_mesh(example, _mesh(AxisType.Explicit, (1, 1), ("x", "y")), axes)


@pytest.mark.skipif(not MIXED_AXES_COMPILE, reason="this JAX does not compile such programs")
def test_mixed_axes_that_a_shard_map_over_the_explicit_ones_would_crash_on():
    """XLA ended the process here when the auto axes were left to its partitioner."""
    kinds = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    mesh = _mesh(kinds, (2, 2, 2), ("x", "y", "z"))
    (example,) = (e for e in EXAMPLES if str(e) == "grouped_matmul")
    arrays = {n: jnp.stack([a] * 2) for n, a in example.inputs().items()}
    specs = {"lhs": P("z", "y"), "rhs": P(), "group_sizes": P("z", "x")}

    def run(a):
        def loss(lhs, rhs):
            out = jax.vmap(modules.grouped_matmul)(lhs, rhs, a["group_sizes"])
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, (0, 1))(a["lhs"], a["rhs"])

    expected = jax.jit(run)(arrays)
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in arrays.items()}
        found = jax.jit(run)(placed)
    _assert_close(found, expected)


@pytest.mark.parametrize("first", ["frozen", "learned"])
@pytest.mark.parametrize("kind", [pytest.param(None, id="none"), *KINDS])
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_one_call_with_two_sets_of_differentiated_arrays(example, kind, first):
    """A frozen layer beside a learned one: JAX traces the call once and its gradient twice."""
    arrays, (_, expected) = example.inputs(), _expected(example)
    some = next(iter(expected))

    def loss(learned, arrays):
        def both(everything):
            return example.loss({**arrays, **(learned if everything else {some: learned[some]})})

        return both(first == "learned") + both(first == "frozen")

    def gradients(arrays):
        return jax.grad(loss)({name: arrays[name] for name in expected}, arrays)

    if kind is None:
        found = jax.jit(gradients)(arrays)
    else:
        mesh = _mesh(kind)
        with jax.set_mesh(mesh):
            found = jax.jit(gradients)(_placed(example, arrays, mesh, _axes(example.shardable[0])))
    _assert_close(found, {name: g * (1 + (name == some)) for name, g in expected.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_features_of_size_one(kind):
    mesh, q = _mesh(kind), jax.random.normal(jax.random.key(0), (4, 8, 1, 1))

    def gradient(q):
        return jax.grad(lambda q: jnp.sum(modules.flash_attention(q, q, q) ** 2))(q)

    with jax.set_mesh(mesh):
        found = jax.jit(gradient)(jax.device_put(q, NamedSharding(mesh, P("x"))))
    _assert_close(found, gradient(q))


@pytest.mark.parametrize("kind", KINDS)
def test_traces_are_not_kept_alive(kind):
    """JAX keeps the gradient rule of a call in its caches, for as long as the program lives."""
    mesh, weight = _mesh(kind), jnp.ones(16)
    with jax.set_mesh(mesh), jax.checking_leaks():
        x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("x")))
        jax.jit(jax.grad(lambda x: jnp.sum(modules.rms_norm(x, weight))))(x)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("example", "dims"),
    [
        pytest.param(example, dims, id=f"{example}-{dims.replace(' ', '')}")
        for example in EXAMPLES
        for dims in example.local
    ],
)
def test_inside_shard_map(example, dims, check_vma):
    mesh, axes = _mesh(AxisType.Auto), _axes(dims)
    mapped = jax.shard_map(
        lambda a: example(**a),
        mesh=mesh,
        in_specs=(example.specs(axes),),
        out_specs=[example.spec(names, axes) for names in example.outputs],
        check_vma=check_vma,
    )

    class Mapped(Example):
        def __call__(self, **arrays):
            return mapped(arrays)

    inside = Mapped(**{f: getattr(example, f) for f in example.__dataclass_fields__})
    program = jax.jit(lambda a: (mapped(a), inside.gradients(a))).lower(example.inputs()).compile()
    assert "all-gather" not in program.as_text()
    _assert_close(program(example.inputs()), _expected(example))


@pytest.mark.parametrize(("example", "dims"), PAIRS)
def test_the_definition_takes_explicit_shardings(example, dims):
    definition, mesh, axes = example.by_definition(), _mesh(AxisType.Explicit), _axes(dims)
    with jax.set_mesh(mesh):
        placed = _placed(example, example.inputs(), mesh, axes)
        out, gradients = jax.jit(lambda a: (definition(**a), definition.gradients(a)))(placed)
    _assert_close((out, gradients), _expected(example))
    for array, names in zip(out, example.outputs, strict=True):
        assert _spec_of(array) == tuple(example.spec(names, axes))


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize(
    ("dims", "segments"), [("t", "t"), ("", "t"), ("h", "b"), ("b", "t"), ("b", ""), ("", "b")]
)
def test_segments_are_sharded_otherwise(dims, segments, decays):
    (example,) = (e for e in EXAMPLES if str(e) == "gated_linear_attention")
    mesh, arrays = _mesh(AxisType.Explicit), example.inputs()
    if not decays:
        del arrays["g"]
    specs = {**example.specs(_axes(dims)), "segment_ids": example.spec("b t", _axes(segments))}
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in arrays.items()}
        found = jax.jit(lambda a: example(**a))(placed)
    _assert_close(found, example(**arrays))
