"""Flash attention for GPU; `kernels` has the Pallas kernels, imported when one is traced."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel.ops import Implementation, Invocation, Limit, Limits, Supports

from ...limits import launch
from ..pallas import NOT_SERVED, passes_by_kernels
from ..passes import each_pass_varied


@dataclasses.dataclass(frozen=True)
class FlashAttentionGpuConfig:
    """Queries and keys in a tile of each pass, and how its kernels are launched.

    Blocks are rounded up to powers of two. None leaves a field to the heuristic.
    """

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    backward_block_q: int | None = None
    backward_block_k: int | None = None
    backward_num_warps: int | None = None
    backward_num_stages: int | None = None


def heuristic_config(q: Any, k: Any, v: Any, **options: Any) -> FlashAttentionGpuConfig:
    """The first choice for each pass."""
    forward, backward = _choices(q, v)
    return FlashAttentionGpuConfig(*forward[0], *backward[0])


_Launch = tuple[int, int, int, int]  # block_q, block_k, num_warps, num_stages


def _choices(q: Any, v: Any) -> tuple[list[_Launch], list[_Launch]]:
    """For each pass, the best guess first: sums stay in registers, tiles fit into shared memory."""
    features = max(q.shape[3], v.shape[3]) * (2 if q.dtype.itemsize == 4 else 1)
    if features <= 64:
        return (
            [(128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 32, 4, 3)],
            [(64, 64, 4, 2), (32, 64, 4, 2), (64, 128, 8, 2), (64, 32, 4, 2)],
        )
    if features <= 128:
        return (
            [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 2), (128, 128, 8, 2)],
            [(64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2), (64, 32, 4, 2)],
        )
    return (
        [(64, 32, 4, 2), (32, 32, 4, 2), (64, 64, 8, 1)],
        [(32, 32, 8, 1), (16, 32, 4, 1), (32, 16, 4, 1)],
    )


def _kernels() -> Any:
    from . import kernels

    return kernels


def _heuristic(inv: Invocation[Any, Any]) -> FlashAttentionGpuConfig:
    return heuristic_config(*inv.args)


def _space(inv: Invocation[Any, Any]) -> list[FlashAttentionGpuConfig]:
    q, _, v = inv.args
    return each_pass_varied(_heuristic(inv), *_choices(q, v))


_MOST_FEATURES = 256


def _features_fit(inv: Invocation[Any, Any]) -> str | None:
    """A head_dim and a value_dim whose tiles fit into the shared memory of a multiprocessor."""
    q, _, v = inv.args
    for name, array in (("head_dim", q), ("value_dim", v)):
        if array.shape[3] > _MOST_FEATURES:
            return f"{name} is {array.shape[3]}, and at most {_MOST_FEATURES} are supported"
    return None


_SIDE = Limit(minimum=1, maximum=1024)

PALLAS_GPU: Implementation[FlashAttentionGpuConfig, Any] = Implementation(
    name="triton",
    devices=("gpu",),
    config=FlashAttentionGpuConfig,
    heuristic=_heuristic,
    space=_space,
    supports=Supports(
        dtypes=("float32", "bfloat16", "float16"),
        without=NOT_SERVED,
        rules=(_features_fit,),
    ),
    limits=Limits(
        {f"{way}block_{side}": _SIDE for way in ("", "backward_") for side in "qk"}
        | launch("")
        | launch("backward_")
    ),
    **passes_by_kernels(heuristic_config, _kernels)._asdict(),
)
