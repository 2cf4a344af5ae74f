"""Flash attention in C++, on CPU: `calls` has the calls of the library, `cpp/` its source.

What it does not have is XLA's: dropout, rings, and the gradient of a bias.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from functools import partial
from typing import Any

import jax

from ejkernel.native import Library, declare, unavailable, why_not
from ejkernel.native.calling import call
from ejkernel.ops import Implementation, Invocation, Limits, Supports
from ejkernel.ops.core.invocation import split

from ...limits import COUNT
from .. import options as call_options
from .. import xla
from ..passes import (
    Gradients,
    Options,
    Results,
    Sizes,
    backward_sizes,
    each_pass_varied,
    forward_sizes,
    passes_of,
)
from . import calls

LIBRARY = declare(
    Library(
        "flash_attention",
        pathlib.Path(__file__).resolve().parent / "cpp" / "flash_attention.cc",
        (calls.FORWARD, calls.BACKWARD),
    )
)


@dataclasses.dataclass(frozen=True)
class FlashAttentionCppConfig:
    """The sizes of tiles in each pass; None leaves one to the heuristic.

    Args:
      block_q: rows that are worked on together: queries times the query heads of a key head.
      block_k: most keys in a tile; rounded to what the registers hold.
      backward_block_q: the same of the backward pass, as is the other one.
    """

    block_q: int | None = None
    block_k: int | None = None
    backward_block_q: int | None = None
    backward_block_k: int | None = None


# The best where there is enough work for all threads; others are a few percent away.
_BLOCKS = (192, 480)
_BACKWARD_BLOCKS = (96, 192)


def heuristic_config(q: Any, k: Any, v: Any, **options: Any) -> FlashAttentionCppConfig:
    """Blocks of rows so short that every thread has several: the last one keeps none waiting.

    Blocks of keys that stay in the second-level cache: the longer the heads, the fewer keys.
    """
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    block_q = max(24, min(_BLOCKS[0], rows // (4 * _threads())))
    block_k = max(1, _BLOCKS[1] * 64 // max(64, q.shape[3]))
    return FlashAttentionCppConfig(block_q, block_k, *_BACKWARD_BLOCKS)


def _threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, sizes: Sizes, options: Options
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp; by XLA in programs that leave this machine."""
    arrays, fixed = split((q, k, v, options))

    def in_cpp(*arrays: jax.Array) -> Any:
        q, k, v, options = fixed.merge(arrays)
        return calls.forward(q, k, v, call_options.Options(**options), **sizes)

    def by_xla(*arrays: jax.Array) -> Any:
        q, k, v, options = fixed.merge(arrays)
        own = xla.heuristic_config(q, k, v, **options)
        return xla.attend(q, k, v, forward_sizes(own), options)

    out, lse = call(in_cpp, by_xla, *arrays)
    return out, lse


def differentiate(results: Results, sizes: Sizes, options: Options) -> Gradients:
    """The gradients of `q`, `k`, `v` and `sinks`; by XLA in programs that leave this machine."""
    arrays, fixed = split((results, options))

    def in_cpp(*arrays: jax.Array) -> Any:
        results, options = fixed.merge(arrays)
        return calls.backward(results, call_options.Options(**options), **sizes)

    def by_xla(*arrays: jax.Array) -> Any:
        results, options = fixed.merge(arrays)
        own = xla.heuristic_config(results.q, results.k, results.v, **options)
        return xla.differentiate(results, backward_sizes(own), options)

    gradients: Gradients = call(in_cpp, by_xla, *arrays)
    return gradients


_FEWEST_ROWS = 24


def _has_enough_rows(inv: Invocation[Any, Any]) -> str | None:
    """Enough queries: all keys are packed first, and for a few queries XLA is faster.

    Who asks for this implementation, by name or with a config of its class, gets it.
    """
    asked_for = inv.kwargs.get("implementation") == "cpu" or CPP.takes(inv.override_cfg)
    rows = _rows_of_a_key_head(inv)
    if rows >= _FEWEST_ROWS or asked_for:
        return None
    return (
        f"q has {rows} rows per key head (queries times heads that share it); below {_FEWEST_ROWS} "
        "XLA is faster"
    )


def _rows_of_a_key_head(inv: Invocation[Any, Any]) -> int:
    q, k, _ = inv.args
    return int(q.shape[1] * q.shape[2] // k.shape[2])


def _is_available(inv: Invocation[Any, Any]) -> str | None:
    """A C++ compiler, or a library that was built before."""
    return unavailable(LIBRARY)


def _heuristic(inv: Invocation[Any, Any]) -> FlashAttentionCppConfig:
    return heuristic_config(*inv.args)


_CHOICES = ((48, 128), (96, 192), (96, 480), (192, 240), (192, 480), (384, 480))
_BACKWARD_CHOICES = ((48, 96), (96, 96), (48, 192), (96, 192), (192, 96), (192, 192))


def _space(inv: Invocation[Any, Any]) -> list[FlashAttentionCppConfig]:
    rows, keys = _rows_of_a_key_head(inv), inv.args[1].shape[1]
    forward, backward = (
        dict.fromkeys((min(block_q, rows), min(block_k, keys)) for block_q, block_k in choices)
        for choices in (_CHOICES, _BACKWARD_CHOICES)
    )
    return each_pass_varied(_heuristic(inv), forward, backward)


CPP: Implementation[FlashAttentionCppConfig, Any] = Implementation(
    name="cpu",
    devices=("cpu",),
    config=FlashAttentionCppConfig,
    heuristic=_heuristic,
    space=_space,
    supports=Supports(
        dtypes=calls.DTYPES,
        without=("dropout_rate", "dropout_key", "sequence_axis"),
        rules=(_has_enough_rows, _is_available),
    ),
    # Of longer blocks the C++ functions take as much as there is, and as they have room for.
    limits=Limits({field.name: COUNT for field in dataclasses.fields(FlashAttentionCppConfig)}),
    build=partial(why_not, LIBRARY),
    **passes_of(heuristic_config, attend, differentiate, xla.differentiate_with_bias)._asdict(),
)
