"""Limits and fields that the configs of several operations share."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from ejkernel.ops import Limit

COUNT = Limit(minimum=1, maximum=2**31 - 1)
"""Of something that is cut to what there is: rows, keys, heads, pages."""

SUBLANES = Limit(minimum=8, maximum=2**15, multiple_of=8)
"""The second last axis of a block on a TPU."""

LANES = Limit(minimum=128, maximum=2**15, multiple_of=128)
"""The last axis of a block on a TPU."""

TRITON_SIDE = Limit(minimum=16, maximum=1024, power_of_two=True)
"""A side of a Triton tile that goes into a product."""

WARPS = Limit(minimum=1, maximum=32, power_of_two=True)
STAGES = Limit(minimum=1, maximum=16)


def launch(prefix: str) -> dict[str, Limit]:
    """How a Triton kernel is launched, for the fields behind a prefix such as `backward_`."""
    return {f"{prefix}num_warps": WARPS, f"{prefix}num_stages": STAGES}


@dataclasses.dataclass(frozen=True)
class TpuBlocks:
    """Blocks of a product `(m, k) @ (k, n)`: multiples of 128, cut to axes that are smaller."""

    block_m: Annotated[int, LANES] = 512
    block_n: Annotated[int, LANES] = 512
    block_k: Annotated[int, LANES] = 512

    def within(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """The three, no longer than the axes are."""
        return min(self.block_m, m), min(self.block_n, n), min(self.block_k, k)


@dataclasses.dataclass(frozen=True)
class TritonBlocks:
    """Blocks of a product `(m, k) @ (k, n)`, powers of two, and how its kernel is launched."""

    block_m: Annotated[int, TRITON_SIDE] = 128
    block_n: Annotated[int, TRITON_SIDE] = 128
    block_k: Annotated[int, TRITON_SIDE] = 64
    num_warps: Annotated[int, WARPS] = 8
    num_stages: Annotated[int, STAGES] = 3
