"""Gated linear attention: a recurrence with decay, in steps or in chunks."""

from .kernel import GatedLinearAttention, GatedLinearAttentionConfig
from .reference import gated_linear_attention_reference

__all__ = [
    "GatedLinearAttention",
    "GatedLinearAttentionConfig",
    "gated_linear_attention_reference",
]
