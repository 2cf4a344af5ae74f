"""ejkernel: JAX operations that choose their own configuration.

Import what you need from `ejkernel.ops` (the framework) and `ejkernel.modules` (ready-made
operations). Two functions are here: `tunable` makes a kernel of a function, and `tune` tunes what a
function calls. Neither is imported before it is used, so that `import ejkernel` is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decorator import tunable as tunable
    from .tuning import tune as tune

__version__ = "0.1.0"

_HOMES = {"tunable": "decorator", "tune": "tuning"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
