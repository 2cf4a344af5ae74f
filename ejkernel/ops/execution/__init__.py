"""Run it: executors, batches, tuning on demand and offline."""

from .batch import pmap_with_config, vmap_with_config
from .executor import ConfigChooser, Executor, default_executor, set_default_executor
from .offline import autotune_lowered
from .results import AutotuningResult, Entry
from .tuning import autotune, autotune_recorded, benchmark

__all__ = [
    "AutotuningResult",
    "ConfigChooser",
    "Entry",
    "Executor",
    "autotune",
    "autotune_lowered",
    "autotune_recorded",
    "benchmark",
    "default_executor",
    "pmap_with_config",
    "set_default_executor",
    "vmap_with_config",
]
