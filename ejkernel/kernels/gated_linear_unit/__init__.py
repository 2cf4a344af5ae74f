"""Gated linear unit: two projections, of which one gates the other (SwiGLU, GeGLU, …)."""

from .activations import ACTIVATIONS
from .kernel import GatedLinearUnit, GatedLinearUnitConfig
from .reference import gated_linear_unit_reference

__all__ = [
    "ACTIVATIONS",
    "GatedLinearUnit",
    "GatedLinearUnitConfig",
    "gated_linear_unit_reference",
]
