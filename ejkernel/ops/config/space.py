"""The declared space of configs, where users of `ejkernel.ops.config` look for it."""

from ..core.space import Space

__all__ = ["Space"]
