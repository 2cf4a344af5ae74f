"""Sizes that are symbols: `jax.export` for many shapes at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays_of, function_of, loss_of
from jax import export

from ejkernel import modules
from ejkernel.modules import flash_attention, linear_cross_entropy
from ejkernel.ops import ConfigSelectorChain, Kernel, autotune_recorded, get_invocations

BATCHED = {"flash_attention": 3, "gated_linear_attention": 4}  # so many arrays have the batch


def with_symbols(name, sizes="b"):
    """The shapes of an operation's arrays, with a symbol for the batch (and for the length)."""
    arrays, shapes = arrays_of(name), []
    for number, array in enumerate(arrays):
        shape = list(map(str, array.shape))
        if number < BATCHED.get(name, 1):
            shape[0] = "6*b" if name == "grouped_matmul" else "b"
            if sizes == "b, s":
                shape[1] = "s"
        shapes.append(",".join(shape))
    return export.symbolic_args_specs(arrays, shapes)


def check(function, name, arrays):
    exported = export.export(jax.jit(function))(*with_symbols(name))
    got, wanted = exported.call(*arrays), function(*arrays)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-5)


NEEDS_NUMBERS = ("grouped_matmul", "ragged_paged_attention")
"""Operations whose rows have to do with each other: they say so."""

QUICK = ("flash_attention", "rms_norm", "grouped_matmul")

SWEEP = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.long)
    for name in modules.OPERATIONS
]


@pytest.mark.parametrize("name", [n for n in SWEEP if n.values[0] not in NEEDS_NUMBERS])
def test_the_batch_may_be_a_symbol(name, native_library):
    arrays = arrays_of(name, batch=3)
    check(function_of(name), name, arrays)
    check(jax.grad(loss_of(name), tuple(range(len(arrays)))), name, arrays)


@pytest.mark.parametrize("name", SWEEP)
def test_the_definition_takes_any_sizes(name):
    check(function_of(name, implementation="reference"), name, arrays_of(name, batch=3))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, "b") for name in NEEDS_NUMBERS),
        ("flash_attention", "b, s"),
        ("rms_norm", "b, s"),
        ("gated_linear_attention", "b, s"),
    ],
)
def test_other_symbols_are_refused_by_name_with_the_way_out(name, sizes, native_library):
    message = rf"(?s){name}@v1\(.*sizes .*b.* are symbols.*implementation='reference'"
    with pytest.raises(ValueError, match=message):
        export.export(jax.jit(function_of(name)))(*with_symbols(name, sizes))


def test_what_is_chosen_for_a_symbolic_batch_is_chosen_for_one_entry():
    """So that keys, records and labels hold numbers."""
    export.export(jax.jit(function_of("rms_norm")))(*with_symbols("rms_norm"))
    (call,) = get_invocations()
    assert [x.shape for x in call.args] == [(1, 5, 8), (8,)]


def test_arrays_that_have_no_batch_are_shared(native_library):
    """A bias for all entries, lengths for each of them, and the log-sum-exp as a second output."""
    q, k, v = arrays_of("flash_attention", batch=3)
    bias, lengths = jnp.linspace(-1, 1, 24 * 12).reshape(1, 1, 24, 12), jnp.array([3, 12, 1])

    def attend(q, k, v, lengths):
        return flash_attention(q, k, v, bias=bias, kv_lengths=lengths, return_lse=True)

    arrays = (q, k, v, lengths)
    shapes = ["b,24,4,8", "b,12,2,8", "b,12,2,8", "b"]
    exported = export.export(jax.jit(attend))(*export.symbolic_args_specs(arrays, shapes))
    for mine, other in zip(exported.call(*arrays), attend(*arrays), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-5)


def test_dropout_depends_on_the_entry_so_its_batch_is_a_number():
    key = jax.random.key(0)

    def attend(q, k, v):
        return flash_attention(q, k, v, dropout_rate=0.5, dropout_key=key)

    with pytest.raises(ValueError, match=r"flash_attention@v1.*are symbols"):
        export.export(jax.jit(attend))(*with_symbols("flash_attention"))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_loss_of_a_symbolic_batch(reduction):
    hidden, weight = arrays_of("linear_cross_entropy", batch=3)
    labels = jnp.array([[0, 1, -100, 3, 4], [10, 9, 8, 7, 6], [-100, -100, 2, 2, 2]])

    def loss(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, reduction=reduction)

    arrays = (hidden, weight, labels)
    specs = export.symbolic_args_specs(arrays, ["b,5,8", "8,11", "b,5"])
    exported = export.export(jax.jit(loss))(*specs)
    np.testing.assert_allclose(exported.call(*arrays), loss(*arrays), rtol=2e-5)


class Doubled(Kernel[int, jax.Array]):
    def run(self, x, *, cfg):
        return 2 * x

    def heuristic_cfg(self, inv):
        return 1 if inv.args[0].shape[0] < 64 else 2


class DoubledRows(Doubled):
    def entries_are_independent(self, x):
        return True


class Tripled(Kernel[int, jax.Array]):
    def run(self, x, *, cfg):
        return 3 * x

    def heuristic_cfg(self, inv):
        return 1


def test_symbols_in_keys_and_records_do_no_harm():
    """A kernel that needs no numbers has symbols in its key, its record and its label."""
    x = jnp.ones((3, 2))
    kernel = Tripled()
    keys = set()
    for _ in range(2):
        exported = export.export(jax.jit(kernel))(*export.symbolic_args_specs((x,), "b,2"))
        assert (exported.call(x) == 3).all()
        (call,) = get_invocations()
        keys.add(call.key)
        assert call.signature == "float32[b,2]"
    assert len(keys) == 1
    result = autotune_recorded(ConfigSelectorChain())
    assert not result.entries
    assert len(result.skipped) == 1


def test_a_kernel_of_a_user_declares_it():
    x = jnp.ones((3, 2))
    specs = export.symbolic_args_specs((x,), "b,2")
    exported = export.export(jax.jit(DoubledRows()))(*specs)
    assert (exported.call(x) == 2).all()
    with pytest.raises(ValueError, match=r"doubled@v1\(float32\[b,2\]\): the sizes b are symbols"):
        export.export(jax.jit(Doubled()))(*specs)
