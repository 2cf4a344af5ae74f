"""Settings of JAX that change how a function is run, and many threads at once."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays_of, function_of, loss_of

from ejkernel import modules
from ejkernel.ops import Kernel

SWEEP = [
    pytest.param(name, marks=[] if name in ("flash_attention", "rms_norm") else pytest.mark.long)
    for name in modules.OPERATIONS
]


def agree(got, wanted):
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, rtol=3e-5, atol=3e-5)


def truth(name):
    arrays = arrays_of(name)
    return gradient(name, implementation="reference")(*arrays)


def gradient(name, **options):
    return jax.value_and_grad(loss_of(name, **options), tuple(range(len(arrays_of(name)))))


@pytest.mark.parametrize("name", SWEEP)
def test_without_jit(name, native_library):
    wanted = truth(name)
    with jax.disable_jit():
        agree(gradient(name)(*arrays_of(name)), wanted)


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 1


class Options(Kernel[Config, jax.Array]):
    def run(self, x, *, cfg, mode=None, times=None, moved=None, function=None):
        x = x if mode is None else -x
        x = x if times is None else x * times
        x = x if moved is None else x + moved["by"]
        return x if function is None else function(x)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"mode": "negative"}, -2),
        ({"times": 3}, 6),
        ({"times": 1.5}, 3),
        ({"times": jnp.float32(1.5)}, 3),
        ({"mode": True, "times": np.int32(2)}, -4),
        ({"moved": {"by": jnp.ones(2), "name": "one"}}, 3),
        ({"function": jnp.square}, 4),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_the_first_call_of_a_kernel_may_be_without_jit(options, wanted):
    """Which keywords are static is learned from calls: here from one where nothing is traced."""
    kernel, x = Options(), jnp.full(2, 2.0)
    with jax.disable_jit():
        assert kernel(x, **options).tolist() == [wanted] * 2
    assert kernel(x, **options).tolist() == [wanted] * 2


@pytest.mark.parametrize("scalar", [jnp.asarray(True), jnp.asarray(2.0)], ids=str)
def test_the_first_call_of_a_kernel_may_hold_an_array_that_looks_like_a_number(scalar):
    """Beside a keyword that turns out to be static."""
    assert Options()(jnp.ones(2), mode="negative", times=scalar).tolist() == [-float(scalar)] * 2


def test_a_call_that_failed_because_another_thread_was_learning_is_served():
    kernel, x, options = Options(), jnp.ones(2), {"mode": "negative"}
    (entry,) = kernel._entries.values()
    before = entry.keyword
    with pytest.raises(TypeError) as caught:
        before(x, **options)
    kernel(x, **options)  # the other thread
    assert entry.keyword != before
    assert entry.after_error(caught.value, before, (x,), options).tolist() == [-1, -1]


@pytest.mark.parametrize("name", SWEEP)
def test_nothing_of_a_clean_call_is_nan_on_the_way(name, native_library):
    with jax.debug_nans(True), jax.debug_infs(False):
        agree(jax.jit(gradient(name))(*arrays_of(name)), truth(name))


@pytest.mark.parametrize("name", SWEEP)
def test_donated_arguments(name, native_library):
    wanted = truth(name)
    arrays = arrays_of(name)
    step = jax.jit(gradient(name), donate_argnums=tuple(range(len(arrays))))
    agree(step(*map(jnp.copy, arrays)), wanted)


def test_eight_threads_at_once(native_library):
    """Every operation, first calls included, from all threads in another order."""
    names = list(modules.OPERATIONS)
    wanted = {n: function_of(n, implementation="reference")(*arrays_of(n)) for n in names}
    given = {name: arrays_of(name) for name in names}
    jax.clear_caches()

    def work(number):
        for name in names[number:] + names[:number]:
            agree(function_of(name)(*given[name]), wanted[name])
        return number

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(8))) == list(range(8))
