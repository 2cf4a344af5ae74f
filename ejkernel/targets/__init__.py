"""Devices that are not here: what compiles for them, what fits, and what it would cost.

>>> from ejkernel import targets
>>> targets.find("tpu-v5e").device_fingerprint
'tpu|tpu-v5-lite'

Nothing of a compiler is imported in this process: programs are lowered here and compiled in
processes of their own. `docs/targets.md` tells the whole story.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .catalog import GpuLimits, Target, TargetError, find, names

if TYPE_CHECKING:
    from .checking import Check, CheckResult, check
    from .compiler import Availability, Available, available, stop_workers
    from .pruning import StaticPruner, export
    from .ranking import Estimate

_LAZY = {
    "checking": ("Check", "CheckResult", "check"),
    "compiler": ("Availability", "Available", "available", "stop_workers"),
    "pruning": ("StaticPruner", "export"),
    "ranking": ("Estimate",),
}
"""By module: loaded when used, because importing this package starts and imports little."""

__all__ = [
    "Availability",
    "Available",
    "Check",
    "CheckResult",
    "Estimate",
    "GpuLimits",
    "StaticPruner",
    "Target",
    "TargetError",
    "available",
    "check",
    "export",
    "find",
    "names",
    "stop_workers",
]


def __getattr__(name: str) -> Any:
    for module, names_there in _LAZY.items():
        if name in names_there:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
