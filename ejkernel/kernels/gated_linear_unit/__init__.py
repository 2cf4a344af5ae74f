"""The gated linear unit: SwiGLU, GeGLU and their relatives."""

from .activations import ACTIVATIONS
from .kernel import GatedLinearUnit
from .pallas_gpu import GatedLinearUnitGpuConfig
from .pallas_tpu import GatedLinearUnitTpuConfig
from .reference import gated_linear_unit_reference
from .xla import GatedLinearUnitXlaConfig

GatedLinearUnitConfig = (
    GatedLinearUnitXlaConfig | GatedLinearUnitTpuConfig | GatedLinearUnitGpuConfig
)
"""A config of any implementation; its class says of which."""

__all__ = [
    "ACTIVATIONS",
    "GatedLinearUnit",
    "GatedLinearUnitConfig",
    "GatedLinearUnitGpuConfig",
    "GatedLinearUnitTpuConfig",
    "GatedLinearUnitXlaConfig",
    "gated_linear_unit_reference",
]
