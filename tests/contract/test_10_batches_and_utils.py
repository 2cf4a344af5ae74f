"""SPEC 10: batches with one config, parameter classes, fingerprints and serialisation."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import (
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    Tuner,
    abstractify,
    default_key_builder_with_sharding,
    device_fingerprint,
    device_kind,
    from_json,
    get_device_platform,
    get_invocations,
    overlay_cache,
    pmap_with_config,
    set_default_executor,
    sharding_fingerprint,
    short_hash,
    stable_json,
    to_json,
    vmap_with_config,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Factor:
    factor: float = 1.0


class Product(Kernel[Factor, jax.Array]):
    """A matrix product whose output shows the config's factor."""

    def run(self, a, b, *, cfg, shift=0.0):
        return (a @ b) * cfg.factor + shift

    def candidate_cfgs(self, inv):
        return [Factor(1.0), Factor(3.0)]


class ProductWithRule(Product):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        (a, b), (dout,) = primals, cotangents
        return dout @ b.T * cfg.factor, a.T @ dout * cfg.factor


class ProductWithResiduals(Product):
    def fwd_with_residuals(self, a, b, *, cfg, shift=0.0):
        return (a @ b) * cfg.factor + shift, (a, b)

    def vjp(self, residuals, out, dout, a, b, *, cfg, shift=0.0):
        a, b = residuals
        return dout @ b.T * cfg.factor, a.T @ dout * cfg.factor


class Tree(Kernel[Factor, jax.Array]):
    """Takes a dict and a tuple."""

    def run(self, weights, pair, *, cfg):
        return (weights["a"] + weights["b"] * pair[0] - pair[1]) * cfg.factor

    def candidate_cfgs(self, inv):
        return [Factor(1.0), Factor(3.0)]


class Events(list):
    def __call__(self, event, **data):
        self.append((event, data))

    def count_of(self, *events):
        return sum(name in events for name, _ in self)


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def executor(events):
    """Heuristics only; every selection is one event."""
    return Executor(ConfigSelectorChain(ConfigCache(), autotune=False, on_event=events))


def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


# Expected values are computed by NumPy; kernels receive JAX's arrays.
A, B = numbers(3, 2, 4), numbers(3, 4, 5)
JA, JB = jnp.asarray(A), jnp.asarray(B)
MAPPERS = [vmap_with_config, pmap_with_config]
KINDS = [Product, ProductWithRule, ProductWithResiduals]


@pytest.fixture
def product():
    return Product("product")


def looped(a, b):
    return np.stack([x @ y for x, y in zip(a, b, strict=True)])


# --- vmap_with_config: values ---------------------------------------------------------------------


def test_the_documented_call_equals_a_loop(product):
    out = vmap_with_config(product, in_axes=(0, 0))(A, B)
    np.testing.assert_allclose(out, looped(A, B), rtol=1e-5, atol=1e-6)


def test_an_executor_may_come_first(product, executor, events):
    out = vmap_with_config(executor, product, in_axes=(0, 0))(A, B)
    np.testing.assert_allclose(out, looped(A, B), rtol=1e-5, atol=1e-6)
    assert events.count_of("heuristics") == 1


def test_the_first_axis_is_the_default(product):
    np.testing.assert_allclose(vmap_with_config(product)(A, B), looped(A, B), rtol=1e-5, atol=1e-6)


AXES = {
    "an integer": (0, A, B),
    "a tuple": ((0, 0), A, B),
    "a list": ([0, 0], A, B),
    "not mapped": ((0, None), A, np.stack([B[0]] * 3)),
    "first not mapped": ((None, 0), np.stack([A[0]] * 3), B),
    "last axis": ((2, 1), A, B),
    "negative axes": ((-1, -2), A, B),
    "negative integer": (-1, A, B),
}


def as_given(array, axis):
    """The batched array as a caller with this axis would pass it."""
    return jnp.asarray(array[0] if axis is None else np.moveaxis(array, 0, axis))


@pytest.mark.parametrize("case", AXES)
def test_every_form_of_in_axes_equals_a_loop(case, product):
    in_axes, a, b = AXES[case]
    axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes, in_axes)
    given = [as_given(array, axis) for array, axis in zip((a, b), axes, strict=True)]
    out = vmap_with_config(product, in_axes=in_axes)(*given)
    np.testing.assert_allclose(out, looped(a, b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1])
def test_out_axes_place_the_batch(out_axes, product):
    out = vmap_with_config(product, in_axes=(0, 0), out_axes=out_axes)(A, B)
    np.testing.assert_allclose(out, np.moveaxis(looped(A, B), 0, out_axes), rtol=1e-5, atol=1e-6)


TREES = {
    "one integer": (0, {"a": 0, "b": 0}, (0, 0)),
    "one per argument": ((0, 0), {"a": 0, "b": 0}, (0, 0)),
    "a dict": (({"a": 0, "b": 1}, 0), {"a": 0, "b": 1}, (0, 0)),
    "a dict with None last": (({"a": 0, "b": None}, 0), {"a": 0, "b": None}, (0, 0)),
    "a dict with None first": (({"a": None, "b": 0}, 0), {"a": None, "b": 0}, (0, 0)),
    "a tuple with None": ((0, (None, 0)), {"a": 0, "b": 0}, (None, 0)),
    "None and a tuple": ((None, (1, None)), {"a": None, "b": None}, (1, None)),
}


