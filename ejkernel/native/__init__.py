"""Kernels in C++, compiled on this machine for this machine when they are first needed.

The wheel holds their source, and the operation that has one declares it (`declare`). A library is
built with the C++ compiler of the machine, stored in the cache folder, and called by XLA through
its foreign function interface. Without a compiler everything works as before: the XLA
implementations run, and `status` says why::

    python -c "import ejkernel.modules; from ejkernel import native; print(native.build())"

`EJKERNEL_NATIVE` says what is allowed: `auto` (build on first use), `built` (use what
:func:`build` has made, never compile unasked), `off`.
"""

from .building import BuildFailed, Status, status
from .calling import in_exports
from .libraries import Library, declare, declared_libraries, provide_environment
from .loading import build, load_libraries, loaded, unavailable, why_not
from .toolchain import find_compiler

__all__ = [
    "BuildFailed",
    "Library",
    "Status",
    "build",
    "declare",
    "declared_libraries",
    "find_compiler",
    "in_exports",
    "load_libraries",
    "loaded",
    "provide_environment",
    "status",
    "unavailable",
    "why_not",
]
