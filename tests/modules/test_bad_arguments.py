"""Bad arguments of every operation, made from its signature: refused by name, or served rightly.

An operation that is added is walked through too, once `config_calls.CALLS` has a call of it.
"""

from __future__ import annotations

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_calls import CALLS, normal

from ejkernel import modules
from ejkernel.modules import OPERATIONS

NAN, INF = float("nan"), float("inf")

# What is no array wherever one is expected, and no number, name or flag either.
NEITHER = [object(), object, {"a": 1}, {1}, lambda: 0, b"bytes", ..., 1j, (None,)]
NO_ARRAYS = [*NEITHER, "text", "", [1.0, 2.0], [[1.0]], (1.0, 2.0), [], 3, 3.0, True, NAN]
ODD_ARRAYS = [
    jnp.float32(1.0),
    np.float32(1.0),
    jnp.zeros(0),
    jnp.zeros((1,) * 9),
    jnp.zeros((3, 0, 5)),
    jnp.zeros((7, 11), jnp.complex64),
    jnp.zeros((7, 11), bool),
    jnp.zeros((7, 11), jnp.int8),
    np.array(["a", "b"]),
    np.array([None, 1]),
    np.array(["2020-01-01"], "datetime64[D]"),
    np.zeros(3, [("a", "f4")]),
    np.ma.masked_array(np.ones(3), mask=[0, 1, 0]),
    jax.random.key(0),
]
NO_NUMBERS = [*NEITHER, "text", "1.0", "", [1.0], (1.0,), True, np.True_, NAN, INF, -INF, 1e39]
NO_NUMBERS += [
    -1e300,
    10**400,
    np.float32(NAN),
    np.array([1.0]),
    jnp.ones(2),
    jnp.float32(INF),
    jnp.float32(1),
]
MAYBE_NUMBERS = [-1, -1e-30, 0, 0.0, 1, 2.5, 1e30, np.float32(0.5), np.int64(1), np.float64(0.5)]
NO_FLAGS = [*NEITHER, "True", "", 2, -1, 0.5, NAN, [True], jnp.ones(2, bool), np.array([True])]
NO_CHOICES = [*NEITHER, "no such name", "", "SILU ", 3, 2.5, True, ["mean"], jnp.ones(3), NAN]
NO_INTEGERS = [*NEITHER, "3", "", 2.5, NAN, INF, [3], (), (1, 2, 3), True, np.ones(3), 1e9]
MAYBE_INTEGERS = [-(2**70), -(2**31) - 1, -1, 0, 1, 2**31, 2**63, 2**70, np.int8(3), np.uint64(3)]
NO_CONFIGS = [*NEITHER, "text", 3, 2.5, True, [1], jnp.ones(3)]


def parameters(name):
    return inspect.signature(getattr(modules, name)).parameters.values()


def kind_of(parameter):
    text = str(parameter.annotation)
    for kind, mark in (
        ("config", "Config"),
        ("dtype", "DTypeLike"),
        ("choice", "str"),
        ("choice", "Literal"),
        ("flag", "bool"),
        ("number", "float"),
    ):
        if mark in text:
            return kind
    if "Array" in text and "int" in text:
        return "offset"
    if "Array" in text:
        return "array"
    assert "int" in text, text
    return "integer"


SURE = {
    "array": NO_ARRAYS,
    "number": NO_NUMBERS,
    "flag": NO_FLAGS,
    "choice": NO_CHOICES,
    "integer": NO_INTEGERS,
    "offset": [*NEITHER, "3", 2.5, NAN, [3], True, jnp.ones(()), np.zeros(3, int)],
    "config": NO_CONFIGS,
    "dtype": [*NEITHER, "no such dtype", 3, "int32", jnp.complex64, bool, [1], jnp.ones(3)],
}
MAYBE = {
    "array": ODD_ARRAYS,
    "number": MAYBE_NUMBERS,
    "integer": MAYBE_INTEGERS,
    "offset": [-1, 2**40, np.int64(0), jnp.int32(0)],
}


def bound(name):
    """The arguments of a good call, by name."""
    args, kwargs, _ = CALLS[name]()
    given = inspect.signature(getattr(modules, name)).bind(*args, **kwargs)
    return dict(given.arguments)


def call(name, arguments):
    """What the operation gives, traced: constants are known as in a call, and nothing compiles."""
    return jax.eval_shape(lambda: getattr(modules, name)(**arguments))


def refused(name, argument, arguments, also=()):
    """True if a call is refused with an error that is clear; False if it is served."""
    try:
        call(name, arguments)
    except (TypeError, ValueError) as error:
        text = str(error)
        named = any(word in text for word in (argument, *also))
        if not (
            name in text and named and text.startswith((name, f"kernel {name}", "impl", "no "))
        ):
            given = arguments[argument]
            pytest.fail(f"{name}({argument}={given!r}): {type(error).__name__}: {text[:400]}")
        return True
    except Exception as error:  # noqa: BLE001
        given = arguments[argument]
        pytest.fail(f"{name}({argument}={given!r}): {type(error).__name__}: {str(error)[:400]}")
    return False