def tree_arguments(dict_axes, tuple_axes):
    arrays = [numbers(3, 7), numbers(3, 7) + 1, numbers(3, 7) + 2, numbers(3, 7) + 3]
    axes = [dict_axes["a"], dict_axes["b"], *tuple_axes]
    same = [
        np.stack([x[0]] * 3) if axis is None else x for x, axis in zip(arrays, axes, strict=True)
    ]
    a, b, c, d = (as_given(x, axis) for x, axis in zip(same, axes, strict=True))
    return ({"a": a, "b": b}, (c, d)), same[0] + same[1] * same[2] - same[3]


@pytest.mark.parametrize("case", TREES)
def test_pytree_axes_equal_a_loop(case):
    in_axes, *axes = TREES[case]
    args, expected = tree_arguments(*axes)
    out = vmap_with_config(Tree("tree"), in_axes=in_axes)(*args)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", TREES)
def test_a_batch_over_pytrees_knows_its_size(case, executor):
    in_axes, *axes = TREES[case]
    args, _ = tree_arguments(*axes)
    vmap_with_config(executor, Tree("tree"), in_axes=in_axes)(*args)
    (recorded,) = get_invocations()
    assert recorded.batch_axes.size == 3


@pytest.mark.parametrize("case", TREES)
def test_a_batch_over_pytrees_can_be_tuned(case, events):
    seen = []

    class Watching(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            seen.append(jax.eval_shape(make_fn(candidates[0]), *args, **kwargs).shape)
            return candidates[-1]

    in_axes, *axes = TREES[case]
    args, expected = tree_arguments(*axes)
    tuning = Executor(ConfigSelectorChain(ConfigCache(), tuner=Watching(), on_event=events))
    out = vmap_with_config(tuning, Tree("tree"), in_axes=in_axes)(*args)
    np.testing.assert_allclose(out, expected * 3.0, rtol=1e-5, atol=1e-6)
    assert seen == [(3, 7)]
    assert events.count_of("error") == 0


def test_a_prefix_of_a_pytree_serves_as_its_axes(executor):
    class Nested(Kernel[Factor, jax.Array]):
        def run(self, pair, *, cfg):
            return pair[0]["x"] + pair[0]["y"] * pair[1]

    class First(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            jax.eval_shape(make_fn(candidates[0]), *args, **kwargs)
            return candidates[0]

    x, y, z = numbers(3, 2), numbers(3, 2) + 1, numbers(2)
    kernel = Nested("nested")
    for chosen in (executor, Executor(ConfigSelectorChain(ConfigCache(), tuner=First()))):
        out = vmap_with_config(chosen, kernel, in_axes=((0, None),))(({"x": x, "y": y}, z))
        np.testing.assert_allclose(out, x + y * z, rtol=1e-6)


def test_a_config_may_be_given_with_the_call(product, executor, events):
    mapped = vmap_with_config(executor, product, in_axes=(0, 0))
    np.testing.assert_allclose(
        mapped(A, B, cfg=Factor(5.0)), looped(A, B) * 5, rtol=1e-5, atol=1e-6
    )
    assert events.count_of("override") == 1
    assert events.count_of("heuristics") == 0


def test_a_config_of_another_class_is_refused(product):
    with pytest.raises(TypeError, match="product@v1"):
        vmap_with_config(product)(A, B, cfg="large")


def test_keywords_are_passed_on_and_not_mapped(product):
    mapped = vmap_with_config(product, in_axes=(0, 0))
    np.testing.assert_allclose(mapped(A, B, shift=2.0), looped(A, B) + 2.0, rtol=1e-5, atol=1e-6)
    shift = jnp.asarray(numbers(2, 5))
    expected = looped(A, B) + np.asarray(shift)
    np.testing.assert_allclose(mapped(A, B, shift=shift), expected, rtol=1e-5, atol=1e-6)


def test_it_works_inside_jit_scan_and_another_vmap(product):
    mapped = vmap_with_config(product, in_axes=(0, 0))
    np.testing.assert_allclose(jax.jit(mapped)(A, B), looped(A, B), rtol=1e-5, atol=1e-6)
    twice = jax.vmap(mapped)(np.stack([A, A]), np.stack([B, B]))
    np.testing.assert_allclose(twice[1], looped(A, B), rtol=1e-5, atol=1e-6)
    _, outs = jax.lax.scan(lambda c, ab: (c, mapped(*ab)), 0, (A[None], B[None]))
    np.testing.assert_allclose(outs[0], looped(A, B), rtol=1e-5, atol=1e-6)


def test_numpy_arrays_are_taken(product):
    assert isinstance(A, np.ndarray)
    out = vmap_with_config(product)(A, B)
    np.testing.assert_allclose(out, looped(A, B), rtol=1e-5, atol=1e-6)


def test_a_batch_of_one_works(product):
    np.testing.assert_allclose(
        vmap_with_config(product)(A[:1], B[:1]), A[:1] @ B[:1], rtol=1e-5, atol=1e-6
    )


def loop_gradients(weights, a, b, in_axes):
    """Gradients of `sum(weights * (a @ b))`; those of what is not mapped are sums."""
    da = np.stack([w @ y.T for w, y in zip(weights, b, strict=True)])
    db = np.stack([x.T @ w for w, x in zip(weights, a, strict=True)])
    pairs = zip((da, db), in_axes, strict=True)
    return [d if axis == 0 else d.sum(0) for d, axis in pairs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_gradients_through_a_batch_equal_those_of_a_loop(kind, in_axes):
    kernel, weights = kind("product"), numbers(3, 2, 5)
    full = [
        x if axis == 0 else np.stack([x[0]] * 3) for x, axis in zip((A, B), in_axes, strict=True)
    ]
    given = [as_given(x, axis) for x, axis in zip(full, in_axes, strict=True)]

    def mapped(a, b):
        return jnp.sum(weights * vmap_with_config(kernel, in_axes=in_axes)(a, b, cfg=Factor(2.0)))

    got = jax.jit(jax.grad(mapped, (0, 1)))(*given)
    for one, other in zip(got, loop_gradients(weights, *full, in_axes), strict=True):
        np.testing.assert_allclose(one, other * 2.0, rtol=1e-4, atol=1e-5)


# --- vmap_with_config: selection ------------------------------------------------------------------


def test_one_selection_serves_the_whole_batch(product, executor, events):
    vmap_with_config(executor, product, in_axes=(0, 0))(A, B)
    assert len(events) == 1


def test_a_batch_has_a_key_of_its_own(product, executor, events):
    executor(product, A[0], B[0])
    vmap_with_config(executor, product, in_axes=(0, 0))(A, B)
    vmap_with_config(executor, product, in_axes=(0, 0))(A[:2], B[:2])
    vmap_with_config(executor, product, in_axes=(0, None))(A, B[0])
    keys = [data["call_key"] for _, data in events]
    assert keys[0] == product.bind(A[0], B[0]).call_key
    assert len(set(keys)) == len(keys) == 4


def test_the_same_batch_written_in_two_ways_has_one_key(product, executor, events):
    for in_axes in (0, (0, 0), [0, 0]):
        vmap_with_config(executor, product, in_axes=in_axes)(A, B)
    assert len({data["call_key"] for _, data in events}) == 1


def test_a_config_put_under_the_batchs_key_serves_the_batch_alone(product, executor, events):
    mapped = vmap_with_config(executor, product, in_axes=(0, 0))
    mapped(A, B)
    (_, data) = events[0]
    key = (data["device"], data["op_id"], data["call_key"])
    executor.selector.cache.put(*key, Factor(4.0))
    np.testing.assert_allclose(mapped(A, B), looped(A, B) * 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(executor(product, A[0], B[0]), A[0] @ B[0], rtol=1e-5, atol=1e-6)


def test_an_overlay_serves_a_batch(product):
    with overlay_cache({"product": Factor(4.0)}):
        out = vmap_with_config(product)(A, B)
    np.testing.assert_allclose(out, looped(A, B) * 4, rtol=1e-5, atol=1e-6)


def test_tuning_a_batch_measures_the_batch(product, events):
    shapes = []

    class Watching(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            out = jax.eval_shape(make_fn(candidates[0]), *args, **kwargs)
            shapes.append(([arg.shape for arg in args], out.shape))
            return candidates[-1]

    tuning = Executor(ConfigSelectorChain(ConfigCache(), tuner=Watching(), on_event=events))
    out = vmap_with_config(tuning, product, in_axes=(0, None))(A, B[0])
    assert shapes == [([(3, 2, 4), (4, 5)], (3, 2, 5))]
    assert events.count_of("autotune_start") == 1
    np.testing.assert_allclose(out, looped(A, np.stack([B[0]] * 3)) * 3.0, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", AXES)
def test_every_form_of_in_axes_can_be_tuned_for_real(case, events):
    class Honest(Product):
        def run(self, a, b, *, cfg):
            return a @ b

    in_axes, a, b = AXES[case]
    axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes, in_axes)
    given = [as_given(array, axis) for array, axis in zip((a, b), axes, strict=True)]
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(warmup=0, iters=1), on_event=events)
    out = vmap_with_config(Executor(selector), Honest("honest"), in_axes=in_axes)(*given)
    np.testing.assert_allclose(out, looped(a, b), rtol=1e-5, atol=1e-6)
    assert events.count_of("error") == 0
    assert events.count_of("autotune_finish") == 1


def test_a_batch_is_tuned_once(product, events):
    class First(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            return candidates[0]

    tuning = Executor(ConfigSelectorChain(ConfigCache(), tuner=First(), on_event=events))
    for _ in range(3):
        vmap_with_config(tuning, product, in_axes=(0, 0))(A, B)
    assert events.count_of("autotune_start") == 1


def test_the_default_executor_at_the_time_of_the_call_is_used(product, executor, events):
    mapped = vmap_with_config(product)
    set_default_executor(executor)
    mapped(A, B)
    assert events.count_of("heuristics") == 1


@pytest.mark.parametrize(
    ("in_axes", "args"),
    [
        ((0,), (A, B)),
        ((0, 0, 0), (A, B)),
        ((None, None), (A[0], B[0])),
        (None, (A[0], B[0])),
        ((7, 0), (A, B)),
        ((-4, 0), (A, B)),
        ((0, 0), (A, B[:2])),
        ("rows", (A, B)),
        ((0, "rows"), (A, B)),
        ((0.5, 0), (A, B)),
        ((0, 0), (2.0, B)),
        ((0, {"a": 0}), (A, B)),
    ],
    ids=[
        *("too few", "too many", "nothing mapped", "None", "axis too large", "axis too small"),
        *("different sizes", "text", "text inside", "fraction", "a number mapped", "structure"),
    ],
)
@pytest.mark.parametrize("mapper", MAPPERS)
def test_bad_in_axes_name_the_kernel(mapper, in_axes, args, product):
    with pytest.raises((ValueError, TypeError), match="product@v1"):
        mapper(product, in_axes=in_axes)(*args)


@pytest.mark.parametrize("mapper", MAPPERS)
@pytest.mark.parametrize("wrong", [(), (jnp.sin,), ("product",), (None, None), (1, 2, 3)])
def test_something_else_than_a_kernel_is_a_type_error(mapper, wrong):
    with pytest.raises(TypeError, match=mapper.__name__):
        mapper(*wrong)


def test_kernel_and_executor_in_the_wrong_order_is_a_type_error(product, executor):
    with pytest.raises(TypeError, match="executor, kernel"):
        vmap_with_config(product, executor)


# --- pmap_with_config -----------------------------------------------------------------------------


def test_the_documented_pmap_equals_a_loop(product):
    out = pmap_with_config(product, axis_name="devices")(A, B)
    np.testing.assert_allclose(out, looped(A, B), rtol=1e-5, atol=1e-6)


def test_pmap_takes_an_executor_and_selects_once(product, executor, events):
    out = pmap_with_config(executor, product)(A, B)
    np.testing.assert_allclose(out, looped(A, B), rtol=1e-5, atol=1e-6)
    assert len(events) == 1


@pytest.mark.parametrize("in_axes", [0, (0, 0), (0, None), (1, 0)])
def test_pmap_takes_in_axes(in_axes, product):
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes, in_axes)
    b = np.stack([B[0]] * 3) if axes[1] is None else B
    out = pmap_with_config(product, in_axes=in_axes)(as_given(A, axes[0]), as_given(b, axes[1]))
    np.testing.assert_allclose(out, looped(A, b), rtol=1e-5, atol=1e-6)


def test_pmap_takes_out_axes_a_config_and_keywords(product):
    mapped = pmap_with_config(product, axis_name="d", out_axes=1)
    out = mapped(A, B, cfg=Factor(2.0), shift=1.0)
    np.testing.assert_allclose(out, np.moveaxis(looped(A, B) * 2 + 1, 0, 1), rtol=1e-5, atol=1e-6)


def test_the_axis_name_of_pmap_is_seen_by_the_kernel():
    class Mean(Kernel[Factor, jax.Array]):
        def run(self, x, *, cfg):
            return jax.lax.pmean(x, "rows")

    x = numbers(4, 3)
    out = pmap_with_config(Mean("mean"), axis_name="rows")(x)
    np.testing.assert_allclose(out, np.tile(x.mean(0), (4, 1)), rtol=1e-5, atol=1e-6)


def test_pmap_has_a_key_of_its_own(product, executor, events):
    executor(product, A[0], B[0])
    vmap_with_config(executor, product)(A, B)
    pmap_with_config(executor, product)(A, B)
    pmap_with_config(executor, product)(A[:2], B[:2])
    assert len({data["call_key"] for _, data in events}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_pmap_equal_those_of_a_loop(kind):
    mapped, weights = pmap_with_config(kind("product")), numbers(3, 2, 5)
    got = jax.grad(lambda a, b: jnp.sum(weights * mapped(a, b)), (0, 1))(JA, JB)
    for one, other in zip(got, loop_gradients(weights, A, B, (0, 0)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mapper", MAPPERS)
def test_a_mapped_kernel_that_ran_before_selects_again_in_an_overlay(mapper, product):
    mapped = mapper(product)
    for _ in range(2):
        np.testing.assert_allclose(mapped(JA, JB), looped(A, B), rtol=1e-5, atol=1e-6)
        with overlay_cache({"product": Factor(4.0)}):
            np.testing.assert_allclose(mapped(JA, JB), looped(A, B) * 4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mapper", MAPPERS)
def test_a_mapped_kernel_that_ran_before_follows_the_default_executor(mapper, product, events):
    mapped = mapper(product)
    mapped(JA, JB)
    selector = ConfigSelectorChain(ConfigCache(), autotune=False, on_event=events)
    set_default_executor(Executor(selector))
    mapped(JA, JB)
    assert events.count_of("heuristics") == 1


@pytest.mark.parametrize("mapper", MAPPERS)
def test_a_mapped_kernel_is_traced_once_for_equal_calls(mapper, executor, events, product):
    mapped = mapper(executor, product)
    for _ in range(3):
        mapped(JA, JB)
    assert len(events) == 1


@pytest.mark.parametrize("mapper", MAPPERS)
def test_one_mapped_kernel_takes_different_shapes_configs_and_keywords(mapper, product):
    mapped = mapper(product)
    np.testing.assert_allclose(mapped(JA, JB), looped(A, B), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mapped(JA[:2], JB[:2]), looped(A[:2], B[:2]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        mapped(JA, JB, cfg=Factor(2.0)), looped(A, B) * 2, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(mapped(JA, JB, shift=1.0), looped(A, B) + 1, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        mapped(JA, JB, shift=jnp.ones(5)), looped(A, B) + 1, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(mapped(JA, JB), looped(A, B), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mapper", MAPPERS)
def test_one_mapped_kernel_takes_different_numbers_of_arguments(mapper):
    class Sum(Kernel[Factor, jax.Array]):
        def run(self, *args, cfg):
            return sum(args) * cfg.factor

    mapped, x = mapper(Sum("sum")), jnp.ones((2, 3))
    np.testing.assert_array_equal(mapped(x), x)
    np.testing.assert_array_equal(mapped(x, x), x * 2)
    np.testing.assert_array_equal(mapped(x), x)


@pytest.mark.parametrize("mapper", MAPPERS)
def test_a_static_keyword_that_is_not_hashable_names_the_kernel(mapper, product):
    with pytest.raises(TypeError, match=r"product@v1.*'shift'"):
        mapper(product)(JA, JB, shift=[1, 2])


def test_tuning_pmap_measures_what_one_device_sees(product, events):
    shapes = []

    class Watching(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            shapes.append([arg.shape for arg in args])
            return candidates[-1]

    tuning = Executor(ConfigSelectorChain(ConfigCache(), tuner=Watching(), on_event=events))
    out = pmap_with_config(tuning, product)(A, B)
    assert shapes == [[(2, 4), (4, 5)]]
    np.testing.assert_allclose(out, looped(A, B) * 3.0, rtol=1e-5, atol=1e-6)


# --- parameter classes ----------------------------------------------------------------------------


@pytest.mark.parametrize("params", [FwdParams, BwdParams])
def test_every_parameter_is_optional(params):
    empty = params()
    names = [field.name for field in dataclasses.fields(params)]
    assert {"q_blocksize", "kv_blocksize", "num_warps", "num_stages"} <= set(names)
    assert all(getattr(empty, name) is None for name in names)


@pytest.mark.parametrize("params", [FwdParams, BwdParams])
def test_parameters_are_frozen_hashable_values(params):
    one = params(q_blocksize=128, kv_blocksize=64, num_warps=4, num_stages=2)
    same = params(q_blocksize=128, kv_blocksize=64, num_warps=4, num_stages=2)
    assert one == same
    assert hash(one) == hash(same)
    assert one != params(q_blocksize=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.q_blocksize = 1
    with pytest.raises(TypeError):
        params(q_block=1)


def test_forward_and_backward_parameters_are_different_things():
    assert FwdParams(q_blocksize=1) != BwdParams(q_blocksize=1)
    assert stable_json(FwdParams(q_blocksize=1)) != stable_json(BwdParams(q_blocksize=1))


@pytest.mark.parametrize("params", [FwdParams, BwdParams])
def test_parameters_survive_json(params):
    one = params(q_blocksize=128, num_stages=2)
    assert from_json(to_json(one), params) == one


# --- devices --------------------------------------------------------------------------------------


def test_this_machine_is_a_cpu_that_xla_serves():
    assert device_kind() == "cpu"
    assert get_device_platform() == "xla"


@pytest.mark.parametrize(
    ("platform", "kind", "handled_by"),
    [
        ("cpu", "cpu", "xla"),
        ("gpu", "gpu", "triton"),
        ("cuda", "gpu", "triton"),
        ("rocm", "gpu", "triton"),
        ("tpu", "tpu", "pallas"),
    ],
)
def test_other_devices_have_their_kind_and_platform(platform, kind, handled_by):
    @dataclasses.dataclass(frozen=True)
    class Device:
        platform: str
        device_kind: str = "Some Device v9"

    device = Device(platform)
    assert device_kind(device) == kind
    assert get_device_platform(device) == handled_by
    assert device_fingerprint(device).startswith(kind)


def test_different_devices_have_different_fingerprints():
    @dataclasses.dataclass(frozen=True)
    class Device:
        device_kind: str
        platform: str = "gpu"
        compute_capability: str = "9.0"

    assert device_fingerprint(Device("H100")) == device_fingerprint(Device("H100"))
    assert device_fingerprint(Device("H100")) != device_fingerprint(Device("A100"))
    tpu = dataclasses.replace(Device("H100"), platform="tpu")
    assert device_fingerprint(Device("H100")) != device_fingerprint(tpu)


def test_the_fingerprint_is_one_line_that_names_the_cpu():
    fingerprint = device_fingerprint()
    assert re.fullmatch(r"\S+", fingerprint)
    assert fingerprint.startswith("cpu|")
    assert fingerprint != "cpu|cpu"


def test_all_devices_of_one_kind_have_one_fingerprint():
    assert {device_fingerprint(device) for device in jax.devices()} == {device_fingerprint()}


def test_the_fingerprint_and_keys_are_the_same_in_another_process():
    source = """
        import os
        os.environ.pop("XLA_FLAGS", None)
        import jax.numpy as jnp
        from ejkernel.ops import Invocation, device_fingerprint, short_hash, stable_json
        inv = Invocation(op_id="f", args=({"b": jnp.ones(3), "a": jnp.ones(2)},), kwargs={"n": 1})
        print(device_fingerprint())
        print(inv.call_key)
        print(stable_json({"set": {"b", "a", "c"}, "f": jnp.float32, "t": (1, 2.5)}))
        print(short_hash(["x", None]))
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    arguments = ({"b": jnp.ones(3), "a": jnp.ones(2)},)
    assert done.stdout.splitlines() == [
        device_fingerprint(),
        Invocation(op_id="f", args=arguments, kwargs={"n": 1}).call_key,
        stable_json({"set": {"b", "a", "c"}, "f": jnp.float32, "t": (1, 2.5)}),
        short_hash(["x", None]),
    ]


def test_the_default_device_decides():
    other = jax.devices()[3]
    with jax.default_device(other):
        assert device_kind() == "cpu"
        assert device_fingerprint() == device_fingerprint(other)
    with jax.default_device("cpu"):
        assert device_kind() == "cpu"


# --- shardings ------------------------------------------------------------------------------------


def mesh(shape, names, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def placed(array, shape, names, spec, kind=AxisType.Auto):
    return jax.device_put(array, NamedSharding(mesh(shape, names, kind), spec))


SQUARE = np.ones((8, 8), np.float32)


def test_what_has_no_sharding_says_so():
    none = sharding_fingerprint(np.ones(3))
    assert none == sharding_fingerprint(2.0)
    assert none != sharding_fingerprint(placed(SQUARE, (4,), ("x",), P("x")))


def test_one_device_is_like_another():
    first, second = (jax.device_put(SQUARE, device) for device in jax.devices()[:2])
    assert sharding_fingerprint(first) == sharding_fingerprint(second)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_different_named_shardings_have_different_fingerprints(kind):
    arrays = [
        placed(SQUARE, (4,), ("x",), P("x"), kind),
        placed(SQUARE, (4,), ("x",), P(None, "x"), kind),
        placed(SQUARE, (2,), ("x",), P("x"), kind),
        placed(SQUARE, (4,), ("y",), P("y"), kind),
        placed(SQUARE, (2, 2), ("x", "y"), P("x", "y"), kind),
        placed(SQUARE, (2, 2), ("x", "y"), P(("x", "y")), kind),
        placed(SQUARE, (2, 2), ("x", "y"), P("y", "x"), kind),
        placed(SQUARE, (2, 2), ("x", "y"), P("x"), kind),
        jnp.asarray(SQUARE),
    ]
    fingerprints = [sharding_fingerprint(array) for array in arrays]
    assert len(set(fingerprints)) == len(arrays)
    assert all(re.fullmatch(r"\S+", text) for text in fingerprints)


def test_the_same_sharding_made_twice_has_one_fingerprint():
    first, second = (placed(SQUARE, (4,), ("x",), P("x")) for _ in range(2))
    assert sharding_fingerprint(first) == sharding_fingerprint(second)


def test_a_trailing_none_in_the_spec_does_not_matter():
    short = placed(SQUARE, (4,), ("x",), P("x"))
    full = placed(SQUARE, (4,), ("x",), P("x", None))
    assert sharding_fingerprint(short) == sharding_fingerprint(full)


def test_a_sharding_itself_is_taken():
    array = placed(SQUARE, (4,), ("x",), P("x"))
    assert sharding_fingerprint(array.sharding) == sharding_fingerprint(array)


def test_other_kinds_of_sharding_have_a_stable_fingerprint():
    shards = jax.pmap(lambda x: x)(SQUARE)
    assert sharding_fingerprint(shards) == sharding_fingerprint(jax.pmap(lambda x: x)(SQUARE))
    assert sharding_fingerprint(shards) != sharding_fingerprint(jnp.asarray(SQUARE))


def test_a_tracer_of_an_explicit_mesh_shows_its_sharding():
    array = placed(SQUARE, (4,), ("x",), P("x"), AxisType.Explicit)
    seen = []
    jax.jit(lambda x: seen.append(sharding_fingerprint(x)))(array)
    assert seen == [sharding_fingerprint(array)]


# --- the key builder ------------------------------------------------------------------------------


def test_both_forms_of_the_key_builder_agree(product):
    inv = product.bind(A[0], B[0])
    key = default_key_builder_with_sharding(product, (A[0], B[0]), {})
    assert key == default_key_builder_with_sharding(inv)
    assert re.fullmatch(r"[0-9a-f]{16}", key)
    with_keywords = default_key_builder_with_sharding(product, (A[0], B[0]), {"shift": 1.0})
    assert with_keywords == default_key_builder_with_sharding(product.bind(A[0], B[0], shift=1.0))
    assert with_keywords != key


def test_the_key_builder_tells_shardings_apart_and_not_values(product):
    sharded = placed(SQUARE, (4,), ("x",), P("x"))
    other = placed(SQUARE, (2,), ("x",), P("x"))
    plain = jnp.asarray(SQUARE)
    build = default_key_builder_with_sharding
    keys = [build(product, (array, plain), {}) for array in (sharded, other, plain)]
    assert len(set(keys)) == 3
    assert build(product, (sharded * 2, plain), {}) == keys[0]
    # The plain key does not see a sharding that the compiler may still change.
    assert product.bind(sharded, plain).call_key == product.bind(plain, plain).call_key


def test_the_key_builder_looks_into_pytrees_and_keywords(product):
    sharded, plain = placed(SQUARE, (4,), ("x",), P("x")), jnp.asarray(SQUARE)
    build = default_key_builder_with_sharding
    assert build(product, ({"a": sharded},), {}) != build(product, ({"a": plain},), {})
    assert build(product, (plain,), {"m": sharded}) != build(product, (plain,), {"m": plain})


@pytest.mark.parametrize("as_static", [False, True], ids=["attribute", "staticmethod"])
def test_a_kernel_may_use_it_as_its_key_builder(as_static, events):
    class Sharded(Kernel[Factor, jax.Array]):
        key_builder = (
            staticmethod(default_key_builder_with_sharding)
            if as_static
            else default_key_builder_with_sharding
        )

        def run(self, x, *, cfg):
            return x * cfg.factor

    kernel = Sharded("sharded")
    sharded, plain = placed(SQUARE, (4,), ("x",), P("x")), jnp.asarray(SQUARE)
    inv = kernel.bind(sharded)
    assert inv.make_key() == default_key_builder_with_sharding(inv)
    assert inv.make_key() != kernel.bind(plain).make_key()
    assert inv.make_key(lambda inv: "mine") == "mine"
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False, on_event=events))
    np.testing.assert_array_equal(executor(kernel, sharded), SQUARE)
    assert executor.choose_config(kernel, sharded) == Factor()
    assert events[-1][1]["call_key"] == inv.make_key()


class ShardedKey(Kernel[Factor, jax.Array]):
    key_builder = staticmethod(default_key_builder_with_sharding)

    def run(self, x, *, cfg):
        return x * cfg.factor


@pytest.mark.parametrize("place", ["numpy", "one device", "explicit mesh"])
def test_a_call_has_the_key_that_bind_says_though_it_is_traced(place, executor, events):
    array = {
        "numpy": lambda: SQUARE,
        "one device": lambda: jnp.asarray(SQUARE),
        "explicit mesh": lambda: placed(SQUARE, (4,), ("x",), P("x"), AxisType.Explicit),
    }[place]()
    kernel = ShardedKey("sharded_key")
    executor(kernel, array)
    assert [data["call_key"] for _, data in events] == [kernel.bind(array).key.call_key]


def test_a_config_tuned_for_a_sharding_serves_calls_with_it_alone(executor):
    kernel = ShardedKey("sharded_key")
    sharded = placed(SQUARE, (4,), ("x",), P("x"), AxisType.Explicit)
    executor.selector.cache.put(kernel.bind(sharded).key, Factor(5.0))
    np.testing.assert_array_equal(executor(kernel, sharded), SQUARE * 5)
    np.testing.assert_array_equal(executor(kernel, jnp.asarray(SQUARE)), SQUARE)


def test_make_key_takes_the_builder_for_any_invocation(product):
    inv = product.bind(A[0], B[0])
    key = inv.make_key(default_key_builder_with_sharding)
    assert key == default_key_builder_with_sharding(inv)
    assert key != inv.make_key() == inv.call_key


# --- abstract shapes ------------------------------------------------------------------------------


def test_abstractify_replaces_arrays_and_leaves_the_rest_alone():
    tree = {"x": np.zeros((2, 3), np.int32), "y": (jnp.ones(4, jnp.bfloat16), "text", None, 7)}
    abstract = abstractify(tree)
    assert abstract["x"] == jax.ShapeDtypeStruct((2, 3), jnp.int32)
    assert abstract["y"][0] == jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    assert abstract["y"][1:] == ("text", None, 7)


def test_abstractify_takes_tracers_and_keeps_nothing_alive():
    seen = []
    jax.jit(lambda x: seen.append(abstractify({"x": x})))(jnp.ones((2, 3)))
    assert seen[0] == {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    assert not isinstance(seen[0]["x"], jax.core.Tracer)


def test_abstractify_keeps_abstract_shapes_and_weak_types():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert abstractify([shape]) == [shape]
    seen = []
    jax.jit(lambda x: seen.append(abstractify(x)))(1.0)
    assert seen[0].weak_type


def test_abstractify_gives_the_dtype_that_jax_would_use():
    assert abstractify(np.zeros(3)).dtype == jnp.float32  # 64-bit types are off


# --- hashes and stable text -----------------------------------------------------------------------


def test_a_short_hash_is_sixteen_hexadecimal_digits():
    assert re.fullmatch(r"[0-9a-f]{16}", short_hash("text"))
    assert short_hash("text") == short_hash("text") != short_hash("Text")
    assert short_hash({"a": 1, "b": 2}) == short_hash({"b": 2, "a": 1})


def test_stable_json_is_json_that_does_not_depend_on_order():
    assert stable_json({"b": 1, "a": 2}) == stable_json({"a": 2, "b": 1})
    assert stable_json({"x", "y", "z"}) == stable_json({"z", "y", "x"})
    assert json.loads(stable_json({"b": [1, None, True], "a": "x"})) == {
        "a": "x",
        "b": [1, None, True],
    }


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Other:
    factor: float = 1.0


DISTINCT = [
    *(None, True, False, 0, 1, 2, -1, 1.0, 1.5, float("inf"), float("-inf"), 1j, "", "1", "null"),
    *(b"1", [], (), {}, [1], (1,), [[1]], {"1": 1}, {1: 1}, {1}, [None]),
    *(jnp.float32, jnp.bfloat16, np.dtype("int8"), Color.RED, Color.BLUE, Factor(), Other()),
    *(Factor(2.0), jnp.ones(3), jnp.ones(4), jnp.ones(3, jnp.int32), jnp.sin, jnp.cos),
]


def test_stable_json_tells_different_values_apart():
    texts = [stable_json(value) for value in DISTINCT]
    same = [
        (DISTINCT[i], DISTINCT[j])
        for i in range(len(texts))
        for j in range(i)
        if texts[i] == texts[j]
    ]
    assert same == []


def test_stable_json_never_sees_array_values():
    assert stable_json({"x": jnp.ones(3)}) == stable_json({"x": jnp.zeros(3)})


def test_stable_json_of_nan_is_stable():
    assert stable_json(float("nan")) == stable_json(float("nan"))


def test_stable_json_tells_functions_of_one_line_apart():
    one, two = (lambda x: x + 1), (lambda x: x + 2)
    assert stable_json(one) != stable_json(two)

    def capturing(value):
        return lambda x: x + value

    assert stable_json(capturing(1)) != stable_json(capturing(2))
    assert stable_json(capturing(1)) == stable_json(capturing(1))


def test_stable_json_tells_functions_apart_that_differ_inside():
    def outer(value):
        if value:
            return lambda x: (lambda y: y + 1)(x)
        return lambda x: (lambda y: y + 2)(x)

    assert stable_json(outer(True)) != stable_json(outer(False))


def test_a_value_without_a_stable_form_is_a_type_error():
    with pytest.raises(TypeError, match="object"):
        stable_json(object())
    itself: list = []
    itself.append(itself)
    with pytest.raises(TypeError, match="itself"):
        stable_json(itself)


# --- configs as JSON ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Blocks:
    q: int
    k: int = 64


@dataclasses.dataclass(frozen=True)
class Attention:
    fwd: FwdParams
    blocks: Blocks = Blocks(1)
    bwd: BwdParams | None = None
    grid: tuple[int, ...] = ()
    color: Color = Color.RED
    dtype: typing.Any = None
    scale: float = 1.0
    name: str = "a"
    mode: typing.Literal["fast", "exact"] = "fast"
    flag: bool = False


FULL = Attention(
    fwd=FwdParams(q_blocksize=128),
    blocks=Blocks(2, 3),
    bwd=BwdParams(num_warps=8),
    grid=(1, 2, 3),
    color=Color.BLUE,
    dtype=np.dtype("bfloat16") if hasattr(np, "bfloat16") else jnp.dtype(jnp.bfloat16),
    scale=float("inf"),
    name='a "quoted" \\ text',
    mode="exact",
    flag=True,
)


@pytest.mark.parametrize("cfg", [FULL, Attention(FwdParams()), Attention(FwdParams(), scale=2.5)])
def test_a_config_survives_json(cfg):
    text = to_json(cfg)
    json.loads(text)
    again = from_json(text, Attention)
    assert again == cfg
    assert hash(again) == hash(cfg)
    assert isinstance(again.fwd, FwdParams)
    assert isinstance(again.grid, tuple)
    assert again.color is cfg.color


def test_without_a_type_json_gives_plain_data():
    plain = from_json(to_json(Blocks(2)))
    assert plain == {"q": 2, "k": 64}
    assert type(plain) is dict


def test_json_of_a_config_is_deterministic():
    assert to_json(FULL) == to_json(dataclasses.replace(FULL))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"fwd": {"q_blocksize": "big"}}, "Attention.fwd.q_blocksize"),
        ({"fwd": {"q_blocksize": 1.5}}, "Attention.fwd.q_blocksize"),
        ({"blocks": {"q": True}}, "Attention.blocks.q"),
        ({"blocks": {"q": None}}, "Attention.blocks.q"),
        ({"blocks": {}}, "Attention.blocks"),
        ({"blocks": []}, "Attention.blocks"),
        ({"grid": [1, "2"]}, "Attention.grid[1]"),
        ({"grid": 3}, "Attention.grid"),
        ({"color": "GREEN"}, "Attention.color"),
        ({"mode": "slow"}, "Attention.mode"),
        ({"scale": "fast"}, "Attention.scale"),
        ({"name": 3}, "Attention.name"),
        ({"flag": 1}, "Attention.flag"),
        ({"fwd": {"unknown": 1}}, "Attention.fwd"),
        ({"unknown": 1}, "Attention"),
    ],
)
def test_a_wrong_type_is_refused_with_the_fields_path(change, path):
    plain = {"fwd": {}, **change}
    with pytest.raises(TypeError, match=re.escape(path)):
        from_json(json.dumps(plain), Attention)


def test_a_missing_field_is_named():
    with pytest.raises(TypeError, match="fwd"):
        from_json("{}", Attention)


def test_text_that_is_not_json_is_a_value_error():
    with pytest.raises(ValueError, match="Blocks"):
        from_json("{", Blocks)


def test_what_json_cannot_say_is_refused_with_its_path():
    with pytest.raises(TypeError, match="dtype"):
        to_json(Attention(FwdParams(), dtype=object()))


@pytest.mark.parametrize(
    ("value", "cls"),
    [
        ((1, (2, 3)), tuple[int, tuple[int, int]]),
        ([1, 2], list[int]),
        ({"a": 1}, dict[str, int]),
        (frozenset({1, 2}), frozenset[int]),
        (None, type(None)),
        (3, int | str),
        ("x", int | str),
        (2.0, float),
        (Color.BLUE, Color),
    ],
)
def test_simple_values_survive_json(value, cls):
    again = from_json(to_json(value), cls)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32, np.dtype("int8"), jnp.float8_e4m3fn])
def test_dtypes_survive_json(dtype):
    assert from_json(to_json(dtype)) == dtype


def test_parameters_by_position():
    assert FwdParams(1, 2, 3, 4, 5, 6, 7, 8, 9, 10) == FwdParams(
        q_blocksize=1,
        kv_blocksize=2,
        blocksize_m=3,
        blocksize_n=4,
        blocksize_k=5,
        blocksize_heads=6,
        blocksize_keys=7,
        num_key_splits=8,
        num_warps=9,
        num_stages=10,
    )
    assert BwdParams(1, 2, 3, 4, 5, 6, 7, 8) == BwdParams(
        q_blocksize=1,
        kv_blocksize=2,
        blocksize_m=3,
        blocksize_n=4,
        blocksize_k=5,
        blocksize_heads=6,
        num_warps=7,
        num_stages=8,
    )
