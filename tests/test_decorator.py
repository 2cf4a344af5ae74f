"""`tunable`: functions whose keyword parameters are chosen by measurement."""

from __future__ import annotations

import copy
import dataclasses
import inspect
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
    vmap_with_config,
)
from ejkernel.ops.utils.provenance import source_hash


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
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
            r"block=\[\[1\], \[2\]\] holds a value that cannot be hashed",
        ),
        *(
            (
                lambda word=word: tunable({word: [1]}, name="f")(lambda x, **options: x),
                f"cannot be named '{word}'",
            )
            for word in ("cfg", "implementation", "heuristic", "space", "unfit")
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
