"""What RMS norm and layer norm share: they differ by a mean that is subtracted."""

from .kernel import NormConfig, NormKernel

__all__ = ["NormConfig", "NormKernel"]
