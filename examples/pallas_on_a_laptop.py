"""A Pallas kernel for TPU, written and checked on a machine without one.

    python examples/pallas_on_a_laptop.py

1. Interpreted on the CPU: is it right?
2. Lowered for a TPU: does JAX accept its block shapes? Nothing needs to be installed for that.
3. Compiled for a TPU by the real compiler, if the extra `tpu-aot` is installed: what fits, ranked.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel import targets
from ejkernel.ops import Kernel


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int = 256


def _softcapped(x_ref, out_ref, *, cap):
    out_ref[...] = cap * jnp.tanh(x_ref[...] / cap)


class SoftCap(Kernel[Tile, jax.Array]):
    """`cap * tanh(x / cap)`, a block of rows at a time."""

    def __init__(self) -> None:
        super().__init__(name="soft_cap")

    def run_pallas(self, x, *, cfg, cap, interpret=False):
        block = pl.BlockSpec((cfg.rows, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            functools.partial(_softcapped, cap=cap),
            grid=(x.shape[0] // cfg.rows,),
            in_specs=[block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=interpret,
        )(x)

    def run_xla(self, x, *, cfg, cap):
        return cap * jnp.tanh(x / cap)

    def candidate_cfgs(self, inv):
        # 12 rows are no multiple of 8, 4096 do not fit into the memory of a core.
        return [Tile(rows) for rows in (12, 64, 256, 1024, 4096)]


def main() -> None:
    kernel = SoftCap()
    x = 50 * jax.random.normal(jax.random.key(0), (768, 256))
    interpreted = kernel.run_pallas(x, cfg=Tile(256), cap=30.0, interpret=True)
    np.testing.assert_allclose(interpreted, kernel.run_xla(x, cfg=None, cap=30.0), rtol=1e-5)
    print("interpreted on this machine: equal to XLA's\n")

    wanted = jax.ShapeDtypeStruct((3 * 4096, 2048), jnp.float32)
    lowered = targets.check(kernel, wanted, cap=30.0, target="tpu-v5e", compile=False)
    print(lowered)
    if lowered.of(Tile(12)).compiles:
        raise SystemExit("12 rows should have been refused")

    print()
    compiler = targets.available()["tpu-v5e"]
    if compiler.usable:
        print(targets.check(kernel, wanted, cap=30.0, target="tpu-v5e"))
    else:
        print(f"not compiled for tpu-v5e: {compiler.lacking}")


if __name__ == "__main__":
    main()
