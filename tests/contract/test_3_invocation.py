"""Section 3 of the contract: an invocation and the key that identifies it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import re
import subprocess
import sys
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.ops import (
    BatchAxes,
    Invocation,
    Kernel,
    default_key_builder_with_sharding,
    device_fingerprint,
)


@dataclasses.dataclass(frozen=True)
class Block:
    size: int = 1


class Add(Kernel[Block, jax.Array]):
    def run(self, *args, cfg, **kwargs):
        return args[0]


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class OtherMode(enum.Enum):
    FAST = 1


def key(*args, **kwargs):
    return Add().bind(*args, **kwargs).call_key


X = jnp.ones((2, 3))


# --- building and reading ------------------------------------------------------------------------


def test_an_invocation_is_built_from_a_kernel():
    kernel = Add("add")
    inv = Invocation(kernel=kernel, args=(X, X), kwargs={"flag": True}, metadata={"note": "hi"})
    assert inv.kernel is kernel
    assert inv.op_id == "add"
    assert inv.args == (X, X)
    assert inv.kwargs == {"flag": True}
    assert inv.metadata == {"note": "hi"}
    assert inv.batch_axes is None
    assert inv.override_cfg is None


def test_an_invocation_is_built_from_an_operation_id():
    inv = Invocation(
        op_id="add",
        args=(X, X),
        kwargs={},
        batch_axes=(0, None),
        override_cfg=Block(3),
        stamp=False,
    )
    assert inv.op_id == "add"
    assert inv.batch_axes == (0, None)
    assert inv.override_cfg == Block(3)
    assert inv.stamp is False
    assert re.fullmatch(r"[0-9a-f]{16}", inv.call_key)


def test_both_forms_give_the_same_key():
    by_kernel = Invocation(kernel=Add("add"), args=(X,), kwargs={"flag": True})
    by_name = Invocation(op_id="add", args=(X,), kwargs={"flag": True})
    assert by_kernel.call_key == by_name.call_key
    assert by_kernel.key == by_name.key


def test_an_invocation_without_kernel_and_name_is_refused():
    with pytest.raises(TypeError, match=r"kernel=.*op_id="):
        Invocation(args=(X,))


def test_stamp_is_on_and_the_rest_is_empty_by_default():
    inv = Invocation(op_id="add")
    assert (inv.args, inv.kwargs, inv.metadata, inv.stamp) == ((), {}, {}, True)


def test_abstract_args_have_the_tree_of_the_arguments_and_no_values():
    inv = Add().bind({"a": X, "b": [np.zeros(4, np.int8), 2.0]}, X.astype(jnp.bfloat16))
    tree, last = inv.abstract_args
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((tree, last)))
    assert (tree["a"].shape, tree["a"].dtype) == ((2, 3), jnp.float32)
    assert (tree["b"][0].shape, tree["b"][0].dtype) == ((4,), jnp.int8)
    assert (tree["b"][1].shape, tree["b"][1].dtype) == ((), jnp.float32)
    assert last.dtype == jnp.bfloat16


def test_the_device_fingerprint_is_that_of_the_current_device():
    inv = Add().bind(X)
    assert inv.device_fingerprint == device_fingerprint()
    assert inv.key.device == device_fingerprint()


def test_the_complete_key_is_device_operation_and_call():
    inv = Add("add", version="3").bind(X)
    assert inv.key == (device_fingerprint(), "add@v3", inv.call_key)


# --- the call key --------------------------------------------------------------------------------


def test_the_call_key_is_16_hexadecimal_digits():
    assert re.fullmatch(r"[0-9a-f]{16}", key(X, flag=True))


def test_array_values_are_not_in_the_key():
    assert key(X) == key(X + 5)
    assert key(X, bias=X) == key(X, bias=X * 7)


DIFFERENT = {
    "shape": (jnp.ones((2, 3)), jnp.ones((3, 2))),
    "rank": (jnp.ones(6), jnp.ones((6, 1))),
    "dtype": (jnp.ones(2), jnp.ones(2, jnp.bfloat16)),
    "sign": (jnp.ones(2, jnp.int32), jnp.ones(2, jnp.uint32)),
    "bool": (jnp.ones(2, jnp.int8), jnp.ones(2, bool)),
    "weak type": (jnp.float32(1), jnp.asarray(1.0)),
    "a number and an array": (1.0, jnp.ones(())),
    "tuple and list": ((X, X), [X, X]),
    "tuple and dict": ((X, X), {"0": X, "1": X}),
    "dictionary keys": ({"a": X, "b": X}, {"a": X, "c": X}),
    "nesting": (((X,), X), (X, (X,))),
    "None and missing": ((X, None), (X,)),
    "tuple and named tuple": ((X,), namedtuple("Pair", "a")(X)),
    "random key and its bits": (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
    "string": (("a", X), ("b", X)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_key_of_an_argument_depends_on(what):
    one, other = DIFFERENT[what]
    assert key(one) != key(other)


@pytest.mark.parametrize("what", [w for w in DIFFERENT if w not in ("string",)])
def test_the_key_of_a_keyword_array_depends_on(what):
    one, other = DIFFERENT[what]
    assert key(X, extra=one) != key(X, extra=other)


def test_the_number_and_the_order_of_arguments_matter():
    y = jnp.ones(4)
    assert len({key(X), key(X, X), key(X, y), key(y, X)}) == 4


def test_a_keyword_is_not_a_positional_argument():
    assert key(X, X) != key(X, bias=X)
    assert key(X, bias=X) != key(X, mask=X)


def lambdas():
    return [lambda x: x + 1, lambda x: x + 2, lambda x: x - 1]


def adder(n):
    return lambda x: x + n


def with_default(n):
    def inner(x, by=n):
        return x + by

    return inner


class Times:
    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return f"Times({self.n})"

    def by(self, x):
        return x * self.n


STATIC_VALUES = {
    "strings": ["same", "valid", ""],
    "numbers and their look-alikes": [1, 1.0, True, "1", None],
    "zero and its look-alikes": [0, 0.0, -0.0, False, "", None, ()],
    "floats": [0.1, 0.2, float("inf"), float("-inf"), float("nan")],
    "tuples": [(1, 2), (2, 1), (1, (2,)), ((1, 2),), ()],
    "tuple and its text": [(1, 2), "(1, 2)", (1.0, 2.0)],
    "enums": [Mode.FAST, Mode.EXACT, OtherMode.FAST, "FAST", 1],
    "dtypes": [jnp.float32, jnp.bfloat16, jnp.int8, np.float16, "float32"],
    "dtype objects": [np.dtype("float32"), np.dtype("float64"), jnp.dtype("bfloat16")],
    "named functions": [jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.gelu, max, len],
    "lambdas of one line": lambdas(),
    "closures": [adder(1), adder(2), adder(2.0)],
    "default values": [with_default(1), with_default(2)],
    "partials": [
        functools.partial(jnp.sum, axis=0),
        functools.partial(jnp.sum, axis=1),
        functools.partial(jnp.max, axis=0),
        jnp.sum,
    ],
    "bound methods": [Times(1).by, Times(2).by],
    "objects with a repr": [Times(1), Times(2)],
    "frozen dataclasses": [Block(1), Block(2)],
    "sets": [frozenset({"a", "b"}), frozenset({"a"}), ("a", "b")],
    "slices": [slice(0, 2), slice(0, 3), slice(0, 2, 1)],
    "jitted functions": [jax.jit(adder(1)), jax.jit(adder(2))],
}


@pytest.mark.parametrize("what", STATIC_VALUES)
def test_static_keyword_values_that_differ_have_different_keys(what):
    values = STATIC_VALUES[what]
    keys = [key(X, option=value) for value in values]
    assert len(set(keys)) == len(values), dict(zip(map(repr, values), keys, strict=True))


@pytest.mark.parametrize("what", STATIC_VALUES)
def test_static_keyword_values_have_the_same_key_every_time(what):
    for value in STATIC_VALUES[what]:
        assert key(X, option=value) == key(X + 1, option=value)


def test_equal_static_values_made_anew_have_the_same_key():
    pairs = [
        (adder(3), adder(3)),
        (lambdas()[1], lambdas()[1]),
        (functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=0)),
        (Times(3).by, Times(3).by),
        (Block(3), Block(3)),
        (frozenset("abc"), frozenset("cba")),
        (jax.jit(adder(3)), jax.jit(adder(3))),
    ]
    for one, other in pairs:
        assert key(X, option=one) == key(X, option=other)


def test_every_spelling_of_a_dtype_has_the_same_key():
    spellings = [jnp.bfloat16, jnp.dtype("bfloat16"), jnp.zeros((), jnp.bfloat16).dtype]
    assert len({key(X, dtype=spelling) for spelling in spellings}) == 1
    assert key(X, dtype=np.float32) == key(X, dtype=jnp.float32) == key(X, dtype=np.dtype("f4"))


def test_the_order_of_keywords_does_not_matter():
    assert key(X, a=1, b=2) == key(X, b=2, a=1)


def test_the_order_of_dictionary_entries_does_not_matter():
    assert key({"a": X, "b": X}) == key({"b": X, "a": X})
    assert key(X, option={"a": 1, "b": 2}) == key(X, option={"b": 2, "a": 1})


def test_a_missing_keyword_is_not_the_same_as_none():
    assert key(X) != key(X, option=None)


def test_the_static_part_of_a_registered_dataclass_is_in_the_key():
    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["mode"]
    )
    @dataclasses.dataclass
    class Node:
        array: jax.Array
        mode: str

    assert key(Node(X, "a")) == key(Node(X + 1, "a"))
    assert key(Node(X, "a")) != key(Node(X, "b"))


def test_a_custom_node_does_not_bring_its_address_into_the_key():
    class Opaque:
        """Static data without a stable text."""

        def __eq__(self, other):
            return isinstance(other, Opaque)

        def __hash__(self):
            return 1

    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["meta"]
    )
    @dataclasses.dataclass
    class Holder:
        array: jax.Array
        meta: Opaque

    first, second = Opaque(), Opaque()
    assert key(Holder(X, first)) == key(Holder(X, second))


def test_batch_axes_are_in_the_key():
    def batched(axes):
        return Invocation(op_id="add", args=(X,), batch_axes=axes).call_key

    axes = [None, 0, 1, (0, None), (None, 0), BatchAxes("vmap", 0, 4), BatchAxes("vmap", 0, 8)]
    axes.append(BatchAxes("pmap", 0, 4))
    assert len({batched(a) for a in axes}) == len(axes)
    assert batched(BatchAxes("vmap", (0, None), 4)) == batched(BatchAxes("vmap", (0, None), 4))


def test_the_operation_override_and_metadata_are_not_in_the_call_key():
    plain = Invocation(op_id="add", args=(X,)).call_key
    assert Invocation(op_id="mul", args=(X,)).call_key == plain
    assert Invocation(op_id="add", args=(X,), override_cfg=Block(2)).call_key == plain
    assert Invocation(op_id="add", args=(X,), metadata={"note": 1}).call_key == plain
    assert Invocation(op_id="add", args=(X,), stamp=False).call_key == plain


class Seeded(Add):
    unkeyed = ("seed", "callback")


def test_unkeyed_keywords_stay_out_of_the_key():
    def seeded(**kwargs):
        return Seeded().bind(X, **kwargs).call_key

    keys = {seeded(seed=n, mode="a") for n in range(5)} | {seeded(mode="a")}
    assert len(keys) == 1
    assert seeded(seed=1, mode="b") not in keys
    assert seeded(callback=object()) == seeded()


def test_a_keyword_without_a_stable_form_is_refused_by_name():
    with pytest.raises(TypeError) as error:
        _ = Add("add").bind(X, hook=object()).call_key
    message = str(error.value)
    assert "add@v1" in message
    assert "'hook'" in message
    assert "unkeyed" in message


# --- the same key wherever the call is seen ------------------------------------------------------

ARGUMENTS = {
    "float32": np.ones((2, 3), np.float32),
    "float64, which JAX narrows": np.ones((2, 3), np.float64),
    "int64, which JAX narrows": np.arange(4),
    "bool": np.ones(3, bool),
    "bfloat16": np.ones(2, jnp.bfloat16),
    "complex": np.ones(2, np.complex64),
    "scalar": np.float32(3),
    "empty": np.ones((0, 4), np.float32),
    "a tree": {"a": np.ones(2, np.float32), "b": (np.ones(3, np.int8), None)},
}


def seen_inside(transform, *args, **kwargs):
    keys = []

    def function(*args):
        keys.append(key(*args, **kwargs))
        return jax.tree.map(jnp.asarray, args)

    transform(function)(*args)
    assert len(keys) >= 1
    return keys[0]


@pytest.mark.parametrize("what", ARGUMENTS)
def test_numpy_jax_and_abstract_arguments_and_tracers_have_one_key(what):
    numpy = ARGUMENTS[what]
    concrete = jax.tree.map(jnp.asarray, numpy)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), concrete)
    keys = {
        "numpy": key(numpy),
        "concrete": key(concrete),
        "abstract": key(abstract),
        "numpy in jit": seen_inside(jax.jit, numpy),
        "concrete in jit": seen_inside(jax.jit, concrete),
        "eval_shape": seen_inside(lambda f: functools.partial(jax.eval_shape, f), abstract),
    }
    assert len(set(keys.values())) == 1, keys


def test_an_abstract_argument_of_a_dtype_that_jax_narrows_has_the_key_of_the_array():
    for dtype in (np.float64, np.int64, np.uint64, np.complex128):
        assert key(jax.ShapeDtypeStruct((2,), dtype)) == key(np.ones(2, dtype)), dtype


@pytest.mark.parametrize("value", [3, 2.5, True, 1j, np.float64(2), np.int64(2), np.bool_(True)])
def test_scalars_have_one_key_outside_and_inside_jit(value):
    assert key(value) == seen_inside(jax.jit, value)
    assert key(value) == key(jnp.asarray(value) if isinstance(value, np.generic) else value)


def test_random_keys_have_one_key_outside_and_inside_jit():
    assert key(jax.random.key(0)) == key(jax.random.key(1))
    assert key(jax.random.key(0)) == seen_inside(jax.jit, jax.random.key(0))


def test_weak_types_survive_tracing():
    weak = jnp.asarray(1.0)
    assert key(weak) == seen_inside(jax.jit, weak)
    assert key(weak) == key(jax.ShapeDtypeStruct((), jnp.float32, weak_type=True))


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))]
)
def test_transforms_that_keep_shapes_keep_the_key(transform):
    assert seen_inside(transform, X) == key(X)


def test_inside_grad_the_key_is_the_same():
    keys = []

    def function(x):
        keys.append(key(x, mode="a"))
        return x.sum()

    jax.grad(function)(X)
    jax.jit(jax.grad(function))(X)
    assert set(keys) == {key(X, mode="a")}


def test_inside_vmap_the_key_is_that_of_one_example():
    assert seen_inside(jax.vmap, jnp.ones((5, 2, 3))) == key(X)


def test_inside_scan_the_key_is_that_of_one_step():
    keys = []

    def step(carry, x):
        keys.append(key(x))
        return carry, x

    jax.lax.scan(step, 0.0, jnp.ones((4, 2, 3)))
    assert set(keys) == {key(X)}


def test_with_explicit_axes_the_sharding_is_in_the_key_and_tracers_agree():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jnp.ones((8, 8))
    rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d", None)))
    columns = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "d")))
    assert len({key(x), key(rows), key(columns)}) == 3
    assert seen_inside(jax.jit, rows) == key(rows)


def test_with_automatic_axes_the_sharding_is_not_in_the_key():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((8, 8))
    sharding = NamedSharding(mesh, PartitionSpec("d", None))
    rows = jax.device_put(x, sharding)
    assert key(rows) == key(x) == seen_inside(jax.jit, rows)
    assert key(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)) == key(rows)


def test_an_abstract_argument_with_the_sharding_of_an_array_has_its_key():
    x = jnp.ones((8, 8))
    assert key(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)) == key(x)


OTHER_PROCESS = """
import dataclasses, enum, functools
import jax, jax.numpy as jnp, numpy as np
from ejkernel.ops import BatchAxes, Invocation

