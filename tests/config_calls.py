"""A small call of every operation, for tests that walk through all of their configs."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import modules


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _flash_attention():
    q, k, v = normal(0, 2, 40, 4, 16), normal(1, 2, 40, 2, 16), normal(2, 2, 40, 2, 16)
    return (q, k, v), {"causal": True}, (0, 1, 2)


def _paged_attention():
    table = jnp.array([[3, 1, 2], [4, 0, 5]], jnp.int32)
    pages = normal(1, 6, 4, 2, 16), normal(2, 6, 4, 2, 16)
    return (normal(0, 2, 1, 4, 16), *pages, table, jnp.array([5, 12], jnp.int32)), {}, (0,)


def _ragged_paged_attention():
    table = jnp.array([[3, 1, 2], [4, 0, 5]], jnp.int32)
    pages = normal(1, 6, 4, 2, 16), normal(2, 6, 4, 2, 16)
    places = jnp.array([5, 12], jnp.int32), jnp.array([0, 1, 6], jnp.int32)
    return (normal(0, 7, 4, 16), *pages, table, *places), {}, (0,)


def _grouped_matmul():
    sizes = jnp.array([3, 0, 20, 17], jnp.int32)
    return (normal(0, 40, 16), normal(1, 4, 16, 32), sizes), {}, (0, 1)


def _norm():
    return (normal(0, 40, 32), normal(1, 32)), {}, (0, 1)


def _linear_cross_entropy():
    labels = jnp.asarray(np.random.default_rng(2).integers(0, 50, 40), jnp.int32)
    return (normal(0, 40, 16), normal(1, 16, 50), labels), {}, (0, 1)


def _gated_linear_attention():
    q, k, v = normal(0, 2, 40, 2, 16), normal(1, 2, 40, 2, 16), normal(2, 2, 40, 2, 16)
    return (q, k, v, -jnp.abs(normal(3, 2, 40, 2, 16))), {}, (0, 1, 2, 3)


def _gated_linear_unit():
    return (normal(0, 40, 16), normal(1, 16, 32), normal(2, 16, 32)), {"recompute": True}, (0, 1, 2)


CALLS = {
    "flash_attention": _flash_attention,
    "paged_attention": _paged_attention,
    "grouped_matmul": _grouped_matmul,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "linear_cross_entropy": _linear_cross_entropy,
    "gated_linear_attention": _gated_linear_attention,
    "gated_linear_unit": _gated_linear_unit,
    "ragged_paged_attention": _ragged_paged_attention,
}


def kernel_of(name):
    # Not from the catalog: tests make other kernels of this name.
    return importlib.import_module(f"ejkernel.modules.{name}")._kernel


def invocation(name):
    """What calling the operation binds."""
    seen = []
    kernel = kernel_of(name)

    class Chooser:
        def choose(self, inv, kernel):
            seen.append(inv.abstract())
            return kernel.heuristic(inv)

    from ejkernel.ops import Executor, set_default_executor

    set_default_executor(Executor(Chooser()))
    try:
        args, kwargs, _ = CALLS[name]()
        jax.eval_shape(lambda *args: getattr(modules, name)(*args, **kwargs), *args)
    finally:
        set_default_executor(None)
    return kernel, seen[0]


def values_and_gradients(name, **more):
    """The result, and the gradients of its sum of squares."""
    args, kwargs, differentiated = CALLS[name]()
    operation = getattr(modules, name)

    def loss(*args):
        out = operation(*args, **kwargs, **more)
        return jnp.sum(jnp.square(out)), out

    gradients, out = jax.grad(loss, differentiated, has_aux=True)(*args)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves((out, gradients))]
