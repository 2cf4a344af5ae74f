"""Every operation under `vmap` over one argument at a time: values and gradients as in a loop.

An output that does not depend on the mapped argument is the same for all examples, and its
cotangent must count once for each of them, neither once in all nor once per pair.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Kernel
from tests.settings.examples import EXAMPLES

SIZE = 3


def _weights(out):
    """Different weights for every example and every element."""
    return [jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape) for leaf in out]


def _loss(stacked):
    return sum(
        jnp.sum(jnp.sin(leaf) * weight)
        for leaf, weight in zip(stacked, _weights(stacked), strict=True)
    )


def _assert_close(found, expected):
    for name, value in expected.items():
        value = np.asarray(value)
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(
            np.asarray(found[name]), value, atol=3e-5 * scale, rtol=0, err_msg=name
        )


@pytest.mark.parametrize(
    ("example", "name"),
    [pytest.param(e, name, id=f"{e}-{name}") for e in EXAMPLES for name in e.arrays],
)
def test_one_argument_is_mapped(example, name):
    arrays = example.inputs()
    array = arrays[name]
    if jnp.issubdtype(array.dtype, jnp.floating):
        many = jnp.stack([array * (1 + 0.1 * i) for i in range(SIZE)])
    elif name == "query_starts":  # they have to rise
        many = jnp.stack([jnp.maximum(array - i, 0) for i in range(SIZE)])
    else:
        many = jnp.stack([jnp.roll(array, i, axis=-1) for i in range(SIZE)])
    free = {n: a for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}

    def mapped(free, many):
        return jax.vmap(lambda one: example(**{**arrays, **free, name: one}))(many)

    def looped(free, many):
        outs = [example(**{**arrays, **free, name: many[i]}) for i in range(SIZE)]
        return [jnp.stack(leaves) for leaves in zip(*outs, strict=True)]

    floating = jnp.issubdtype(many.dtype, jnp.floating)
    over = (0, 1) if floating else 0
    for found, expected in zip(mapped(free, many), looped(free, many), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=3e-5, rtol=1e-5)
    found = jax.jit(jax.grad(lambda *a: _loss(mapped(*a)), over))(free, many)
    expected = jax.jit(jax.grad(lambda *a: _loss(looped(*a)), over))(free, many)
    if floating:
        _assert_close({"mapped": found[1]}, {"mapped": expected[1]})
        found, expected = found[0], expected[0]
    _assert_close(found, expected)


@dataclasses.dataclass(frozen=True)
class _Config:
    block: int = 1


class _Pair(Kernel[_Config, tuple]):
    """Two outputs of which one depends on `x` alone, with a rule in the form of `vjp`."""

    def run(self, x, w, *, cfg):
        return x * w, jnp.sin(x)

    def fwd_with_residuals(self, x, w, *, cfg):
        return self.run(x, w, cfg=cfg), None

    def vjp(self, _, out, dout, x, w, *, cfg):
        return dout[0] * w + dout[1] * jnp.cos(x), dout[0] * x


class _PairInOnePiece(Kernel[_Config, tuple]):
    def run(self, x, w, *, cfg):
        return x * w, jnp.sin(x)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        x, w = primals
        return cotangents[0] * w + cotangents[1] * jnp.cos(x), cotangents[0] * x


@pytest.mark.parametrize("kernel", [_Pair(), _PairInOnePiece()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("nested", [False, True])
def test_a_kernel_of_the_users_own(kernel, nested):
    x, w = jnp.array([1.0, 2.0, 3.0]), jnp.arange(12.0).reshape(2, 2, 3)
    if not nested:
        w = w[0]
    plain = lambda x, w: (x * w, jnp.sin(x))  # noqa: E731

    def loss(function):
        def mapped(x, w):
            inner = jax.vmap(function, in_axes=(None, 0))
            out = (jax.vmap(inner, in_axes=(None, 0)) if nested else inner)(x, w)
            return _loss(out)

        return jax.grad(mapped, (0, 1))(x, w)

    for found, expected in zip(loss(kernel), loss(plain), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6)
