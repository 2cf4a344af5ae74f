"""Flash attention: exact attention without the score matrix in memory."""

from .kernel import FlashAttention, FlashAttentionConfig
from .reference import attention_reference

__all__ = ["FlashAttention", "FlashAttentionConfig", "attention_reference"]
