"""Paged attention: decoding with keys and values in pages."""

from .kernel import PagedAttention, PagedAttentionConfig
from .reference import paged_attention_reference

__all__ = ["PagedAttention", "PagedAttentionConfig", "paged_attention_reference"]
