"""Kernels whose fastest config is known beforehand: by a clock that they set themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import tunable
from ejkernel.ops import Kernel

SLOW, FAST = 10, 1


class Clock:
    """Seconds that pass only where a program says so, whatever else the machine does."""

    def __init__(self):
        self.now = 0.0
        self._noise = random.Random(0)

    def perf_counter(self):
        self.now += 1e-9
        return self.now

    def work(self, times):
        self.now += 3e-3 * float(times) * self._noise.uniform(0.99, 1.01)
        return np.float32(0)


clock = Clock()


def repeated(x, times):
    """`x`, after so much work."""
    nothing = jax.ShapeDtypeStruct((), jnp.float32)
    return x + jax.pure_callback(clock.work, nothing, np.float32(times))


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
