"""Attention with keys and values in pages: one step of decoding, or packed tokens of any number."""

from .kernel import PagedAttention, RaggedPagedAttention
from .native import PagedAttentionCppConfig
from .pallas_gpu import PagedAttentionGpuConfig, RaggedPagedAttentionGpuConfig
from .pallas_tpu import PagedAttentionTpuConfig, RaggedPagedAttentionTpuConfig
from .reference import paged_attention_reference, ragged_paged_attention_reference
from .xla import PagedAttentionXlaConfig, RaggedPagedAttentionXlaConfig

PagedAttentionConfig = (
    PagedAttentionXlaConfig
    | PagedAttentionCppConfig
    | PagedAttentionTpuConfig
    | PagedAttentionGpuConfig
)
"""A config of any implementation; its class says of which."""

RaggedPagedAttentionConfig = (
    RaggedPagedAttentionXlaConfig
    | PagedAttentionCppConfig
    | RaggedPagedAttentionTpuConfig
    | RaggedPagedAttentionGpuConfig
)
"""The same of the packed form."""

__all__ = [
    "PagedAttention",
    "PagedAttentionConfig",
    "PagedAttentionCppConfig",
    "PagedAttentionGpuConfig",
    "PagedAttentionTpuConfig",
    "PagedAttentionXlaConfig",
    "RaggedPagedAttention",
    "RaggedPagedAttentionConfig",
    "RaggedPagedAttentionGpuConfig",
    "RaggedPagedAttentionTpuConfig",
    "RaggedPagedAttentionXlaConfig",
    "paged_attention_reference",
    "ragged_paged_attention_reference",
]
