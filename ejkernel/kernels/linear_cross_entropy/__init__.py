"""The loss of a language model's last layer without its logits in memory."""

from .kernel import LinearCrossEntropy
from .pallas_gpu import LinearCrossEntropyGpuConfig
from .pallas_tpu import LinearCrossEntropyTpuConfig
from .reference import linear_cross_entropy_reference
from .xla import LinearCrossEntropyXlaConfig

LinearCrossEntropyConfig = (
    LinearCrossEntropyXlaConfig | LinearCrossEntropyTpuConfig | LinearCrossEntropyGpuConfig
)
"""A config of any implementation; its class says of which."""

__all__ = [
    "LinearCrossEntropy",
    "LinearCrossEntropyConfig",
    "LinearCrossEntropyGpuConfig",
    "LinearCrossEntropyTpuConfig",
    "LinearCrossEntropyXlaConfig",
    "linear_cross_entropy_reference",
]
