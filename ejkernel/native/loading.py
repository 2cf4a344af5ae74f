"""Bring libraries into this process and make them known to XLA."""

from __future__ import annotations

import ctypes
import logging
import pathlib
import threading

import jax

from ejkernel.ops.utils import environment

from .libraries import LIBRARIES, Library
from .state import BuildFailed, build_library, find, not_built_reason
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


def _try_to_build(library: Library, compiler: Compiler) -> str:
    try:
        build_library(library)
    except BuildFailed as error:
        logger.warning("%s", error)
        return str(error).splitlines()[0]
    return ""


def load(library: Library, file: pathlib.Path) -> str | None:
    """Load a library's file and tell XLA of its handlers; None, or why that is not possible."""
    if library.name in _loaded:
        return None
    try:
        functions = ctypes.CDLL(str(file))
        handlers = {name: getattr(functions, name) for name in library.handlers}
    except (OSError, AttributeError) as error:
        return f"the native library {file} cannot be loaded: {error}"
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    _loaded[library.name] = file
    return None


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
