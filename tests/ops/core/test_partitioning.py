"""A `Partitioning` that does not fit a call says which argument, and what it was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import Partitioning

MATRIX, VECTOR = jax.ShapeDtypeStruct((4, 6), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.float32)


def test_dimensions_are_named_for_every_argument_and_output():
    rule = Partitioning("... k, k -> ...", keywords={"bias": "k"}, independent="k")
    layout = rule.layout((MATRIX, VECTOR), {"bias": VECTOR, "scale": 2.0})
    assert layout.names == ("argument 0", "argument 1", "bias")
    assert layout.arguments == ((("...0",), ("k",)), (("k",),), (("k",),))
    assert layout.outputs == ((("...0",),),)
    assert layout.sizes == {"...0": 4, "k": 6}


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ("m k -> m", "names 1 arguments, and the call has an array in argument 1"),
        (
            "m k, k n -> m n",
            r"argument 1 has shape \(6,\), and .* given as 2 names",
        ),
        ("m k, ... k n -> m n", r"argument 1 has shape \(6,\)"),
        ("m [k], k -> m", r"cannot read the dimensions 'm \[k\]'"),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error_that_names_the_argument(dims, expected):
    with pytest.raises(ValueError, match=expected):
        Partitioning(dims, independent="m").layout((MATRIX, VECTOR), {})


def test_dimensions_may_have_any_name():
    """None means something to the framework, such as what it calls those that `vmap` adds."""
    rule = Partitioning("mapped device -> mapped device", independent="device")
    assert not rule.may_shard("mapped")
    shards, gathered = rule.layout((MATRIX,), {}).shards([("x", "y")], {"x": 2, "y": 2})
    assert shards.axes == {"device": ("y",)}
    assert gathered == ["argument 0 is sharded over 'x' in dimension 0"]


def test_an_axis_of_one_device_is_kept_where_it_can_be_and_gathers_nothing():
    layout = Partitioning("m k -> m", independent="m").layout((MATRIX,), {})
    shards, gathered = layout.shards([("one", "one")], {"one": 1})
    assert shards.axes == {"m": ("one",)}
    assert gathered == []


def test_an_axis_that_is_hidden_cannot_be_kept():
    layout = Partitioning("m k -> m", independent="m").layout((MATRIX,), {})
    shards, gathered = layout.shards([("x", None)], {})
    assert shards.axes == {}
    assert gathered == ["argument 0 is sharded over 'x' in dimension 0"]
