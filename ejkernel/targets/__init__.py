"""Devices that are not here: what compiles for them, what fits, and what it would cost.

>>> from ejkernel import targets
>>> targets.find("tpu-v5e").device_fingerprint
'tpu|tpu-v5-lite'

Nothing of a compiler is imported in this process: programs are lowered here and compiled in
processes of their own. `docs/targets.md` tells the whole story.
"""

from typing import TYPE_CHECKING, Any

from .catalog import GpuLimits, Target, TargetError, find, names

if TYPE_CHECKING:
    from .availability import Availability, Available, available
    from .checking import Check, CheckResult, check, check_call
    from .compiler import stop_workers
    from .exporting import export
    from .pruning import StaticPruner
    from .ranking import Estimate

_HOMES = {
    "Availability": "availability",
    "Available": "availability",
    "available": "availability",
    "Check": "checking",
    "CheckResult": "checking",
    "check": "checking",
    "check_call": "checking",
    "stop_workers": "compiler",
    "export": "exporting",
    "StaticPruner": "pruning",
    "Estimate": "ranking",
}

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
    "check_call",
    "export",
    "find",
    "names",
    "stop_workers",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # loaded when used: importing this package starts and imports little
        import importlib

        module = importlib.import_module(f".{_HOMES[name]}", __name__)
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
