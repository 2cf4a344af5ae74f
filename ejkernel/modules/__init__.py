"""Ready-made operations.

>>> import jax
>>> from ejkernel.modules import flash_attention
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 4, 32))
>>> flash_attention(q, k, v, causal=True).shape
(1, 128, 4, 32)
"""

from ejkernel.kernels.flash_attention import FlashAttentionConfig
from ejkernel.kernels.gated_linear_attention import GatedLinearAttentionConfig

from .flash_attention import flash_attention
from .gated_linear_attention import gated_linear_attention
from .supported import support_table, supported

OPERATIONS = ("flash_attention", "gated_linear_attention")
"""The operations by name; each is the function of that name."""

__all__ = [
    "OPERATIONS",
    "FlashAttentionConfig",
    "GatedLinearAttentionConfig",
    "flash_attention",
    "gated_linear_attention",
    "support_table",
    "supported",
]
