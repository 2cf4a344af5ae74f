"""Ready-made operations.

>>> import jax
>>> from ejkernel.modules import flash_attention
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32))
>>> flash_attention(q, k, v, causal=True).shape
(1, 128, 4, 32)
"""

from ejkernel.kernels.flash_attention import FlashAttentionConfig
from ejkernel.kernels.gated_linear_unit import GatedLinearUnitConfig
from ejkernel.kernels.grouped_matmul import GroupedMatmulConfig

from .flash_attention import flash_attention
from .gated_linear_unit import gated_linear_unit
from .grouped_matmul import grouped_matmul
from .supported import support_table, supported

OPERATIONS = ("flash_attention", "gated_linear_unit", "grouped_matmul")
"""The operations by name; each is the function of that name."""

__all__ = [
    "OPERATIONS",
    "FlashAttentionConfig",
    "GatedLinearUnitConfig",
    "GroupedMatmulConfig",
    "flash_attention",
    "gated_linear_unit",
    "grouped_matmul",
    "support_table",
    "supported",
]
