"""The loss of a language model's last layer without its logits in memory."""

from .kernel import LinearCrossEntropy as LinearCrossEntropy
from .pallas_gpu import LinearCrossEntropyGpuConfig as LinearCrossEntropyGpuConfig
from .pallas_tpu import LinearCrossEntropyTpuConfig as LinearCrossEntropyTpuConfig
from .reference import linear_cross_entropy_reference as linear_cross_entropy_reference
from .xla import LinearCrossEntropyXlaConfig as LinearCrossEntropyXlaConfig

LinearCrossEntropyConfig = (
    LinearCrossEntropyXlaConfig | LinearCrossEntropyTpuConfig | LinearCrossEntropyGpuConfig
)
"""A config of any implementation; its class says of which."""
