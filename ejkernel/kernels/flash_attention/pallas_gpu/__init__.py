"""Flash attention for GPU; `kernels` has the Pallas kernels, imported when one is traced."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from ejkernel.ops import Invocation, Limit

from ...limits import STAGES, WARPS
from ..options import Options
from ..pallas import pallas_implementation
from ..passes import Choices, PassesConfig

_Size = Annotated[int | None, Limit(minimum=1, maximum=1024)]
_Warps = Annotated[int | None, WARPS]
_Stages = Annotated[int | None, STAGES]
_MOST_FEATURES = 256


@dataclasses.dataclass(frozen=True)
class FlashAttentionGpuConfig(PassesConfig):
    """Queries and keys in a tile of each pass, and how its kernels are launched.

    Blocks are rounded up to powers of two. None leaves a field to the heuristic.
    """

    block_q: _Size = None
    block_k: _Size = None
    num_warps: _Warps = None
    num_stages: _Stages = None
    backward_block_q: _Size = None
    backward_block_k: _Size = None
    backward_num_warps: _Warps = None
    backward_num_stages: _Stages = None

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, options: Options) -> FlashAttentionGpuConfig:
        """The first choice for each pass."""
        (ahead, *_), (back, *_) = cls.choices(q, k, v)
        return cls(*ahead, *back)

    @classmethod
    def choices(cls, q: Any, k: Any, v: Any) -> tuple[Choices, Choices]:
        """The best guess first: sums stay in registers, tiles fit into shared memory."""
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


def _features_fit(inv: Invocation[Any, Any]) -> str | None:
    """A head_dim and a value_dim whose tiles fit into the shared memory of a multiprocessor."""
    q, _, v = inv.args
    for name, array in (("head_dim", q), ("value_dim", v)):
        if array.shape[3] > _MOST_FEATURES:
            return f"{name} is {array.shape[3]}, and at most {_MOST_FEATURES} are supported"
    return None


PALLAS_GPU = pallas_implementation(
    __name__,
    name="triton",
    devices=("gpu",),
    config=FlashAttentionGpuConfig,
    dtypes=("float32", "bfloat16", "float16"),
    rules=(_features_fit,),
)
