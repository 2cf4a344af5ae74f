"""A matrix product with a Pallas kernel for TPU, one for GPU, and one for any XLA device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ejkernel.ops import Kernel


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 2


def reference(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision="highest")


def _specs(x, y, cfg):
    k = x.shape[1]
    return {
        "grid": (x.shape[0] // cfg.rows, y.shape[1] // cfg.columns),
        "in_specs": [
            pl.BlockSpec((cfg.rows, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, cfg.columns), lambda i, j: (0, j)),
        ],
        "out_specs": pl.BlockSpec((cfg.rows, cfg.columns), lambda i, j: (i, j)),
        "out_shape": jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32),
    }


def tpu_matmul(x, y, cfg, *, interpret=False):
    depth = min(max(cfg.depth, 128), x.shape[1])  # a TPU slices whole lanes

    def body(x_ref, y_ref, out_ref):
        def step(i, total):
            part = pl.ds(i * depth, depth)
            left, right = x_ref[:, part], y_ref[part, :]
            return total + jnp.dot(left, right, preferred_element_type=jnp.float32)

        zero = jnp.zeros((cfg.rows, cfg.columns), jnp.float32)
        out_ref[...] = jax.lax.fori_loop(0, x.shape[1] // depth, step, zero)

    return pl.pallas_call(body, **_specs(x, y, cfg), interpret=interpret, name="matmul_tpu")(x, y)


def gpu_matmul(x, y, cfg, *, interpret=False):
    def body(x_ref, y_ref, out_ref):
        def step(i, total):
            part = pl.ds(i * cfg.depth, cfg.depth)
            left = plgpu.load(x_ref.at[:, part])
            right = plgpu.load(y_ref.at[part, :])
            return total + plgpu.dot(left, right)

        zero = jnp.zeros((cfg.rows, cfg.columns), jnp.float32)
        plgpu.store(out_ref, jax.lax.fori_loop(0, x.shape[1] // cfg.depth, step, zero))

    return pl.pallas_call(
        body,
        **_specs(x, y, cfg),
        interpret=interpret,
        name="matmul_gpu",
        compiler_params=plgpu.CompilerParams(num_warps=cfg.warps, num_stages=cfg.stages),
    )(x, y)


class Matmul(Kernel[Tile, jax.Array]):
    """`x @ y`, in tiles."""

    def __init__(self, name="target_matmul"):
        super().__init__(name=name)

    def run_pallas(self, x, y, *, cfg):
        return tpu_matmul(x, y, cfg)

    def run_triton(self, x, y, *, cfg):
        return gpu_matmul(x, y, cfg)

    def run_xla(self, x, y, *, cfg):
        blocks = x.reshape(-1, cfg.rows, x.shape[1])
        return jax.lax.map(lambda block: reference(block, y), blocks).reshape(-1, y.shape[1])

    def reference(self, x, y):
        return reference(x, y)

    def candidate_cfgs(self, inv):
        return [Tile(128, 128), Tile(256, 128), Tile(256, 256)]
