"""Flash attention in C++, on CPU: `calls` has the calls of the library, `cpp/` its source.

What it does not have is XLA's: dropout, rings, and the gradient of a bias.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from ejkernel.native import Library, declare, unavailable, why_not
from ejkernel.native.calling import call
from ejkernel.ops import Invocation, Supports
from ejkernel.ops.core.invocation import split

from ...limits import COUNT
from .. import xla
from ..options import Options
from ..passes import Choices, PassesConfig, implementation
from . import calls

LIBRARY = declare(
    Library(
        "flash_attention",
        pathlib.Path(__file__).resolve().parent / "cpp" / "flash_attention.cc",
        (calls.FORWARD, calls.BACKWARD),
    )
)

_Size = Annotated[int | None, COUNT]  # of longer blocks C++ takes what there is and has room for
_CHOICES = ((48, 128), (96, 192), (96, 480), (192, 240), (192, 480), (384, 480))
_BACKWARD_CHOICES = ((48, 96), (96, 96), (48, 192), (96, 192), (192, 96), (192, 192))
_FEWEST_ROWS = 24


@dataclasses.dataclass(frozen=True)
class FlashAttentionCppConfig(PassesConfig):
    """The sizes of tiles in each pass; None leaves one to the heuristic.

    Args:
      block_q: rows that are worked on together: queries times the query heads of a key head.
      block_k: most keys in a tile; rounded to what the registers hold.
      backward_block_q: the same of the backward pass, as is the other one.
    """

    block_q: _Size = None
    block_k: _Size = None
    backward_block_q: _Size = None
    backward_block_k: _Size = None

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, options: Options) -> FlashAttentionCppConfig:
        """Blocks of rows so short that every thread has several: the last one keeps none waiting.

        Blocks of keys that stay in the second-level cache: the longer the heads, the fewer keys.
        Where there is enough work for all threads, 192 x 480 and 96 x 192 are the best; others are
        a few percent away.
        """
        has_affinity = hasattr(os, "sched_getaffinity")
        threads = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        block_q = max(24, min(192, rows // (4 * threads)))
        return cls(block_q, max(1, 480 * 64 // max(64, q.shape[3])), 96, 192)

    @classmethod
    def choices(cls, q: Any, k: Any, v: Any) -> tuple[Choices, Choices]:
        rows, keys = _rows_of_a_key_head(q, k), k.shape[1]
        ahead, back = (
            dict.fromkeys((min(block_q, rows), min(block_k, keys)) for block_q, block_k in choices)
            for choices in (_CHOICES, _BACKWARD_CHOICES)
        )
        return ahead, back


def _rows_of_a_key_head(q: Any, k: Any) -> int:
    return int(q.shape[1] * q.shape[2] // k.shape[2])


def _called(run: Callable[..., Any], by_xla: Callable[..., Any]) -> Callable[..., Any]:
    """A pass of the library; that of XLA in programs that leave this machine."""

    def in_either(*arguments: Any, **sizes: Any) -> Any:
        arrays, fixed = split(arguments)
        return call(
            lambda *arrays: run(*fixed.merge(arrays), **sizes),
            lambda *arrays: by_xla(*fixed.merge(arrays)),
            *arrays,
        )

    return in_either


def _has_enough_rows(inv: Invocation[Any, Any]) -> str | None:
    """Enough queries: all keys are packed first, and for a few queries XLA is faster.

    Who asks for this implementation, by name or with a config of its class, gets it.
    """
    requested = inv.kwargs.get("implementation") == "cpu" or CPP.takes(inv.override_cfg)
    rows = _rows_of_a_key_head(*inv.args[:2])
    if rows >= _FEWEST_ROWS or requested:
        return None
    return (
        f"q has {rows} rows per key head (queries times heads that share it); below {_FEWEST_ROWS} "
        "XLA is faster"
    )


def _is_available(inv: Invocation[Any, Any]) -> str | None:
    """A C++ compiler, or a library that was built before."""
    return unavailable(LIBRARY)


CPP = implementation(
    name="cpu",
    devices=("cpu",),
    config=FlashAttentionCppConfig,
    supports=Supports(
        dtypes=calls.DTYPES,
        without=("dropout_rate", "dropout_key", "sequence_axis"),
        rules=(_has_enough_rows, _is_available),
    ),
    build=partial(why_not, LIBRARY),
    attend=_called(calls.forward, xla.attend),
    differentiate=_called(calls.backward, xla.differentiate),
    differentiate_with_bias=xla.differentiate_with_bias,
)
