"""A declared space: combinations of values, constraints by name, configs of any class."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from ejkernel.ops import Kernel, Space


@dataclasses.dataclass(frozen=True)
class Blocks:
    block_q: int = 64
    block_k: int = 64
    variant: str = "loop"


@dataclasses.dataclass(frozen=True)
class Passes:
    fwd: Blocks = Blocks()
    bwd: Blocks = Blocks(32, 32)
    dtype: str = "float32"


def test_all_combinations_in_the_order_of_the_values():
    space = Space(Blocks, block_q=[1, 2], block_k=[3, 4])
    assert list(space) == [Blocks(1, 3), Blocks(1, 4), Blocks(2, 3), Blocks(2, 4)]
    assert space.size == 4
    assert list(space) == list(space), "a space can be iterated more than once"


def test_without_a_config_type_points_are_dictionaries():
    assert list(Space(a=(1, 2))) == [{"a": 1}, {"a": 2}]
    assert list(Space(dict, a=range(2))) == [{"a": 0}, {"a": 1}]


def test_repeated_values_count_once():
    assert list(Space(a=[2, 1, 2])) == [{"a": 2}, {"a": 1}]


def test_a_constraint_takes_dimensions_by_name():
    space = Space(
        Blocks, block_q=[1, 2], block_k=[1, 2], where=lambda block_k, block_q: block_q > block_k
    )
    assert list(space) == [Blocks(2, 1)]
    assert space.size == 4, "the size is that before constraints"


def test_several_constraints_must_all_hold():
    space = Space(a=range(10), where=[lambda a: a > 2, lambda a: a < 5])
    assert [point["a"] for point in space] == [3, 4]


def test_a_constraint_may_take_everything_or_have_defaults():
    space = Space(a=[1, 2], b=[3, 4], where=lambda limit=4, **point: sum(point.values()) <= limit)
    assert list(space) == [{"a": 1, "b": 3}]


def test_a_constraint_sees_the_invocation():
    space = Space(Blocks, block_q=[16, 32, 64], where=lambda block_q, inv: block_q <= inv.length)
    assert list(space(SimpleNamespace(length=32))) == [Blocks(16), Blocks(32)]
    assert len(list(space(SimpleNamespace(length=64)))) == 3
    assert space.inv is None, "calling a space leaves it as it is"


def test_an_unknown_name_in_a_constraint_is_an_error_at_once():
    with pytest.raises(TypeError, match=r"asks for 'block_z'.*dimensions are block_q"):
        Space(Blocks, block_q=[1], where=lambda block_z: True)


def test_dotted_names_reach_into_nested_configs():
    space = Space(Passes, **{"fwd.block_q": [1, 2], "bwd.block_k": [3]}, dtype=["bfloat16"])
    assert list(space) == [
        Passes(Blocks(block_q=1), Blocks(32, 3), "bfloat16"),
        Passes(Blocks(block_q=2), Blocks(32, 3), "bfloat16"),
    ]


def test_a_constraint_on_dotted_names_takes_them_as_keywords():
    space = Space(
        Passes,
        **{"fwd.block_q": [1, 2], "bwd.block_q": [1, 2]},
        where=lambda **point: point["fwd.block_q"] < point["bwd.block_q"],
    )
    assert [(cfg.fwd.block_q, cfg.bwd.block_q) for cfg in space] == [(1, 2)]


def test_a_base_gives_the_other_fields():
    base = Blocks(variant="unrolled")
    assert list(Space(Blocks, base=base, block_q=[8])) == [Blocks(8, 64, "unrolled")]
    nested = Passes(fwd=base)
    assert list(Space(Passes, base=nested, **{"fwd.block_q": [8]})) == [
        Passes(Blocks(8, 64, "unrolled"))
    ]


def test_a_field_that_does_not_exist_is_an_error():
    with pytest.raises(TypeError, match="block_z"):
        list(Space(Blocks, block_z=[1]))


@pytest.mark.parametrize("values", [3, "abc", b"abc", None])
def test_values_that_are_no_list(values):
    with pytest.raises(TypeError, match="must be a list of values"):
        Space(block_q=values)


def test_a_dimension_without_values():
    with pytest.raises(ValueError, match="'block_q' has no values"):
        Space(block_q=[])


def test_no_dimensions():
    with pytest.raises(ValueError, match="no dimensions"):
        Space(Blocks)


def test_constraints_that_exclude_everything():
    space = Space(Blocks, block_q=[1, 2], block_k=[1, 2], where=lambda block_q: block_q > 2)
    with pytest.raises(ValueError, match="exclude all 4 combinations of block_q, block_k"):
        list(space)
    assert list(space.points()) == []


def test_of_binds_a_class_unless_there_is_one():
    free = Space(block_q=[1])
    assert list(free.of(Blocks)) == [Blocks(1)]
    assert list(free) == [{"block_q": 1}], "binding leaves the space as it is"
    assert list(free.of(Blocks, Blocks(variant="x"))) == [Blocks(1, variant="x")]
    assert list(Space(Blocks, block_q=[1]).of(Passes)) == [Blocks(1)]


def test_repr_names_the_dimensions():
    text = repr(Space(Blocks, block_q=[1, 2], where=lambda block_q: True))
    assert text == "Space(block_q=[1, 2], 1 constraints)"


class Doubled(Kernel[Blocks, jax.Array]):
    config_space = Space(Blocks, block_q=[1, 2], block_k=[1, 2], where=lambda block_q: block_q > 1)

    def run(self, x, *, cfg):
        return x * 2

    def heuristic_cfg(self, inv):
        return Blocks()


class DoubledByMethod(Doubled):
    def config_space(self, inv):
        length = inv.args[0].shape[0]
        return Space(Blocks, block_q=[4, 8, 16], where=lambda block_q: block_q <= length)(inv)


class DoubledByInvocation(Doubled):
    config_space = Space(
        Blocks, block_q=[4, 8, 16], where=lambda block_q, inv: block_q <= inv.args[0].shape[0]
    )


def test_a_space_as_class_attribute():
    kernel = Doubled()
    listed = kernel.candidates(kernel.bind(jax.numpy.ones(4)))
    assert listed == [Blocks(), Blocks(2, 1), Blocks(2, 2)]


def test_a_space_as_the_result_of_a_method():
    kernel = DoubledByMethod()
    listed = kernel.candidates(kernel.bind(jax.numpy.ones(8)))
    assert listed == [Blocks(), Blocks(4), Blocks(8)]


@pytest.mark.parametrize(("length", "expected"), [(4, [4]), (16, [4, 8, 16])])
def test_a_space_as_class_attribute_knows_the_invocation(length, expected):
    kernel = DoubledByInvocation()
    listed = kernel.candidates(kernel.bind(jax.numpy.ones(length)))
    assert listed == [Blocks(), *map(Blocks, expected)]
