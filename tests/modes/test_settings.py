"""Settings of JAX that change how a function is run, and many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arrays_of, function_of, loss_of

from ejkernel import modules

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
