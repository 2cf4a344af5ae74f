"""The limits of every operation's configs: what is refused by name, and what must fit them."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
from config_calls import CALLS, invocation

from ejkernel import modules
from ejkernel.modules import OPERATIONS
from ejkernel.ops.core.requirements import field_reasons, implementation_for, limit_reasons
from ejkernel.ops.core.space import _replaced
from ejkernel.ops.utils.serialize import field_paths
from ejkernel.targets import find
from ejkernel.targets.lowering import standing_on

NEVER = [-(2**63), -(2**31), -3, -1, 0, 2**31, 2**62, 2**63, 2**70]
OF_NO_TYPE = [True, False, 1.0, 1e9, float("nan"), float("inf"), "8", b"8", (8,), [8], 1j, object]


def test_every_operation_is_walked_through():
    assert set(CALLS) == set(OPERATIONS)


def numbers(config):
    """The fields of a config class that are numbers, by path."""
    default = config()
    return [p for p in field_paths(config) if not dataclasses.is_dataclass(_at(default, p))]


def _at(cfg, path):
    for name in path.split("."):
        cfg = getattr(cfg, name)
    return cfg


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_field_of_a_number_has_limits(name):
    kernel, _ = invocation(name)
    for item in kernel.implementations:
        assert set(item.limits.fields) == set(numbers(item.config)), item.name


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_that_no_implementation_takes_are_refused_by_field(name):
    kernel, inv = invocation(name)
    for item in kernel.all_implementations():
        assert item.limits.fields
        for path in item.limits.fields:
            for value in NEVER:
                cfg = _replaced(item.config(), path.split("."), value)
                assert field_reasons(cfg) == []
                reasons = limit_reasons(item, cfg, inv)
                assert any(f"{path}={value}" in reason for reason in reasons), (path, value)
                assert all(item.name in reason for reason in reasons)


@pytest.mark.parametrize("name", OPERATIONS)
def test_fields_of_another_type_are_refused(name):
    kernel, inv = invocation(name)
    for config in kernel.config_types:
        for path in numbers(config):
            for value in OF_NO_TYPE:
                cfg = _replaced(config(), path.split("."), value)
                with pytest.raises(TypeError, match=path):
                    kernel.check_config(cfg, inv=inv)
        nested = [path for path in field_paths(config) if path not in numbers(config)]
        for path in nested:
            for value in (None, {}, 3, inv):
                cfg = _replaced(config(), path.split("."), value)
                with pytest.raises(TypeError, match=path):
                    kernel.check_config(cfg, inv=inv)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_explicit_config_that_does_not_fit_is_an_error_that_names_it(name):
    kernel, _ = invocation(name)
    args, kwargs, _ = CALLS[name]()
    xla = kernel.implementation("xla")
    path = next(iter(xla.limits.fields))
    cfg = _replaced(xla.config(), path.split("."), -1)
    with pytest.raises(ValueError, match=rf"{name}@v1.*{path}=-1 must be") as error:
        getattr(modules, name)(*args, **kwargs, cfg=cfg)
    assert "leave the config out" in str(error.value)


def big(name):
    """The call at sizes of a model, as shapes."""

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    integers = {"dtype": jnp.int32}
    heads = [shape(4, 4096, heads, 128) for heads in (32, 8, 8)]
    return {
        "flash_attention": (heads, {"causal": True}),
        "paged_attention": (
            [
                shape(64, 1, 32, 128),
                *[shape(9000, 16, 8, 128)] * 2,
                shape(64, 256, **integers),
                shape(64, **integers),
            ],
            {},
        ),
        "ragged_paged_attention": (
            [
                shape(2048, 32, 128),
                *[shape(9000, 16, 8, 128)] * 2,
                *[shape(64, *more, **integers) for more in ((256,), ())],
                shape(65, **integers),
            ],
            {},
        ),
        "grouped_matmul": ([shape(65536, 4096), shape(8, 4096, 14336), shape(8, **integers)], {}),
        "rms_norm": ([shape(4, 8192, 8192), shape(8192)], {}),
        "layer_norm": ([shape(4, 8192, 8192), shape(8192)], {}),
        "linear_cross_entropy": (
            [shape(8192, 4096), shape(4096, 128256), shape(8192, **integers)],
            {},
        ),
        "gated_linear_attention": ([shape(4, 4096, 16, 128)] * 3, {}),
        "gated_linear_unit": ([shape(16384, 4096), shape(4096, 14336), shape(4096, 14336)], {}),
    }[name]


@pytest.mark.parametrize("target", ["cpu", "tpu-v5e", "cuda-sm80"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_a_kernel_proposes_itself_fits(name, target):
    """At sizes of a test and of a model; the heuristic config is checked where it is made."""
    kernel = importlib.import_module(f"ejkernel.modules.{name}")._kernel
    _, small = invocation(name)
    args, kwargs = big(name)
    large = dataclasses.replace(small, args=tuple(args), kwargs={**small.kwargs, **kwargs})
    for inv in (small, large):
        inv = dataclasses.replace(inv, metadata={"device": target})
        with standing_on(find(target)):
            candidates = kernel.candidates(inv)
            for cfg in candidates:
                assert field_reasons(cfg) == []
                assert limit_reasons(implementation_for(kernel, inv, cfg), cfg, inv) == [], cfg
