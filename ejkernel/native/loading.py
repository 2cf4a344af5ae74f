"""Bring libraries into this process and make them known to XLA."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pathlib
import threading
from typing import Any

import jax

from .building import (
    BuildFailed,
    Status,
    build_library,
    find,
    find_built,
    not_built_reason,
    open_library,
    status,
)
from .libraries import Library, declared_libraries, environment
from .toolchain import find_commands, find_compiler

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_loaded: dict[str, tuple[str, tuple[str, ...]]] = {}  # file and handlers, by library
_failed: dict[tuple[str, ...], str] = {}  # what was tried, and is not tried again


def unavailable(library: Library) -> str | None:
    """None if the library can be called, or may be built when it is; else one sentence why not.

    Nothing is built, loaded or started: what a call's key depends on has no effects. What only
    trying can tell (`why_not`) is known here from then on.
    """
    mode = environment().NATIVE.read()
    if mode == "off":
        return "native kernels are turned off (EJKERNEL_NATIVE=off)"
    if library.name in _loaded:
        return None
    if (reason := _failed.get(_attempt(library, mode))) is not None:
        return reason
    commands = find_commands()
    if (mode == "auto" and not isinstance(commands, str)) or find_built(library) is not None:
        return None
    return not_built_reason(commands)


def why_not(library: Library) -> str | None:
    """None if the library can be called now; it is built and loaded if need be and allowed.

    Otherwise one sentence that says why it cannot.
    """
    with _lock:
        reason = unavailable(library)
        if reason is None and library.name not in _loaded:
            mode = environment().NATIVE.read()
            reason = _made_ready(library, mode)
            if reason is not None:
                _failed[_attempt(library, mode)] = reason
        return reason


def _attempt(library: Library, mode: str) -> tuple[str, ...]:
    """A library and what it would be made of: with other settings it is worth another try."""
    commands = find_commands()
    compiler = commands if isinstance(commands, str) else " ".join(commands[0])
    return library.name, mode, environment().CACHE_DIR.read(), compiler


def _made_ready(library: Library, mode: str) -> str | None:
    file = find(library)
    if file is None:
        compiler = find_compiler()
        if isinstance(compiler, str) or mode == "built":
            return not_built_reason(compiler)
        try:
            file = build_library(library)
        except BuildFailed as error:
            # Without a home folder the store has said so already.
            homeless = isinstance(error.__cause__, environment().NoHomeFolder)
            logger.log(logging.INFO if homeless else logging.WARNING, "%s", error)
            return str(error).splitlines()[0]
    return load(library, file)


def build(*, force: bool = False) -> Status:
    """Build what is not built yet, whatever `EJKERNEL_NATIVE` says; with `force` all of it.

    Raises `BuildFailed` with what the compiler said.
    """
    for library in declared_libraries():
        build_library(library, force=force)
    _failed.clear()
    return status()


def load_libraries() -> None:
    """Load every library now, built first if need be and allowed; raises a `RuntimeError` if not.

    Calling an operation does it by itself. A process that runs programs made elsewhere (executables
    that were serialised, exported programs that hold native calls) needs them before.
    """
    for library in declared_libraries():
        if (reason := why_not(library)) is not None:
            raise RuntimeError(f"the native library of {library.name} cannot be loaded: {reason}")


def load_built() -> None:
    """Load what is built, if that is allowed, and start no compiler: what importing may do.

    XLA looks for the handlers of a program when it loads it, which can be before any operation was
    called: an executable from another process, or from JAX's compilation cache.
    """
    with contextlib.suppress(environment().VariableError):  # first use says what is wrong with it
        if environment().NATIVE.read() == "off" or environment().CXX.read():
            return  # with CXX it depends on that compiler, which would have to be asked
        for library in declared_libraries():
            with _lock:
                file = find_built(library)
                problem = None if file is None else load(library, file)
            if problem is not None:
                logger.debug("%s", problem)


def load(library: Library, file: pathlib.Path) -> str | None:
    """Load a library's file and tell XLA of its handlers; None, or why that is not possible."""
    return _load(library.name, str(file), library.handlers)


def _load(name: str, file: str, handlers: tuple[str, ...]) -> str | None:
    if name in _loaded:
        return None
    try:
        library = _opened(pathlib.Path(file))
        functions = {handler: getattr(library, handler) for handler in handlers}
    except (OSError, ValueError, AttributeError) as error:
        return f"the native library {file} cannot be loaded: {error}"
    for handler, function in functions.items():
        jax.ffi.register_ffi_target(handler, jax.ffi.pycapsule(function), platform="cpu")
    _loaded[name] = file, handlers
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
    """The files of the libraries that this process has loaded."""
    return {name: file for name, (file, _) in _loaded.items()}


def for_workers() -> dict[str, list[Any]]:
    """What a worker of this process must load too, as plain data for its `load_same`."""
    return {name: [file, list(handlers)] for name, (file, handlers) in _loaded.items()}


def load_same(libraries: dict[str, list[Any]]) -> None:
    """Load what another process of this user has loaded."""
    for name, (file, handlers) in libraries.items():
        with _lock:
            problem = _load(name, file, tuple(handlers))
        if problem is not None:
            raise RuntimeError(problem)
