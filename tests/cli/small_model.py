"""What the tests of the command line tune: small kernels, and functions that return odd things."""

from __future__ import annotations

import dataclasses
import os
import time

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 8


class SmallRowSum(Kernel[Config, jax.Array]):
    def run(self, x, *, cfg):
        return jax.lax.map(lambda c: c.sum(1), x.reshape(-1, cfg.rows, x.shape[1])).reshape(-1)

    def reference(self, x):
        return x.sum(1)

    def candidate_cfgs(self, inv):
        return [Config(8), Config(16)]


class Slow(Kernel[Config, jax.Array]):
    """Waits while its candidates are listed, so that a test can interrupt it there."""

    def run(self, x, *, cfg):
        return x * 2

    def candidate_cfgs(self, inv):
        mark = os.environ.get("SMALL_MODEL_MARK")
        if mark and not os.path.exists(mark):
            with open(mark, "w"):
                pass
            time.sleep(60)
        return [Config(8), Config(16)]


row_sum = SmallRowSum()
slow = Slow()


def model(x):
    return jnp.tanh(row_sum(x)).sum()


def training():
    return jax.grad(model), (jax.ShapeDtypeStruct((32, 4), jnp.float32),)


def tuned():
    print("this is printed while the function is loaded")
    return model, (jax.ShapeDtypeStruct((32, 4), jnp.float32),)


def ones():
    return model, (jnp.ones((32, 4)),)


def fails_when_run():
    def fails(x):
        jax.debug.callback(lambda: print(1 / 0))
        return model(x)

    return fails, (jnp.ones((32, 4)),)


def in_plain_jax():
    return (lambda x: jnp.tanh(x.sum(1)).sum()), (jnp.ones((32, 4)),)


def something_else():
    return (lambda x: x.sum(1)), (jnp.ones((32, 4)),)


def with_slow():
    return (lambda x: row_sum(slow(x))), (jnp.ones((32, 4)),)


def lowered():
    return jax.jit(model).lower(jnp.ones((32, 4)))


def with_keywords():
    return (lambda x, *, scale: model(x) * scale), (jnp.ones((32, 4)),), {"scale": 2.0}


def nothing_of_ours():
    return jnp.tanh, (jnp.ones(3),)


def returns_none():
    return None


def returns_an_array():
    return model, jnp.ones((32, 4))


def returns_no_function():
    return "model", (jnp.ones((32, 4)),)


def raises():
    raise ValueError("the checkpoint is missing")


def cannot_be_traced():
    return model, (jnp.ones((3, 4)),)


def needs_arguments(size):
    return model, (jnp.ones((size, 4)),)


not_callable = 3
