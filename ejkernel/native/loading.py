"""Bring libraries into this process and make them known to XLA."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pathlib
import threading

import jax

from ejkernel.ops.utils import environment

from .libraries import LIBRARIES, Library
from .state import (
    BuildFailed,
    build_library,
    find,
    find_built,
    not_built_reason,
    open_library,
)
from .toolchain import Compiler, find_compiler

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_loaded: dict[str, pathlib.Path] = {}
_failed: dict[tuple[str, object], str] = {}  # by library and compiler: it is not tried again


def why_not(library: Library) -> str | None:
    """None if the library can be called now; it is built and loaded if need be and allowed.

    Otherwise one sentence that says why it cannot.
    """
    mode = environment.NATIVE.read()
    if mode == "off":
        return "native kernels are turned off (EJKERNEL_NATIVE=off)"
    if library.name in _loaded:
        return None
    with _lock:
        if library.name in _loaded:
            return None
        file = find(library)
        if file is None:
            compiler = find_compiler()
            if isinstance(compiler, str):
                return f"native kernels are not built, and {compiler}"
            if mode == "built":
                return not_built_reason()
            attempt = (library.name, compiler)
            if attempt not in _failed:
                _failed[attempt] = _try_to_build(library, compiler)
            if _failed[attempt]:
                return _failed[attempt]
            file = find(library)
        if file is None:
            return f"the native library of {library.name} was removed while it was being built"
        return load(library, file)


def load_libraries() -> None:
    """Load every library now, built first if need be and allowed; raises a `RuntimeError` if not.

    Calling an operation does it by itself. A process that runs programs made elsewhere (executables
    that were serialised, exported programs that hold native calls) needs them before.
    """
    for library in LIBRARIES:
        if (reason := why_not(library)) is not None:
            raise RuntimeError(f"the native library of {library.name} cannot be loaded: {reason}")


def load_built() -> None:
    """Load what is built, if that is allowed, and start no compiler: what importing may do.

    XLA looks for the handlers of a program when it loads it, which can be before any operation was
    called: an executable from another process, or from JAX's compilation cache.
    """
    with contextlib.suppress(environment.VariableError):  # first use says what is wrong with it
        if environment.NATIVE.read() != "off":
            _load_built()


def _load_built() -> None:
    if environment.CXX.read():
        return  # it depends on that compiler, which would have to be asked
    for library in LIBRARIES:
        with _lock:
            file = find_built(library)
            problem = None if file is None else load(library, file)
        if problem is not None:
            logger.debug("%s", problem)


def _try_to_build(library: Library, compiler: Compiler) -> str:
    try:
        build_library(library)
    except BuildFailed as error:
        # Without a home the store has said so already.
        homeless = isinstance(error.__cause__, environment.NoHomeFolder)
        logger.log(logging.INFO if homeless else logging.WARNING, "%s", error)
        return str(error).splitlines()[0]
    return ""


def load(library: Library, file: pathlib.Path) -> str | None:
    """Load a library's file and tell XLA of its handlers; None, or why that is not possible."""
    if library.name in _loaded:
        return None
    try:
        functions = _opened(file)
        handlers = {name: getattr(functions, name) for name in library.handlers}
    except (OSError, ValueError, AttributeError) as error:
        return f"the native library {file} cannot be loaded: {error}"
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    _loaded[library.name] = file
    return None


def _opened(file: pathlib.Path) -> ctypes.CDLL:
    """Load the very file that is checked, whatever its name means a moment later."""
    descriptor = open_library(file)
    through = f"/proc/self/fd/{descriptor}"
    known = os.path.exists(through)  # elsewhere only the name is left
    try:
        library = ctypes.CDLL(through if known else str(file))
    except OSError:
        os.close(descriptor)
        raise
    # Otherwise it stays open: the loader knows libraries by their paths, and would take the next
    # one with the same number for this one.
    if not known:
        os.close(descriptor)
    return library


def loaded() -> dict[str, str]:
    """The files in use by this process, by library: what a process that helps it must load too."""
    return {name: str(file) for name, file in _loaded.items()}


def load_same(files: dict[str, str]) -> None:
    """Load what another process of this user has loaded."""
    for library in LIBRARIES:
        if library.name in files:
            with _lock:
                problem = load(library, pathlib.Path(files[library.name]))
            if problem is not None:
                raise RuntimeError(problem)
