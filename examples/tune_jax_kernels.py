"""Functions that others wrote, made tunable: a loop on this CPU, and the Pallas kernels of JAX.

    python examples/tune_jax_kernels.py

1. `lax.map` over blocks of rows, measured here, checked against plain JAX, stored.
2. JAX's flash and splash attention for TPU and its attention and decoding for GPU: every config is
   lowered for the device, which needs nothing installed, and compiled if its compiler is here. On
   the device itself `attend.tune(q, k, v)` measures them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.gpu import decode_attention as gpu_decoding
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_flash
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as tpu_splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from ejkernel import targets, tunable

# --- a function of your own ----------------------------------------------------------------------


def nearest_all_at_once(queries, points):
    """The squared distance of each query to the nearest point, in plain JAX."""
    differences = queries[:, None, :] - points[None, :, :]
    return (differences**2).sum(-1).min(-1)


@tunable(
    rows=[1, 4, 16, 64],
    constraint=lambda rows, queries: queries.shape[0] % rows == 0,
    reference=nearest_all_at_once,
)
def nearest(queries, points, *, rows=1):
    """The same, some rows at a time."""
    blocks = queries.reshape(-1, rows, queries.shape[1])
    return jax.lax.map(lambda block: nearest_all_at_once(block, points), blocks).reshape(-1)


# --- kernels of JAX: a plain call around the function --------------------------------------------

_flash_blocks = functools.partial(tpu_flash.BlockSizes, block_b=1)

tpu_flash_attention = tunable(
    tpu_flash.flash_attention,
    block_sizes=[
        _flash_blocks(block_q=q, block_k_major=k, block_k=k) for q in (128, 512) for k in (128, 512)
    ],
    heuristic={"block_sizes": _flash_blocks(block_q=128, block_k_major=128, block_k=128)},
    reference=lambda q, k, v, **options: tpu_flash.mha_reference(q, k, v, None, **options),
    name="jax/flash_attention_tpu",
)


def _splash(q, k, v, *, block_sizes=None):
    mask = masks.MultiHeadMask([masks.CausalMask((q.shape[1], k.shape[1]))] * q.shape[0])
    made = tpu_splash.make_splash_mha(mask, block_sizes=block_sizes, head_shards=1, q_seq_shards=1)
    return made(q, k, v)


tpu_splash_attention = tunable(
    _splash,
    block_sizes=[
        tpu_splash.BlockSizes(block_q=q, block_kv=kv) for q in (128, 512) for kv in (128, 512)
    ],
    heuristic={"block_sizes": tpu_splash.BlockSizes(block_q=128, block_kv=128)},
    name="jax/splash_attention_tpu",
)

gpu_flash_attention = tunable(
    gpu_attention.mha,
    block_sizes=[gpu_attention.BlockSizes(q, k) for q in (64, 128) for k in (32, 64)],
    num_warps=[4, 8],
    heuristic={"block_sizes": gpu_attention.BlockSizes(128, 64), "num_warps": 4},
    reference=gpu_attention.mha_reference,
    name="jax/attention_gpu",
)

gpu_decode = tunable(
    gpu_decoding.gqa,
    block_k=[64, 128],
    k_splits=[8, 16],
    reference=gpu_decoding.gqa_reference,
    name="jax/decode_attention_gpu",
)


def check(function, *args, target: str, **options) -> None:
    """Lower every config for a device, or compile it too if its compiler is installed."""
    compiler = targets.available()[target]
    shown = targets.check(function, *args, target=target, compile=compiler.usable, **options)
    print(shown)
    if not compiler.usable:
        print(f"lowered, not compiled: {compiler.lacking}")
    print()
    if shown.infeasible:
        raise SystemExit(f"{function.op_id}: {len(shown.infeasible)} configs do not fit {target}")


def main() -> None:
    keys = jax.random.split(jax.random.key(0))
    queries, points = (jax.random.normal(key, (512, 32)) for key in keys)
    nearest.tune(queries, points, effort="quick")
    print(nearest.explain(queries, points), "\n")

    def arrays(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    heads_first = arrays(1, 8, 1024, 128)
    check(tpu_flash_attention, *[heads_first] * 3, causal=True, target="tpu-v5e")
    check(tpu_splash_attention, *[arrays(8, 1024, 128)] * 3, target="tpu-v5e")
    batch = arrays(1, 1024, 8, 64)
    check(gpu_flash_attention, *[batch] * 3, segment_ids=None, causal=True, target="cuda-sm90")
    cache = arrays(2, 1024, 8, 128)
    check(gpu_decode, arrays(2, 32, 128), cache, cache, target="cuda-sm90")


if __name__ == "__main__":
    main()
