"""What is called: kernels, their invocations, which method runs, how gradients are made."""

from .invocation import BatchAxes, Invocation
from .kernel import Kernel
from .near import Dimension, NearShapes
from .supports import NotSupported, Supports
from .types import Cfg, ConfigKey, Out

__all__ = [
    "BatchAxes",
    "Cfg",
    "ConfigKey",
    "Dimension",
    "Invocation",
    "Kernel",
    "NearShapes",
    "NotSupported",
    "Out",
    "Supports",
]