CASES = [(name, parameter.name) for name in OPERATIONS for parameter in parameters(name)]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_what_can_never_be_is_refused_by_name(name, argument):
    (parameter,) = [p for p in parameters(name) if p.name == argument]
    values = list(SURE[kind_of(parameter)])
    if parameter.default is not None:
        values.append(None)
    served = []
    for value in values:
        if not refused(name, argument, {**bound(name), argument: value}):
            served.append(value)
    assert not served, f"{name} takes {argument}={served!r}"


@pytest.mark.long
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_what_may_be_is_served_or_refused_by_name(name, argument):
    (parameter,) = [p for p in parameters(name) if p.name == argument]
    good = bound(name)
    values = list(MAYBE.get(kind_of(parameter), []))
    if kind_of(parameter) == "array" and argument in good:
        values += variants(good[argument])
    for value in values:
        refused(name, argument, {**good, argument: value}, also=set(good))


def variants(array):
    """Arrays of other ranks, sizes and dtypes than a good one."""
    yield array[None]
    yield array[0]
    for axis in range(array.ndim):
        yield jnp.concatenate([array, array], axis)
        yield array.sum(axis)
        yield jnp.take(array, jnp.zeros(0, int), axis)
        yield jnp.take(array, jnp.zeros(1, int), axis)
    if array.ndim > 1:
        yield array.T
    for dtype in (
        *("int8", "uint8", "int32", "uint32", "bool", "complex64"),
        *("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int4"),
    ):
        yield array.astype(dtype)
    yield np.asarray(array)
    yield np.asarray(array).astype(np.int64)
    yield np.asarray(array).astype(np.float64)
    yield np.asarray(array).astype(object)
    yield np.asarray(array).astype(str)


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_tracer_where_a_constant_belongs_is_refused_by_name(name, argument):
    (parameter,) = [p for p in parameters(name) if p.name == argument]
    if kind_of(parameter) in ("array", "offset"):
        pytest.skip("arrays may be traced")
    good = bound(name)

    def traced(value):
        refused_here.append(refused(name, argument, {**good, argument: value}))
        return value

    for value in (1.0, 1, True):
        refused_here = []
        jax.eval_shape(traced, value)
        assert refused_here == [True], f"{name} takes a tracer as {argument}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_numpy_arrays_and_scalars_are_taken_as_jax_takes_them(name):
    operation = getattr(modules, name)
    good = bound(name)
    wanted = jax.tree.leaves(operation(**good))
    for wide in (False, True):
        plain = {}
        for argument, value in good.items():
            if isinstance(value, jax.Array):
                value = np.asarray(value)
                if wide:  # what NumPy makes by itself; JAX narrows it unless x64 is on
                    value = value.astype(np.float64 if value.dtype.kind == "f" else np.int64)
            plain[argument] = value
        for got, right in zip(jax.tree.leaves(operation(**plain)), wanted, strict=True):
            assert got.dtype == right.dtype
            np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_of_numpy_are_numbers(name):
    good = bound(name)
    for parameter in parameters(name):
        if kind_of(parameter) != "number":
            continue
        number = 0.5
        shapes = [
            call(name, {**good, parameter.name: kind(number), **key})
            for kind in (float, np.float32, np.float64, np.asarray)
            for key in [{"dropout_key": jax.random.key(0)} if "dropout" in parameter.name else {}]
        ]
        assert len({str(shape) for shape in shapes}) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_at_the_edge_is_refused_or_gives_numbers(name):
    """In float32 some are 0, 1 or not even normal, and what is divided by them is no number."""
    good = bound(name)
    key = {"dropout_key": jax.random.key(0)} if name == "flash_attention" else {}
    for parameter in parameters(name):
        if kind_of(parameter) != "number":
            continue
        for value in (0, 1e-46, 1e-40, 1 - 1e-12, 1e4, -1e4):
            arguments = {**good, **key, parameter.name: value}
            if refused(name, parameter.name, arguments):
                continue
            for leaf in jax.tree.leaves(getattr(modules, name)(**arguments)):
                assert np.isfinite(np.asarray(leaf)).all(), f"{name}({parameter.name}={value})"


def test_integers_of_numpy_that_do_not_fit_are_refused_and_do_not_wrap():
    good = bound("linear_cross_entropy")
    labels = np.asarray(good["labels"]).astype(np.int64)
    labels[0] = 2**32  # wraps to a real label
    with pytest.raises(ValueError, match=r"linear_cross_entropy: labels.*4294967296"):
        call("linear_cross_entropy", {**good, "labels": labels})


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """What flax calls a variable."""

    value: jax.Array

    def __jax_array__(self):
        return self.value


def test_what_says_that_it_is_a_jax_array_is_one():
    x = normal(0, 4, 8)
    np.testing.assert_array_equal(modules.rms_norm(Wrapped(x)), modules.rms_norm(x))