class Mode(enum.Enum):
    FAST = 1

@dataclasses.dataclass(frozen=True)
class Option:
    names: frozenset
    dtype: object

def adder(n):
    return lambda x: x + n

def member(x, kind):
    return x if kind in {"alpha", "beta", "gamma", "delta", "epsilon"} else -x

x = jnp.ones((2, 3))
values = [
    None, "text", 1, 1.5, float("nan"), (1, "a", None), Mode.FAST, jnp.bfloat16, np.dtype("int8"),
    frozenset({"alpha", "beta", "gamma", "delta"}), {"b": 1, "a": {"z", "y", "x", "w"}},
    Option(frozenset({"p", "q", "r", "s"}), np.float32), jnp.tanh, jax.nn.relu, adder(3),
    functools.partial(jnp.sum, axis=0), jax.jit(adder(4)), member, lambda x: x in ("a", {1}),
]
for value in values:
    print(Invocation(op_id="op", args=({"w": x, "b": [x]}, 2.0), kwargs={"option": value}).call_key)
print(Invocation(op_id="op", args=(x,), batch_axes=BatchAxes("vmap", (0, None), 4)).call_key)
"""


def test_keys_are_the_same_in_processes_with_other_hash_seeds(tmp_path):
    script = tmp_path / "keys.py"
    script.write_text(OTHER_PROCESS)
    running = []
    for seed in ("1", "2", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()}
        running.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = []
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        outputs.append(output.split())
    assert len(outputs[0]) == 20
    different = [i for i, keys in enumerate(zip(*outputs, strict=True)) if len(set(keys)) > 1]
    assert different == [], "these values have keys that depend on the process"


# --- make_key and key builders -------------------------------------------------------------------


def test_make_key_without_a_builder_is_the_call_key():
    inv = Add().bind(X)
    assert inv.make_key() == inv.call_key
    assert Invocation(op_id="add", args=(X,)).make_key() == inv.call_key


def test_make_key_with_a_builder_is_what_the_builder_says():
    inv = Add().bind(X)
    assert inv.make_key(lambda inv: f"rank-{inv.args[0].ndim}") == "rank-2"
    assert inv.make_key(key_builder=lambda inv: "0123456789abcdef") == "0123456789abcdef"


def by_rank(inv):
    return f"rank-{inv.args[0].ndim}"


class BuilderMethod(Add):
    def key_builder(self, inv):
        return by_rank(inv)


class BuilderFunction(Add):
    key_builder = by_rank


class BuilderStatic(Add):
    key_builder = staticmethod(by_rank)


def test_a_kernel_may_bring_its_own_key_builder_in_any_form():
    on_the_instance = Add()
    on_the_instance.key_builder = by_rank
    for kernel in (BuilderMethod(), BuilderStatic(), on_the_instance, BuilderFunction()):
        one, other = kernel.bind(jnp.ones((2, 3))), kernel.bind(jnp.ones((4, 5)))
        assert one.make_key() == other.make_key() == "rank-2"
        assert one.key == other.key != kernel.bind(jnp.ones(2)).key
        assert re.fullmatch(r"[0-9a-f]{16}", one.key.call_key)


def test_a_builder_given_to_make_key_comes_before_the_kernels_own():
    assert BuilderMethod().bind(X).make_key(lambda inv: "mine") == "mine"


def test_the_sharding_key_builder_serves_as_a_kernels_builder_and_in_both_call_forms():
    class Sharded(Add):
        key_builder = default_key_builder_with_sharding

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((8, 8))
    rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    kernel = Add()
    keys = [
        (
            default_key_builder_with_sharding(kernel, (a,), {}),
            default_key_builder_with_sharding(kernel.bind(a)),
            kernel.bind(a).make_key(default_key_builder_with_sharding),
            Sharded().bind(a).make_key(),
        )
        for a in (x, rows)
    ]
    assert len(set(keys[0])) == len(set(keys[1])) == 1
    assert keys[0][0] != keys[1][0]


# --- properties ----------------------------------------------------------------------------------

DTYPES = st.sampled_from(["float32", "bfloat16", "int8", "int32", "bool", "float16"])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
LEAVES = st.tuples(SHAPES, DTYPES)
TREES = st.recursive(
    LEAVES.map(lambda leaf: ("leaf", leaf)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda items: ("list", items)),
        st.lists(inner, max_size=2).map(lambda items: ("tuple", items)),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(lambda d: ("dict", d)),
    ),
    max_leaves=4,
)
STATIC = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)
quick = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def build(tree, make):
    kind, content = tree
    if kind == "leaf":
        return make(*content)
    if kind == "dict":
        return {name: build(item, make) for name, item in content.items()}
    return (list if kind == "list" else tuple)(build(item, make) for item in content)


def zeros(shape, dtype):
    return np.zeros(shape, jnp.dtype(dtype))


def ones(shape, dtype):
    return np.ones(shape, jnp.dtype(dtype))


def abstract(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@quick
@given(TREES, st.dictionaries(st.sampled_from(["m", "n"]), STATIC))
def test_the_key_depends_on_nothing_but_the_abstract_call(tree, static):
    keys = {key(build(tree, make), **static) for make in (zeros, ones, abstract)}
    reordered = dict(reversed(list(static.items())))
    keys.add(key(build(tree, ones), **reordered))
    assert len(keys) == 1


@quick
@given(TREES, TREES)
def test_two_abstract_calls_share_a_key_only_if_they_are_equal(one, other):
    first, second = build(one, abstract), build(other, abstract)
    same = jax.tree.structure(first) == jax.tree.structure(second) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=False)
    )
    assert (key(first) == key(second)) == same


@quick
@given(STATIC, STATIC)
def test_two_static_values_share_a_key_only_if_they_are_written_alike(one, other):
    assert (key(X, option=one) == key(X, option=other)) == (repr(one) == repr(other))
