"""Something to watch: two calls of a kernel whose candidates take a while to compile."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel

SECONDS = 0.3  # of each candidate


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int = 8


class SlowRowSum(Kernel[Rows, jax.Array]):
    def run(self, x, *, cfg):
        time.sleep(SECONDS)
        return jax.lax.map(lambda c: c.sum(1), x.reshape(-1, cfg.rows, x.shape[1])).reshape(-1)

    def candidate_cfgs(self, inv):
        return [Rows(rows) for rows in (8, 16, 32, 64, 128, 256)]


slow_row_sum = SlowRowSum()


def example():
    return (lambda x, y: slow_row_sum(x).sum() + slow_row_sum(y).sum()), (
        jnp.ones((256, 4)),
        jnp.ones((512, 4)),
    )
