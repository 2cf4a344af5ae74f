"""RMS norm with a fused gradient."""

from .kernel import RmsNorm
from .reference import rms_norm_reference

__all__ = ["RmsNorm", "rms_norm_reference"]
