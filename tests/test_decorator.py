"""`tunable`: functions whose keyword parameters are chosen by measurement."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import tunable
from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    PersistentCache,
    Space,
    autotune,
    autotune_lowered,
    find_labels_in_lowered,
    overlay_cache,
    policy_override,
    vmap_with_config,
)
from ejkernel.ops.utils.provenance import source_hash

ROOT = pathlib.Path(__file__).parent.parent


@tunable(block=[2, 4, 8])
def total(x, *, block=4):
    """The sum of an array, block by block."""
    return jax.lax.map(jnp.sum, x.reshape(-1, block)).sum()


@tunable(rows=[1, 2], columns=[2, 4], constraint=lambda rows, columns, x: rows * columns <= x.size)
def scaled(x, factor=2.0, *, rows=2, columns=4, offset=0.0):
    return x * factor + offset + 0.0 * rows * columns


class Layer:
    def __init__(self, weight):
        self.weight = weight

    @tunable(block=[2, 4])
    def __call__(self, x, *, block=2):
        return x * self.weight + 0.0 * block


jax.tree_util.register_pytree_node(
    Layer, lambda layer: ((layer.weight,), None), lambda _, children: Layer(*children)
)


def generating(x, *, block=1):
    yield x


async def waiting(x, *, block=1):
    return x


x = jnp.arange(16.0)


def test_it_is_a_kernel_and_called_like_the_function():
    assert isinstance(total, Kernel)
    assert float(total(x)) == 120.0
    assert float(total(x=x)) == 120.0
    assert total.__name__ == "total"
    assert total.__doc__ == "The sum of an array, block by block."
    assert str(inspect.signature(total)) == "(x, *, block=4)"
    assert total.op_id == "total"
    assert repr(total) == "tunable('total@v1', block)"


def test_by_name_and_by_position_are_one_call():
    assert total.bind(x).call_key == total.bind(x=x).call_key


def test_defaults_are_the_heuristic_and_explicit_values_win():
    inv = total.bind(x)
    assert total.heuristic(inv) == total.Config(block=4)
    assert total.candidates(inv) == [total.Config(4), total.Config(2), total.Config(8)]
    assert total.best(x) == total.Config(4)
    assert total.bind(x, block=8).override_cfg == total.Config(8)
    assert "by heuristics" in total.explain(x)
    text = jax.jit(lambda x: total(x, block=8)).lower(x).as_text()
    assert "tensor<2x8xf32>" in text


def test_some_given_the_rest_is_chosen():
    inv = scaled.bind(x, rows=1)
    assert inv.override_cfg == scaled.Config(rows=1, columns=4)
    with overlay_cache({scaled.bind(x).key: scaled.Config(rows=1, columns=2)}):
        assert scaled.bind(x, rows=2).override_cfg == scaled.Config(rows=2, columns=2)
        assert scaled.best(x) == scaled.Config(1, 2)
    np.testing.assert_array_equal(scaled(x, rows=1), 2 * x)
    np.testing.assert_array_equal(scaled(x, rows=1, offset=1.0), 2 * x + 1)
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    np.testing.assert_array_equal(executor(scaled, x, columns=2), 2 * x)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "scan", "checkpoint"])
@pytest.mark.parametrize("given", [{}, {"block": 8}])
def test_transforms(transform, given):
    def f(x):
        return total(x, **given)

    if transform == "jit":
        assert float(jax.jit(f)(x)) == 120.0
    elif transform == "grad":
        np.testing.assert_array_equal(jax.grad(f)(x), np.ones(16))
    elif transform == "vmap":
        np.testing.assert_array_equal(jax.vmap(f)(jnp.stack([x, 2 * x])), [120.0, 240.0])
    elif transform == "scan":
        _, sums = jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.stack([x, 2 * x]))
        np.testing.assert_array_equal(sums, [120.0, 240.0])
    else:
        np.testing.assert_array_equal(jax.grad(jax.checkpoint(f))(x), np.ones(16))


def test_jit_above_and_below():
    @tunable(block=[2, 4])
    @jax.jit
    def below(x, *, block=2):
        return x.reshape(-1, block).sum()

    assert float(below(x)) == 120.0
    assert float(below(x, block=4)) == 120.0
    above = jax.jit(total, static_argnames="block")
    assert float(above(x, block=8)) == 120.0


def test_a_constraint_may_ask_for_arguments_and_excludes_explicit_values_too():
    @tunable(block=[1, 2, 4], constraint=lambda block, x: x.size % block == 0)
    def summed(x, *, block=4):
        return x.reshape(-1, block).sum()

    six = jnp.arange(6.0)
    assert summed.candidates(summed.bind(six)) == [summed.Config(1), summed.Config(2)]
    assert float(summed(six)) == 15.0
    with pytest.raises(ValueError, match=r"SummedConfig\(block=4\), and the constraint"):
        summed(six, block=4)


def test_values_and_heuristics_from_the_arguments():
    @tunable(
        block=lambda x: [1, x.size],
        heuristic=lambda x, flip: {"block": x.size if flip else 1},
    )
    def summed(x, *, block, flip=False):
        return x.reshape(-1, block).sum()

    assert summed.candidates(summed.bind(x)) == [summed.Config(1), summed.Config(16)]
    assert summed.best(x, flip=True) == summed.Config(16)


@pytest.mark.parametrize(
    "space",
    [{"block": [2, 8]}, Space(block=[2, 8]), [{"block": 2}, {"block": 8}]],
    ids=["mapping", "space", "combinations"],
)
def test_forms_of_a_space(space):
    def summed(x, *, block=4):
        return x.reshape(-1, block).sum()

    for made in (tunable(space)(summed), tunable(summed, space=space)):
        assert [c.block for c in made.candidates(made.bind(x))] == [4, 2, 8]


def test_around_the_function_of_somebody_else():
    @dataclasses.dataclass(frozen=True)
    class Blocks:
        rows: int = 1

    def theirs(x, blocks=None):
        return x * (1 if blocks is None else blocks.rows)

    made = tunable(theirs, blocks=[Blocks(1), Blocks(2)], name="theirs", version="3")
    assert made.full_op_id == "theirs@v3"
    np.testing.assert_array_equal(made(x, blocks=Blocks(2)), 2 * x)
    assert made.best(x) == made.Config(None)


def test_methods_of_a_pytree():
    layer = Layer(jnp.float32(3.0))
    np.testing.assert_array_equal(layer(x), 3 * x)
    np.testing.assert_array_equal(layer(x, block=4), 3 * x)
    grads = jax.grad(lambda layer: layer(x).sum())(layer)
    assert float(grads.weight) == 120.0


@pytest.mark.parametrize("form", ["one function", "two functions"])
def test_a_gradient_of_its_own(form):
    seen = []

    def one(out, dout, x, *, block):
        seen.append(block)
        return (3.0 * dout * jnp.ones_like(x),)

    def forward(x, *, block):
        return x.sum(), block * x

    def two(saved, out, dout, x, *, block):
        seen.append(block)
        return (dout * saved,)

    backward = one if form == "one function" else (forward, two)
    summed = tunable(lambda x, *, block=2: x.sum(), block=[2, 4], name="own", backward=backward)
    wanted = 3 * np.ones(16) if form == "one function" else 4 * x
    np.testing.assert_array_equal(jax.grad(lambda x: summed(x, block=4))(x), wanted)
    assert set(seen) == {4}


def test_a_wrong_candidate_never_wins():
    @tunable(block=[1, 2], reference=lambda x: x + 1)
    def plus(x, *, block=1):
        return x + 1 if block == 1 else x

    assert autotune(plus, x) == plus.Config(1)


def test_labels_and_offline_tuning():
    lowered = jax.jit(jax.grad(total)).lower(x)
    (label,) = find_labels_in_lowered(lowered)
    assert label.startswith("ejkernel_ops#total@v1:")
    result = autotune_lowered(ConfigSelectorChain(ConfigCache()), lowered)
    assert [type(entry.cfg) for entry in result] == [total.Config]
    with result:
        np.testing.assert_array_equal(jax.grad(total)(x), np.ones(16))


def test_a_batch_has_one_selection():
    np.testing.assert_array_equal(vmap_with_config(total, in_axes=(0,))(x[None]), [120.0])


def test_copies_and_pickles_are_the_function_itself():
    assert copy.copy(total) is total
    assert pickle.loads(pickle.dumps(total)) is total


def test_one_more_value_leaves_stored_entries_fresh(tmp_path, monkeypatch):
    text = (
        "from ejkernel import tunable\n\n"
        "@tunable(block=[{}])\ndef f(x, *, block=1):\n    return x{}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = {}
    for name, values, body in (("a", "1", ""), ("b", "1, 2", ""), ("c", "1", " + 1")):
        (tmp_path / f"hashed_{name}.py").write_text(text.format(values, body))
        script = (
            f"import hashed_{name} as m\n"
            "from ejkernel.ops.utils.provenance import source_hash\nprint(source_hash(m.f))"
        )
        run = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        hashes[name] = run.stdout
    assert hashes["a"] == hashes["b"] != hashes["c"]
    assert source_hash(total) != source_hash(scaled)


def test_another_gradient_or_bound_argument_makes_stored_entries_stale(tmp_path, monkeypatch):
    text = (
        "import functools\nfrom ejkernel import tunable\n\n"
        "def backward(out, dout, x, *, block):\n    return (dout * {0},)\n\n"
        "@tunable(block=[1, 2], backward=backward)\ndef f(x, *, block=1):\n    return x\n\n"
        "def plus(x, other, *, block=1):\n    return x + other\n\n"
        "g = tunable(functools.partial(plus, other={0}), block=[1, 2])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    script = (
        "import hashed_{} as m\nfrom ejkernel.ops.utils.provenance import source_hash\n"
        "print(source_hash(m.f))\nprint(source_hash(m.g))"
    )
    hashes = []
    for number in (1, 2):
        (tmp_path / f"hashed_{number}.py").write_text(text.format(number))
        command = [sys.executable, "-c", script.format(number)]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        hashes += run.stdout.split()
    assert len(set(hashes)) == 4


def test_defined_again_as_in_a_notebook(caplog):
    def define(factor):
        @tunable(block=[1, 2])
        def cell(x, *, block=1):
            return x * factor

        return cell

    quietly = {"effort": "quick", "quiet": True, "save": False}
    for factor in (2, 3):
        cell = define(factor)
        assert float(cell(x)[1]) == factor * float(x[1])  # what is in memory is of the earlier one
        assert isinstance(cell.tune(x, **quietly).entries[0].cfg, cell.Config)
        assert isinstance(cell.best(x), cell.Config)
    assert "another CellConfig than the kernel's" in caplog.text


def test_measured_again_and_stored(tmp_path):
    store = PersistentCache(tmp_path)
    quietly = {"effort": "quick", "quiet": True, "store": store}
    first = total.tune(x, **quietly)
    key = total.bind(x).key
    before = store.entry(key)["about"]
    store.put(key, first.entries[0].cfg, about={**before, "seconds": 1000.0})
    assert total.tune(x, **quietly).entries[0].seconds == 1000.0  # the store knows it
    assert total.tune(x, force=True, save=False, **quietly).entries[0].seconds < 1.0
    assert store.entry(key)["about"]["seconds"] == 1000.0
    assert total.tune(x, force=True, **quietly).entries[0].seconds < 1.0
    assert store.entry(key)["about"]["seconds"] < 1.0


def test_tuned_in_another_process_from_the_text_of_the_program(tmp_path):
    (tmp_path / "their_model.py").write_text(
        textwrap.dedent(
            """
            import jax, jax.numpy as jnp
            from ejkernel import tunable

            @tunable(block=[2, 4])
            def total(x, *, block=2):
                return jax.lax.map(jnp.sum, x.reshape(-1, block)).sum()
            """
        )
    )

    def run(script):
        return subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    run(
        "import jax, jax.numpy as jnp, their_model\n"
        "lowered = jax.jit(their_model.total).lower(jnp.ones(16))\n"
        "open('program.txt', 'w').write(lowered.as_text())"
    )
    found = run(
        "from ejkernel.ops import autotune_lowered, ConfigSelectorChain, ConfigCache\n"
        "program = open('program.txt').read()\n"
        "result = autotune_lowered(ConfigSelectorChain(ConfigCache()), program)\n"
        "print([entry.op_id for entry in result], result.skipped)"
    )
    assert found.strip() == "['total@v1'] ()"


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int = 1
    dtype: jnp.dtype | None = None


@pytest.mark.parametrize(
    "values",
    [
        [None, 3],
        [1, True, 2.5, "a"],
        [Mode.FAST, None],
        [jnp.float32, jnp.dtype("bfloat16")],
        [(1, 2), ((3,), 4), ()],
        [Tile(2), Tile(4, jnp.dtype("float32"))],
        [(Tile(2),), (Tile(4), Tile(2))],
        np.array([2, 4]),
        jnp.array([2, 4]),
        (2**i for i in range(3)),
    ],
    ids=[
        *("none", "scalars", "enum", "dtypes", "tuples", "dataclasses", "dataclasses in tuples"),
        *("numpy array", "jax array", "generator"),
    ],
)
def test_values_are_stored_and_read_as_they_were(values, tmp_path):
    given = tunable(lambda x, *, v: x * 1.0, v=values, name="given")
    inv, store = given.bind(x), PersistentCache(tmp_path)
    for cfg in given.candidates(inv):
        store.put(inv.key, cfg)
        found = PersistentCache(tmp_path).get(inv.key)
        assert found == cfg
        assert type(found.v) is type(cfg.v)
        np.testing.assert_array_equal(given(x, v=cfg.v), x)


def test_values_that_a_function_lists_have_the_type_of_the_annotation(tmp_path):
    @tunable(tile=lambda x: [Tile(1), Tile(x.size)])
    def tiled(x, *, tile: Tile = Tile(2)):
        return x * 1.0

    inv = tiled.bind(x)
    PersistentCache(tmp_path).put(inv.key, tiled.Config(Tile(16)))
    assert PersistentCache(tmp_path).get(inv.key) == tiled.Config(Tile(16))


def test_any_number_of_arguments_and_of_keywords():
    @tunable(block=[1, 2])
    def added(*xs, block=1, **named):
        return sum(xs) + sum(named.values())

    np.testing.assert_array_equal(added(x, x, bias=x), 3 * x)
    np.testing.assert_array_equal(added(x, block=2, bias=1.0), x + 1)
    taken = tunable(lambda x, **keywords: x * keywords["block"], block=[2, 4], name="taken")
    np.testing.assert_array_equal(taken(x), 2 * x)


def test_options_of_every_kind():
    @tunable(block=[1, 2])
    def f(x, bias=None, causal=False, *, dtype=jnp.float32, then=jnp.tanh, mode="a", block=1):
        x = x if bias is None else x + bias
        return then(x if causal else 2 * x).astype(dtype) * len(mode)

    np.testing.assert_array_equal(f(x, causal=True, then=jnp.abs), x)
    np.testing.assert_array_equal(f(x, x, then=jnp.abs, mode="ab", block=2), 8 * x)
    assert f(x, None, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(TypeError) as error:
        f(x, None, True)
    assert "Give options by keyword: causal=…" in "".join(error.value.__notes__)


def test_an_error_says_with_which_config_it_ran():
    with pytest.raises(TypeError) as error:
        total(jnp.ones(7))
    assert "total ran with TotalConfig(block=4)" in "".join(error.value.__notes__)


def test_numbers_of_numpy_are_values_too():
    assert float(total(x, block=np.int64(8))) == 120.0


def test_what_stands_after_a_tunable_parameter_is_given_by_keyword():
    @tunable(block=[1, 2])
    def f(x, block=1, bias=0.0):
        return x + bias

    np.testing.assert_array_equal(f(x, bias=x), 2 * x)
    with pytest.raises(TypeError, match="argument 2 is block, which is tunable"):
        f(x, 1, x)


def test_jit_below_with_static_names():
    @tunable(block=[1, 2])
    @functools.partial(jax.jit, static_argnames=("times", "block"))
    def f(x, times=3, *, block=1):
        return jnp.tile(x, times)

    assert f(x, times=2).shape == (32,)
    assert f(x, times=2, block=2).shape == (32,)


def test_custom_gradients_and_partials_of_somebody_else():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def f(x, block=2):
        return x * block

    f.defvjp(lambda x, block: (f(x, block), None), lambda block, _, g: (100 * g,))
    own = tunable(f, block=[2, 4])
    np.testing.assert_array_equal(own(x, block=4), 4 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: own(x).sum())(x), 100 * np.ones(16))
    half = tunable(
        functools.partial(lambda scale, x, *, block=2: x * scale, 3.0), block=[2], name="h"
    )
    np.testing.assert_array_equal(half(x), 3 * x)


class Holder:
    def __init__(self, weight):
        self.weight = weight

    @tunable(block=[2, 4])
    def scale(self, x, *, block=2):
        return x * self.weight

    @tunable(block=[2, 4])
    @staticmethod
    def static(x, *, block=2):
        return x * block

    @tunable(block=[2, 4])
    @classmethod
    def of_class(cls, x, *, block=2):
        return x * block

    @staticmethod
    @tunable(block=[2, 4])
    def inside(x, *, block=2):
        return x * block


def test_methods_are_tuned_as_methods():
    layer = Layer(jnp.float32(3.0))
    assert Layer.__call__.op_id == "Layer.__call__"
    assert Holder.scale.Config.__name__ == "HolderScaleConfig"
    bound = layer.__call__
    assert bound.best(x) == Layer.__call__.Config(2)
    assert "by heuristics" in bound.explain(x)
    (entry,) = bound.tune(x, quiet=True, effort="quick")
    assert entry.op_id == "Layer.__call__@v1"
    assert "in the memory cache" in bound.explain(x)
    np.testing.assert_array_equal(jax.jit(bound)(x), 3 * x)


@pytest.mark.parametrize("name", ["static", "of_class", "inside"])
def test_static_and_class_methods(name):
    for owner in (Holder, Holder(1.0)):
        np.testing.assert_array_equal(getattr(owner, name)(x), 2 * x)
        np.testing.assert_array_equal(getattr(owner, name)(x, block=4), 4 * x)


def test_an_object_that_is_no_pytree_is_named():
    with pytest.raises(TypeError, match=r"Holder.scale: self=.*register its class as a pytree"):
        Holder(1.0).scale(x)


def test_attributes_of_the_function_are_not_those_of_the_kernel():
    def f(x, *, block=1):
        return x

    f.version = 7
    assert tunable(f, block=[1, 2]).full_op_id == "f@v1"


def _defined(module, body, values="1, 2"):
    code = f"@tunable(block=[{values}])\ndef cell(x, *, block=1):\n    return {body}\n"
    names = {"tunable": tunable, "__name__": module}
    exec(code, names)
    return names["cell"]


def test_a_function_that_is_defined_again_is_another_one():
    first = _defined("__main__", "x * 1.0")
    first.tune(x, quiet=True, effort="quick")
    assert "in the memory cache" in first.explain(x)
    again = _defined("__main__", "x * 10.0", "1, 2, 4")
    assert "from an earlier definition" in again.explain(x)
    np.testing.assert_array_equal(again(x), 10 * x)
    again.tune(x, quiet=True, effort="quick")
    assert "in the memory cache" in again.explain(x)
    np.testing.assert_array_equal(again(x), 10 * x)
    np.testing.assert_array_equal(first(x), x)


def test_two_functions_of_one_name_are_told_of():
    first = _defined("one", "x * 2.0")
    with pytest.warns(UserWarning, match=r"called cell@v1: one.cell and two.cell"):
        second = _defined("two", "x * 3.0")
    first.tune(x, quiet=True, effort="quick")
    np.testing.assert_array_equal(second(x), 3 * x)
    np.testing.assert_array_equal(first(x), 2 * x)


def test_on_a_mesh_and_in_float64():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    for given in ({}, {"block": 2}):
        mapped = jax.shard_map(
            lambda x, given=given: total(x, **given)[None], mesh=mesh, in_specs=spec, out_specs=spec
        )
        np.testing.assert_array_equal(jax.jit(mapped)(x), [6.0, 22.0, 38.0, 54.0])
    with jax.enable_x64(True):
        assert total(jnp.arange(16.0)).dtype == jnp.float64


def test_strict_mode_serves_what_was_tuned():
    strict = tunable(lambda x, *, block=2, more=1: x * 1.0, block=[2], more=[1, 2], name="strict")
    with policy_override(strict=True):
        np.testing.assert_array_equal(strict(x, block=2, more=2), x)
        for given in ({}, {"block": 2}):
            with pytest.raises(RuntimeError, match="no config is stored for strict@v1"):
                strict(x, **given)
    strict.tune(x, quiet=True, effort="quick")
    with policy_override(strict=True):
        np.testing.assert_array_equal(strict(x), x)
        np.testing.assert_array_equal(strict(x, block=2), x)


def test_tuned_on_the_first_call_exported_and_served_by_another_process(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "import jax.numpy as jnp\nfrom ejkernel import tunable\n\n"
        "@tunable(block=[2, 4])\ndef total(x, *, block=2):\n"
        "    return x.reshape(-1, block).sum()\n\nx = jnp.ones(16)\n"
    )

    def run(script, **variables):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), **variables}
        run = subprocess.run(
            [sys.executable, *script], cwd=tmp_path, capture_output=True, text=True, env=env
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    call = ["-c", "from theirs import *; print(total.explain(x)); total(x)"]
    store = {"EJKERNEL_CACHE_DIR": str(tmp_path / "store")}
    run(call, EJKERNEL_AUTOTUNE="1", **store)
    assert "chosen   by persistent" in run(call, EJKERNEL_STRICT="1", **store)
    run(["-m", "ejkernel", "configs", "export", "tuned.json"], **store)
    empty = {"EJKERNEL_CACHE_DIR": str(tmp_path / "empty"), "EJKERNEL_CONFIG_PATH": "tuned.json"}
    assert "chosen   by bundle" in run(call, EJKERNEL_STRICT="1", **empty)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: tunable(block=[[1, 2]], name="f")(lambda x, *, block=1: x),
            r"block=\[1, 2\] \(list\) cannot be the value",
        ),
        (
            lambda: tunable(then=[jnp.tanh], name="f")(lambda x, *, then: x),
            "then=.* cannot be the value of a config",
        ),
        (lambda: tunable(cfg=[1], name="f")(lambda x, *, cfg=1: x), "its whole config as cfg="),
        (lambda: tunable(generating, block=[1]), "is a generator or asynchronous"),
        (lambda: tunable(waiting, block=[1]), "is a generator or asynchronous"),
        (
            lambda: jax.jit(lambda x, b: total(x, block=b))(x, 4),
            r"total@v1: block is traced.*static_argnames",
        ),
        (lambda: total(x, block=jnp.int32(4)), r"block is traced|block=.* must be hashable"),
        (
            lambda: tunable(block=[3], constraint=lambda block, x: x.size % block == 0, name="f")(
                lambda x, *, block=7: x
            )(x),
            "no combination of block meets the constraint",
        ),
        (lambda: total(), r"total\(\): missing a required argument: 'x'"),
        (lambda: total.best(x, blokc=4), "unexpected keyword argument 'blokc'"),
        (lambda: tunable(name="f")(lambda x: x), "say which parameters are tunable"),
        (
            lambda: tunable(blokc=[1], name="f")(lambda x, *, block=1: x),
            "'blokc' is no keyword parameter",
        ),
        (lambda: tunable(x=[1], name="f")(lambda x, /: x), "'x' is no keyword parameter"),
        (lambda: tunable(block=[], name="f")(lambda x, *, block=1: x), r"block=\[\] has no values"),
        (lambda: tunable(block=3, name="f")(lambda x, *, block=1: x), "block=3 must be a list"),
        (
            lambda: tunable(block="ab", name="f")(lambda x, *, block=1: x),
            "block='ab' must be a list",
        ),
        (
            lambda: tunable(block=[1], constraint=lambda blocks: True, name="f")(
                lambda x, *, block=1: x
            ),
            "constraint asks for blocks; it may ask for block, inv, x",
        ),
        (
            lambda: tunable(block=[1], heuristic=lambda y: {}, name="f")(lambda x, *, block=1: x),
            "heuristic asks for y",
        ),
        (
            lambda: tunable(block=[1], heuristic=3, name="f")(lambda x, *, block=1: x),
            "heuristic=3 must be",
        ),
        (
            lambda: tunable(block=[1], backward=3, name="f")(lambda x, *, block=1: x),
            "backward=3 must be one",
        ),
        (
            lambda: tunable(block=[[1], [2]], name="f")(lambda x, *, block=(1,): x),
            r"block=\[1\] \(list\) cannot be the value of a config, which is hashed",
        ),
        *(
            (
                lambda word=word: tunable({word: [1]}, name="f")(lambda x, **options: x),
                f"cannot be named '{word}'",
            )
            for word in ("heuristic", "space", "unfit")
        ),
        (lambda: tunable(total, block=[1]), "no function that could be tuned"),
        (lambda: tunable({"block": [1]}, space={"block": [2]}), "given twice"),
        (lambda: tunable(block=[1])(lambda x, *, block=1: x), "a lambda has no name"),
        (lambda: total(x, 4), r"total\(\) takes 1 positional arguments \(x\), and 2 were given"),
        (lambda: total(x, blokc=4), "unexpected keyword argument 'blokc'"),
        (lambda: total(x, block="four"), "block"),
        (
            lambda: tunable(block=[1], name="f")(lambda x, block=1: x)(x, 1),
            "argument 2 is block, which is tunable",
        ),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()
