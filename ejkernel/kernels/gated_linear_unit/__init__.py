"""The gated linear unit: SwiGLU, GeGLU and their relatives."""

from .kernel import GatedLinearUnit as GatedLinearUnit
from .pallas_gpu import GatedLinearUnitGpuConfig as GatedLinearUnitGpuConfig
from .pallas_tpu import GatedLinearUnitTpuConfig as GatedLinearUnitTpuConfig
from .reference import ACTIVATIONS as ACTIVATIONS
from .reference import gated_linear_unit_reference as gated_linear_unit_reference
from .xla import GatedLinearUnitXlaConfig as GatedLinearUnitXlaConfig

GatedLinearUnitConfig = (
    GatedLinearUnitXlaConfig | GatedLinearUnitTpuConfig | GatedLinearUnitGpuConfig
)
"""A config of any implementation; its class says of which."""
