"""Grouped matrix product: every row times the matrix of its group."""

from .kernel import GroupedMatmul as GroupedMatmul
from .pallas_gpu import GroupedMatmulGpuBlocks as GroupedMatmulGpuBlocks
from .pallas_gpu import GroupedMatmulGpuConfig as GroupedMatmulGpuConfig
from .pallas_tpu import GroupedMatmulTpuBlocks as GroupedMatmulTpuBlocks
from .pallas_tpu import GroupedMatmulTpuConfig as GroupedMatmulTpuConfig
from .reference import grouped_matmul_reference as grouped_matmul_reference
from .xla import GroupedMatmulXlaConfig as GroupedMatmulXlaConfig

GroupedMatmulConfig = GroupedMatmulXlaConfig | GroupedMatmulTpuConfig | GroupedMatmulGpuConfig
"""A config of any implementation; its class says of which."""
