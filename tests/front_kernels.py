"""Kernels whose fastest config is known beforehand: one does the work of the other many times."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp

from ejkernel import tunable
from ejkernel.ops import Kernel

SLOW, FAST = 100, 1


def repeated(x, times):
    """`x`, computed that often: the compiler cannot know that nothing is added."""
    return jax.lax.fori_loop(0, times, lambda _, y: x + 0.0 * jnp.sin(y), x)


@dataclasses.dataclass(frozen=True)
class Repeats:
    times: int


class FastIsFound(Kernel[Repeats, jax.Array]):
    """The heuristic config is slow, the other candidate fast."""

    def run(self, x, *, cfg):
        return repeated(x, cfg.times)

    def heuristic_cfg(self, inv):
        return Repeats(SLOW)

    def candidate_cfgs(self, inv):
        return [Repeats(FAST)]


_in_the_model = []


@contextlib.contextmanager
def in_the_model():
    _in_the_model.append(True)
    try:
        yield
    finally:
        _in_the_model.pop()


class SlowInTheModel(FastIsFound):
    """The config that is fast alone is the slow one where a model calls it."""

    def run(self, x, *, cfg):
        times = 10 * SLOW if _in_the_model and cfg.times == FAST else cfg.times
        return repeated(x, times)


class SlowIsBest(FastIsFound):
    """Nothing beats the heuristic config."""

    def heuristic_cfg(self, inv):
        return Repeats(FAST)

    def candidate_cfgs(self, inv):
        return [Repeats(SLOW)]


fast_is_found = FastIsFound()
slow_in_the_model = SlowInTheModel()
slow_is_best = SlowIsBest()


@tunable(times=[FAST, SLOW])
def decorated(x, *, times=SLOW):
    return repeated(x, times)


def misled(x):
    with in_the_model():
        return slow_in_the_model(x).sum()
