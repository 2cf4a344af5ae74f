"""Flash attention on CPU as a part of the kernel: the C++ implementation, where it can serve."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from ejkernel.native.calling import call
from ejkernel.ops import BwdParams, FwdParams, Invocation, Limits, Supports
from ejkernel.ops.core.static_part import split

from ..limits import COUNT
from .native import calls as native

if TYPE_CHECKING:
    from .kernel import FlashAttentionConfig

Blocks = tuple[int, int]

FORWARD: Blocks = (192, 480)
BACKWARD: Blocks = (96, 192)
"""What was best where there is enough work for all threads; others are a few percent away."""

FORWARD_CANDIDATES: tuple[Blocks, ...] = (
    (48, 128),
    (96, 192),
    (96, 480),
    (192, 240),
    (192, 480),
    (384, 480),
)
BACKWARD_CANDIDATES: tuple[Blocks, ...] = (
    (48, 96),
    (96, 96),
    (48, 192),
    (96, 192),
    (192, 96),
    (192, 192),
)


def native_is_available(inv: Invocation[Any, Any]) -> str | None:
    """A C++ compiler, once: the library is built when it is first needed."""
    from ejkernel.native import FLASH_ATTENTION, why_not

    return why_not(FLASH_ATTENTION)


FEWEST_ROWS = 24


def has_enough_rows(inv: Invocation[Any, Any]) -> str | None:
    """None, or why XLA is faster: all keys are packed first, which a few queries do not pay back.

    Who asks for this implementation by name gets it.
    """
    q, k, _ = inv.args
    rows = q.shape[1] * q.shape[2] // k.shape[2]
    if rows >= FEWEST_ROWS or inv.kwargs.get("implementation") == "cpu":
        return None
    return (
        f"q has {rows} rows per key head (queries times heads that share it); below {FEWEST_ROWS} "
        "XLA is faster"
    )


CPU = Supports(
    dtypes=native.DTYPES,
    without=("dropout_rate", "dropout_key", "sequence_axis"),
    rules=(has_enough_rows, native_is_available),
)


# Of longer blocks the C++ functions take as much as there is, and as they have room for.
CPU_LIMITS = Limits(
    {f"{way}.{field}": COUNT for way in ("fwd", "bwd") for field in ("q_blocksize", "kv_blocksize")}
)


class FlashAttentionOnCPU:
    """The methods of the kernel that serve a CPU; `FlashAttention` inherits them.

    The gradient of a bias is the whole score matrix, or sums of it over any of its axes, to which
    several threads would have to add: where it is needed, the backward pass is that of `vjp_xla`,
    with blocks of its own.
    """

    config_type: Any
    run_xla: Callable[..., Any]
    vjp_xla: Callable[..., Any]

    def heuristic_cfg_cpu(self, inv: Invocation[Any, Any]) -> FlashAttentionConfig:
        return _config(_forward_blocks(inv), BACKWARD)

    def candidate_cfgs_cpu(self, inv: Invocation[Any, Any]) -> list[FlashAttentionConfig]:
        # The passes do not share anything, so each is varied while the other stays as it is.
        q, k, _ = inv.args
        rows, keys = q.shape[1] * q.shape[2] // k.shape[2], k.shape[1]
        forward = _forward_blocks(inv)
        return [
            *(_config(b, BACKWARD) for b in _that_differ(FORWARD_CANDIDATES, rows, keys)),
            *(_config(forward, b) for b in _that_differ(BACKWARD_CANDIDATES, rows, keys)),
        ]

    def run_cpu(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
        return self.fwd_with_residuals_cpu(q, k, v, **options)[0]

    def fwd_with_residuals_cpu(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: FlashAttentionConfig,
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Any, jax.Array]:
        block_q, block_k = _blocks(cfg.fwd, FORWARD)
        arrays, fixed = split((q, k, v, options))

        def in_cpp(*arrays: jax.Array) -> Any:
            q, k, v, options = fixed.merge(arrays)
            return native.forward(q, k, v, block_q=block_q, block_k=block_k, **_given(options))

        def by_xla(*arrays: jax.Array) -> Any:
            q, k, v, options = fixed.merge(arrays)
            return self.run_xla(q, k, v, cfg=self.config_type(), return_lse=True, **options)

        out, lse = call(in_cpp, by_xla, *arrays)
        return ((out, lse) if return_lse else out), lse

    def vjp_cpu(
        self,
        lse: jax.Array,
        out: Any,
        dout: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        cfg: FlashAttentionConfig,
        return_lse: bool = False,
        differentiated: frozenset[str],
        **options: Any,
    ) -> tuple[Any, ...]:
        if "bias" in differentiated:
            options |= {"return_lse": return_lse, "differentiated": differentiated}
            other = dataclasses.replace(cfg, bwd=BwdParams())
            gradients: tuple[Any, ...] = self.vjp_xla(lse, out, dout, q, k, v, cfg=other, **options)
            return gradients
        block_q, block_k = _blocks(cfg.bwd, BACKWARD)
        dlse = None
        if return_lse:
            (out, _), (dout, dlse) = out, dout
        arrays, fixed = split((q, k, v, out, lse, dout, dlse, options))

        def in_cpp(*arrays: jax.Array) -> tuple[Any, ...]:
            *given, dlse, options = fixed.merge(arrays)
            options = {**_given(options), "block_q": block_q, "block_k": block_k}
            return native.backward(*given, dlse=dlse, **options)

        def by_xla(*arrays: jax.Array) -> tuple[Any, ...]:
            q, k, v, out, lse, dout, dlse, options = fixed.merge(arrays)
            if dlse is not None:
                out, dout = (out, lse), (dout, dlse)
            options |= {"return_lse": dlse is not None, "differentiated": differentiated}
            found = self.vjp_xla(lse, out, dout, q, k, v, cfg=self.config_type(), **options)
            return (*found[:3], found[3].get("sinks"))

        dq, dk, dv, dsinks = call(in_cpp, by_xla, *arrays)
        if dsinks is None:
            return dq, dk, dv
        return dq, dk, dv, {"sinks": dsinks}


def _forward_blocks(inv: Invocation[Any, Any]) -> Blocks:
    """Blocks of rows so short that every thread has several: the last one keeps none waiting.

    Blocks of keys that stay in the second-level cache: the longer the heads, the fewer keys.
    """
    q = inv.args[0]
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    keys = max(1, FORWARD[1] * 64 // max(64, q.shape[3]))
    return max(24, min(FORWARD[0], rows // (4 * _threads()))), keys


def _threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that `native` knows: the others are not given, or `CPU` would not serve."""
    return {name: value for name, value in options.items() if name not in CPU.without}


def _blocks(params: FwdParams | BwdParams, default: Blocks) -> Blocks:
    return params.q_blocksize or default[0], params.kv_blocksize or default[1]


def _config(forward: Blocks, backward: Blocks) -> FlashAttentionConfig:
    from .kernel import FlashAttentionConfig

    return FlashAttentionConfig(
        FwdParams(q_blocksize=forward[0], kv_blocksize=forward[1]),
        BwdParams(q_blocksize=backward[0], kv_blocksize=backward[1]),
    )


def _that_differ(blocks: tuple[Blocks, ...], rows: int, keys: int) -> list[Blocks]:
    """Blocks no longer than what there is, each once."""
    return list(dict.fromkeys((min(q, rows), min(k, keys)) for q, k in blocks))
