"""Flash attention for TPU; `kernels` has the Pallas kernels, imported when one is traced."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from ejkernel.ops import Limit

from ..options import Options
from ..pallas import pallas_implementation
from ..passes import Choices, PassesConfig

_Size = Annotated[int | None, Limit(minimum=1, maximum=2**15)]


@dataclasses.dataclass(frozen=True)
class FlashAttentionTpuConfig(PassesConfig):
    """Most queries and keys in a tile of each pass, rounded up to multiples of 128.

    None leaves one to the heuristic.
    """

    block_q: _Size = None
    block_k: _Size = None
    backward_block_q: _Size = None
    backward_block_k: _Size = None

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, options: Options) -> FlashAttentionTpuConfig:
        """By the schedules of libtpu (docs/operations/flash_attention.md), not by hardware."""
        return cls(512, 1024, 512, 1024)

    @classmethod
    def choices(cls, q: Any, k: Any, v: Any) -> tuple[Choices, Choices]:
        both = ((256, 512), (512, 512), (1024, 512), (1024, 1024))
        return (*both, (512, 2048)), (*both, (256, 256))


PALLAS_TPU = pallas_implementation(
    __name__,
    name="pallas",
    devices=("tpu",),
    config=FlashAttentionTpuConfig,
    dtypes=("float32", "bfloat16"),
)
