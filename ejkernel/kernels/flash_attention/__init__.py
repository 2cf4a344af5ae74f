"""Flash attention: exact attention without the score matrix in memory. See README.md here."""

from .kernel import FlashAttention
from .native import FlashAttentionCppConfig
from .pallas_gpu import FlashAttentionGpuConfig
from .pallas_tpu import FlashAttentionTpuConfig
from .reference import attention_reference
from .xla import FlashAttentionXlaConfig

FlashAttentionConfig = (
    FlashAttentionXlaConfig
    | FlashAttentionCppConfig
    | FlashAttentionTpuConfig
    | FlashAttentionGpuConfig
)
"""A config of any implementation; its class says of which."""

__all__ = [
    "FlashAttention",
    "FlashAttentionConfig",
    "FlashAttentionCppConfig",
    "FlashAttentionGpuConfig",
    "FlashAttentionTpuConfig",
    "FlashAttentionXlaConfig",
    "attention_reference",
]
