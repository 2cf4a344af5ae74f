"""Flash attention for TPU; `kernels` has the Pallas kernels, imported when one is traced."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel.ops import Implementation, Invocation, Limit, Limits, Supports

from ..pallas import NOT_SERVED, passes_by_kernels
from ..passes import each_pass_varied


@dataclasses.dataclass(frozen=True)
class FlashAttentionTpuConfig:
    """Most queries and keys in a tile of each pass, rounded up to multiples of 128.

    None leaves one to the heuristic.
    """

    block_q: int | None = None
    block_k: int | None = None
    backward_block_q: int | None = None
    backward_block_k: int | None = None


def heuristic_config(q: Any, k: Any, v: Any, **options: Any) -> FlashAttentionTpuConfig:
    """By the schedules of libtpu (docs/operations/flash_attention.md); no hardware confirmed it."""
    return FlashAttentionTpuConfig(512, 1024, 512, 1024)


_FORWARD = ((256, 512), (512, 512), (1024, 512), (1024, 1024), (512, 2048))
_BACKWARD = ((256, 512), (512, 512), (1024, 512), (1024, 1024), (256, 256))


def _kernels() -> Any:
    from . import kernels

    return kernels


def _heuristic(inv: Invocation[Any, Any]) -> FlashAttentionTpuConfig:
    return heuristic_config(*inv.args)


def _space(inv: Invocation[Any, Any]) -> list[FlashAttentionTpuConfig]:
    return each_pass_varied(_heuristic(inv), _FORWARD, _BACKWARD)


PALLAS_TPU: Implementation[FlashAttentionTpuConfig, Any] = Implementation(
    name="pallas",
    devices=("tpu",),
    config=FlashAttentionTpuConfig,
    heuristic=_heuristic,
    space=_space,
    supports=Supports(dtypes=("float32", "bfloat16"), without=NOT_SERVED),
    limits=Limits(
        {
            field.name: Limit(minimum=1, maximum=2**15)
            for field in dataclasses.fields(FlashAttentionTpuConfig)
        }
    ),
    **passes_by_kernels(heuristic_config, _kernels)._asdict(),
)
