"""Layer norm with a fused gradient."""

from .kernel import LayerNorm
from .reference import layer_norm_reference

__all__ = ["LayerNorm", "layer_norm_reference"]
