"""Paged attention: decoding with keys and values in pages."""

from .kernel import PagedAttention
from .pallas_gpu import PagedAttentionGpuConfig
from .pallas_tpu import PagedAttentionTpuConfig
from .reference import paged_attention_reference
from .xla import PagedAttentionXlaConfig

PagedAttentionConfig = PagedAttentionXlaConfig | PagedAttentionTpuConfig | PagedAttentionGpuConfig
"""A config of any implementation; its class says of which."""

__all__ = [
    "PagedAttention",
    "PagedAttentionConfig",
    "PagedAttentionGpuConfig",
    "PagedAttentionTpuConfig",
    "PagedAttentionXlaConfig",
    "paged_attention_reference",
]
