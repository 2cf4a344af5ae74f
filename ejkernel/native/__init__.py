"""Kernels in C++, compiled on this machine for this machine when they are first needed.

The wheel holds their source. A library is built with the C++ compiler that is found, kept in the
cache folder, and called by XLA through its foreign function interface. Without a compiler
everything works as before: the XLA implementations serve, and :func:`status` says why::

    python -c "import ejkernel.native as native; print(native.build()); print(native.status())"

`EJKERNEL_NATIVE` says what is allowed: `auto` (build on first use), `built` (use what
:func:`build` has made, never compile unasked), `off`.
"""

from .calling import in_exports
from .libraries import FLASH_ATTENTION, LIBRARIES, Library
from .loading import load_libraries, loaded, why_not
from .state import BuildFailed, Status, build, status
from .toolchain import find_compiler

__all__ = [
    "FLASH_ATTENTION",
    "LIBRARIES",
    "BuildFailed",
    "Library",
    "Status",
    "build",
    "find_compiler",
    "in_exports",
    "load_libraries",
    "loaded",
    "status",
    "why_not",
]
