"""Gated linear attention: a recurrence with decay, in steps or in chunks."""

from .kernel import GatedLinearAttention
from .pallas_gpu import GatedLinearAttentionGpuConfig
from .pallas_tpu import GatedLinearAttentionTpuConfig
from .reference import gated_linear_attention_reference
from .xla import GatedLinearAttentionXlaConfig

GatedLinearAttentionConfig = (
    GatedLinearAttentionXlaConfig | GatedLinearAttentionTpuConfig | GatedLinearAttentionGpuConfig
)
"""A config of any implementation; its class says of which."""

__all__ = [
    "GatedLinearAttention",
    "GatedLinearAttentionConfig",
    "GatedLinearAttentionGpuConfig",
    "GatedLinearAttentionTpuConfig",
    "GatedLinearAttentionXlaConfig",
    "gated_linear_attention_reference",
]
