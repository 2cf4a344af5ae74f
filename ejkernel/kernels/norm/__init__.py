"""RMS norm and layer norm: two kernels that differ by a mean that is subtracted."""

from .kernel import LayerNorm, RmsNorm
from .pallas_gpu import NormGpuConfig
from .pallas_tpu import NormTpuConfig
from .reference import layer_norm_reference, rms_norm_reference
from .xla import NormXlaConfig

NormConfig = NormXlaConfig | NormTpuConfig | NormGpuConfig
"""A config of any implementation; its class says of which."""

__all__ = [
    "LayerNorm",
    "NormConfig",
    "NormGpuConfig",
    "NormTpuConfig",
    "NormXlaConfig",
    "RmsNorm",
    "layer_norm_reference",
    "rms_norm_reference",
]
