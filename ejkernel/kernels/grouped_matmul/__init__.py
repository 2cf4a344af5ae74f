"""Grouped matrix product: every row times the matrix of its group."""

from .kernel import GroupedMatmul
from .pallas_gpu import GroupedMatmulGpuBlocks, GroupedMatmulGpuConfig
from .pallas_tpu import GroupedMatmulTpuBlocks, GroupedMatmulTpuConfig
from .reference import grouped_matmul_reference
from .xla import GroupedMatmulXlaConfig

GroupedMatmulConfig = GroupedMatmulXlaConfig | GroupedMatmulTpuConfig | GroupedMatmulGpuConfig
"""A config of any implementation; its class says of which."""

__all__ = [
    "GroupedMatmul",
    "GroupedMatmulConfig",
    "GroupedMatmulGpuBlocks",
    "GroupedMatmulGpuConfig",
    "GroupedMatmulTpuBlocks",
    "GroupedMatmulTpuConfig",
    "GroupedMatmulXlaConfig",
    "grouped_matmul_reference",
]
