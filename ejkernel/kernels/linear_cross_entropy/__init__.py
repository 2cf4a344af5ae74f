"""The loss of a language model's last layer without its logits in memory."""

from .blocks import LinearCrossEntropyConfig
from .kernel import LinearCrossEntropy
from .reference import linear_cross_entropy_reference

__all__ = ["LinearCrossEntropy", "LinearCrossEntropyConfig", "linear_cross_entropy_reference"]
