"""Ready-made operations.

>>> import jax
>>> from ejkernel.modules import flash_attention
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32))
>>> flash_attention(q, k, v, causal=True).shape
(1, 128, 4, 32)
"""

from ejkernel.kernels.flash_attention import FlashAttentionConfig
from ejkernel.kernels.gated_linear_attention import GatedLinearAttentionConfig
from ejkernel.kernels.gated_linear_unit import GatedLinearUnitConfig
from ejkernel.kernels.grouped_matmul import GroupedMatmulConfig
from ejkernel.kernels.linear_cross_entropy import LinearCrossEntropyConfig
from ejkernel.kernels.norm import NormConfig
from ejkernel.kernels.paged_attention import PagedAttentionConfig, RaggedPagedAttentionConfig
from ejkernel.native.loading import load_built

from .flash_attention import flash_attention
from .gated_linear_attention import gated_linear_attention
from .gated_linear_unit import gated_linear_unit
from .grouped_matmul import grouped_matmul
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .paged_attention import paged_attention
from .ragged_paged_attention import ragged_paged_attention
from .rms_norm import rms_norm
from .supported import support_table, supported
from .update_pages import update_pages

load_built()  # a program from another process may call it before an operation is called here

OPERATIONS = (
    "flash_attention",
    "paged_attention",
    "grouped_matmul",
    "rms_norm",
    "layer_norm",
    "linear_cross_entropy",
    "gated_linear_attention",
    "gated_linear_unit",
    "ragged_paged_attention",
)
"""The operations by name; each is the function of that name."""

__all__ = [
    "OPERATIONS",
    "FlashAttentionConfig",
    "GatedLinearAttentionConfig",
    "GatedLinearUnitConfig",
    "GroupedMatmulConfig",
    "LinearCrossEntropyConfig",
    "NormConfig",
    "PagedAttentionConfig",
    "RaggedPagedAttentionConfig",
    "flash_attention",
    "gated_linear_attention",
    "gated_linear_unit",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "paged_attention",
    "ragged_paged_attention",
    "rms_norm",
    "support_table",
    "supported",
    "update_pages",
]
