"""What is called: kernels, their invocations, which method runs, how gradients are made."""

from .implementation import Implementation
from .invocation import BatchAxes, Invocation
from .kernel import Kernel
from .near import Dimension, NearShapes
from .partitioning import Partitioning, Shards
from .requirements import Limit, Limits, NotSupported, Supports
from .types import Cfg, ConfigKey, Out
from .work import Work

__all__ = [
    "BatchAxes",
    "Cfg",
    "ConfigKey",
    "Dimension",
    "Implementation",
    "Invocation",
    "Kernel",
    "Limit",
    "Limits",
    "NearShapes",
    "NotSupported",
    "Out",
    "Partitioning",
    "Shards",
    "Supports",
    "Work",
]
