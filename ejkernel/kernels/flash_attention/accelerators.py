"""Flash attention on TPU and GPU: the Pallas implementations as methods of the kernel.

Pallas takes a while to import, so it is imported when one of them is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops import BwdParams, FwdParams, Invocation, Limit, Limits, Supports

from ..limits import COUNT, launch
from .options import Options

MOST_FEATURES_ON_GPU = 256


def features_fit_a_gpu(inv: Invocation[Any, Any]) -> str | None:
    """Tiles of wider heads do not fit into the shared memory of a multiprocessor."""
    q, _, v = inv.args
    for name, array in (("head_dim", q), ("value_dim", v)):
        if array.shape[3] > MOST_FEATURES_ON_GPU:
            return f"{name} is {array.shape[3]}, and at most {MOST_FEATURES_ON_GPU} are supported"
    return None


_NOT_SERVED = ("dropout_rate", "dropout_key", "sequence_axis")

SUPPORTS = {
    "pallas": Supports(dtypes=("float32", "bfloat16"), without=_NOT_SERVED),
    "triton": Supports(
        dtypes=("float32", "bfloat16", "float16"),
        without=_NOT_SERVED,
        rules=(features_fit_a_gpu,),
    ),
}


_SIDES = [f"{way}.{side}" for way in ("fwd", "bwd") for side in ("q_blocksize", "kv_blocksize")]
# The backward pass of a differentiated bias is XLA's, which has heads in its blocks.
_HEADS = {"bwd.blocksize_heads": COUNT}

LIMITS = {
    # Sides are rounded up, to a multiple of 128 and to a power of two.
    "pallas": Limits({side: Limit(least=1, most=2**15) for side in _SIDES} | _HEADS),
    "triton": Limits(
        {side: Limit(least=1, most=1024) for side in _SIDES}
        | launch("fwd.")
        | launch("bwd.")
        | _HEADS
    ),
}


class Accelerators:
    """The methods of the kernel that serve TPU (`_pallas`) and GPU (`_triton`).

    A bias that is differentiated has the whole score matrix for its gradient, or sums of it over
    any of its axes; its calls take the backward pass of `vjp_xla`.
    """

    config_type: Any
    vjp_xla: Callable[..., Any]

    # --- TPU -------------------------------------------------------------------------------------

    def heuristic_cfg_pallas(self, inv: Invocation[Any, Any]) -> Any:
        return self.config_type(*TPU_BLOCKS[0])

    def candidate_cfgs_pallas(self, inv: Invocation[Any, Any]) -> list[Any]:
        return _each_pass_varied(self.config_type, TPU_BLOCKS)

    def run_pallas(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, cfg: Any, **options: Any
    ) -> Any:
        return self.fwd_with_residuals_pallas(q, k, v, cfg=cfg, **options)[0]

    def fwd_with_residuals_pallas(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: Any,
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Any, jax.Array]:
        from .pallas_tpu import kernels as pallas_tpu

        blocks = _blocks(cfg.fwd, TPU_BLOCKS[0][0])
        out, lse = pallas_tpu.forward(q, k, v, Options(**options), **blocks)
        return ((out, lse) if return_lse else out), lse

    def vjp_pallas(
        self,
        lse: jax.Array,
        out: Any,
        dout: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: Any,
        differentiated: frozenset[str],
        **options: Any,
    ) -> Any:
        if "bias" in differentiated:
            options["differentiated"] = differentiated
            return self.vjp_xla(lse, out, dout, q, k, v, cfg=cfg, **options)
        from .pallas_tpu import kernels as pallas_tpu

        blocks = _blocks(cfg.bwd, TPU_BLOCKS[0][1])
        result, dresult, dlse, rest = _separated(out, dout, **options)
        return pallas_tpu.backward(q, k, v, result, lse, dresult, dlse, rest, **blocks)

    # --- GPU -------------------------------------------------------------------------------------

    def heuristic_cfg_triton(self, inv: Invocation[Any, Any]) -> Any:
        return self.config_type(*_gpu_blocks(inv.args)[0])

    def candidate_cfgs_triton(self, inv: Invocation[Any, Any]) -> list[Any]:
        return _each_pass_varied(self.config_type, _gpu_blocks(inv.args))

    def run_triton(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, cfg: Any, **options: Any
    ) -> Any:
        return self.fwd_with_residuals_triton(q, k, v, cfg=cfg, **options)[0]

    def fwd_with_residuals_triton(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: Any,
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Any, jax.Array]:
        from .pallas_gpu import kernels as pallas_gpu

        launch = _launch(cfg.fwd, _gpu_blocks((q, k, v))[0][0])
        out, lse = pallas_gpu.forward(q, k, v, Options(**options), **launch)
        return ((out, lse) if return_lse else out), lse

    def vjp_triton(
        self,
        lse: jax.Array,
        out: Any,
        dout: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: Any,
        differentiated: frozenset[str],
        **options: Any,
    ) -> Any:
        if "bias" in differentiated:
            options["differentiated"] = differentiated
            return self.vjp_xla(lse, out, dout, q, k, v, cfg=cfg, **options)
        from .pallas_gpu import kernels as pallas_gpu

        launch = _launch(cfg.bwd, _gpu_blocks((q, k, v))[0][1])
        result, dresult, dlse, rest = _separated(out, dout, **options)
        return pallas_gpu.backward(q, k, v, result, lse, dresult, dlse, rest, **launch)


Passes = tuple[FwdParams, BwdParams]


def _tpu(forward: tuple[int, int], backward: tuple[int, int]) -> Passes:
    return (
        FwdParams(q_blocksize=forward[0], kv_blocksize=forward[1]),
        BwdParams(q_blocksize=backward[0], kv_blocksize=backward[1]),
    )


# Heuristic first. By the schedules of libtpu (docs/operations/flash_attention.md), which no
# hardware has confirmed.
TPU_BLOCKS: tuple[Passes, ...] = (
    _tpu((512, 1024), (512, 1024)),
    _tpu((256, 512), (256, 512)),
    _tpu((512, 512), (512, 512)),
    _tpu((1024, 512), (1024, 512)),
    _tpu((1024, 1024), (1024, 1024)),
    _tpu((512, 2048), (256, 256)),
)


def _gpu(forward: tuple[int, int, int, int], backward: tuple[int, int, int, int]) -> Passes:
    names = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
    return (
        FwdParams(**dict(zip(names, forward, strict=True))),
        BwdParams(**dict(zip(names, backward, strict=True))),
    )


def _gpu_blocks(arrays: tuple[Any, ...]) -> tuple[Passes, ...]:
    """Heuristic first: tiles that keep their sums in registers and fit into shared memory."""
    q, _, v = arrays
    features = max(q.shape[3], v.shape[3]) * (2 if q.dtype.itemsize == 4 else 1)
    if features <= 64:
        return (
            _gpu((128, 64, 4, 3), (64, 64, 4, 2)),
            _gpu((64, 64, 4, 3), (32, 64, 4, 2)),
            _gpu((128, 128, 8, 2), (64, 128, 8, 2)),
            _gpu((128, 32, 4, 3), (64, 32, 4, 2)),
        )
    if features <= 128:
        return (
            _gpu((128, 64, 8, 2), (64, 64, 8, 2)),
            _gpu((64, 64, 4, 2), (32, 64, 4, 2)),
            _gpu((128, 32, 4, 2), (32, 32, 4, 2)),
            _gpu((128, 128, 8, 2), (64, 32, 4, 2)),
        )
    return (
        _gpu((64, 32, 4, 2), (32, 32, 8, 1)),
        _gpu((32, 32, 4, 2), (16, 32, 4, 1)),
        _gpu((64, 64, 8, 1), (32, 16, 4, 1)),
    )


def _each_pass_varied(config_type: Any, choices: tuple[Passes, ...]) -> list[Any]:
    """The passes do not share anything, so each is varied while the other stays as it is."""
    first = config_type(*choices[0])
    return [
        *(dataclasses.replace(first, fwd=forward) for forward, _ in choices),
        *(dataclasses.replace(first, bwd=backward) for _, backward in choices[1:]),
    ]


def _blocks(params: FwdParams | BwdParams, default: FwdParams | BwdParams) -> dict[str, Any]:
    return {
        "block_q": params.q_blocksize or default.q_blocksize,
        "block_k": params.kv_blocksize or default.kv_blocksize,
    }


def _launch(params: FwdParams | BwdParams, default: FwdParams | BwdParams) -> dict[str, Any]:
    return _blocks(params, default) | {
        "num_warps": params.num_warps or default.num_warps,
        "num_stages": params.num_stages or default.num_stages,
    }


def _separated(
    out: Any, dout: Any, *, return_lse: bool = False, **options: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None, Options]:
    """The result, its gradient, the gradient of the log-sum-exp if there is one, the options."""
    if not return_lse:
        return out, dout, None, Options(**options)
    return out[0], dout[0], dout[1], Options(**options)
