"""Build libraries into the cache folder, and tell what is there.

A library's file name says what it was made of: `flash_attention-KEY-COMPILER.so`, with a key of its
source, the flags, the processor and jaxlib. A machine without a compiler (a slim image, say) uses
what another step built there, whatever the compiler was.

Whoever builds holds a lock, compiles into a file of another name, and moves it into place when it
is whole. What a killed build leaves behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import hashlib
import logging
import os
import pathlib
import stat
import time
import uuid
from collections.abc import Iterator

from ..store.private import PrivateFolder, why_not_writable
from .libraries import INCLUDE, Library, declared_libraries, environment
from .toolchain import FLAGS, Compiler, find_compiler, processor

logger = logging.getLogger(__name__)


_UNFINISHED = ".building-"
_WRITABLE = stat.S_IWOTH | stat.S_IWGRP


class BuildFailed(RuntimeError):
    """A library could not be built; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the native kernels can be used, and if not, why.

    Args:
      available: they are used, or will be after a build that `EJKERNEL_NATIVE=auto` allows.
      built: their files are there.
      mode: the value of `EJKERNEL_NATIVE`.
      compiler: what it calls itself, or why there is none.
      folder: where the files are stored.
      files: by library, those that are there.
      reason: one sentence: what will happen, or why it cannot.
    """

    available: bool
    built: bool
    mode: str
    compiler: str
    folder: pathlib.Path
    files: dict[str, pathlib.Path]
    reason: str

    def __str__(self) -> str:
        return self.reason


def status() -> Status:
    """What is there and what will be used. Builds nothing, loads nothing."""
    mode, compiler, problem = environment().NATIVE.read(), find_compiler(), _why_not_stored()
    version = compiler if isinstance(compiler, str) else compiler.version
    try:
        where = folder()
    except environment().NoHomeFolder:
        where = pathlib.Path(environment().CACHE_DIR.read(), "native")
    found = {library.name: find(library) for library in declared_libraries()}
    files = {name: file for name, file in found.items() if file is not None}
    built = 0 < len(files) == len(declared_libraries())
    compiles = mode == "auto" and isinstance(compiler, Compiler) and problem is None
    if mode == "off":
        reason = "native kernels are turned off (EJKERNEL_NATIVE=off)"
    elif built:
        reason = f"native kernels are built and used, from {where}"
    elif problem is not None:
        reason = problem
    elif compiles:
        reason = f"native kernels will be built on first use, with {version}"
    else:
        reason = not_built_reason(compiler)
    return Status(
        available=mode != "off" and (built or compiles),
        built=built,
        mode=mode,
        compiler=version,
        folder=where,
        files=files,
        reason=reason,
    )


def _why_not_stored() -> str | None:
    """Why nothing can be built, or loaded, whatever the compiler is."""
    try:
        where = folder()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            PrivateFolder.open(where).close()
    except OSError as error:
        return f"native kernels cannot be stored: {error.strerror or error}"
    reason = why_not_writable(where)
    return reason and (
        f"native kernels cannot be stored in {where}: {reason}; EJKERNEL_CACHE_DIR names another "
        "folder"
    )


def not_built_reason(compiler: object) -> str:
    """Why a library is not built: there is no compiler, or it may not be used unasked."""
    if isinstance(compiler, str):
        return f"native kernels are not built, and {compiler}"
    return (
        "native kernels are not built; build them with `ejkernel native build` "
        "(ejkernel.native.build()), or allow it on first use with EJKERNEL_NATIVE=auto"
    )


def build_library(library: Library, *, force: bool = False) -> pathlib.Path:
    """The library's file, built if it is not there (or in any case, with `force`)."""
    if not force and (found := find(library)) is not None:
        return found
    compiler = find_compiler()
    if isinstance(compiler, str):
        raise BuildFailed(f"native kernels cannot be built: {compiler}")
    name = file_name(library, compiler)
    try:
        with PrivateFolder.open(folder(), create=True) as place, _alone(place):
            if force or not _is_trusted(place, name):  # else another process was faster
                _build(library, compiler, place, name)
            return place.path / name
    except environment().NoHomeFolder as error:
        raise BuildFailed(f"native kernels cannot be stored: {error}") from error
    except OSError as error:
        where = error.filename or folder()
        raise BuildFailed(
            f"native kernels cannot be stored in {where}: {error.strerror or error}; "
            "EJKERNEL_CACHE_DIR names another folder"
        ) from error


def _build(library: Library, compiler: Compiler, place: PrivateFolder, name: str) -> None:
    import jax

    logger.warning(
        "compiling the native kernels of %s for this processor with %s; this is done once and "
        "takes some seconds (EJKERNEL_NATIVE=off does without)",
        library.name,
        compiler.version,
    )
    for left in place.names():
        if left.startswith(_UNFINISHED):
            place.remove(left)
    unfinished = f"{_UNFINISHED}{uuid.uuid4().hex}.so"
    began = time.monotonic()
    try:
        include = (INCLUDE, *library.headers, pathlib.Path(jax.ffi.include_dir()))
        said = compiler.compile(library.source, include, unfinished, _reached(place))
        try:
            with place.opened(unfinished, never=0) as descriptor:
                if hasattr(os, "fchmod"):
                    os.fchmod(descriptor, 0o700)
                os.fsync(descriptor)
        except (FileNotFoundError, ValueError) as error:
            said = said or f"it wrote no library ({error})"
        if said is not None:
            raise BuildFailed(
                f"native kernels of {library.name} cannot be compiled with "
                f"{' '.join(compiler.command)} ({compiler.version}): {said}"
            )
        place.move(unfinished, place, name)
    finally:
        place.remove(unfinished)
    logger.info("compiled %s in %.1f s", place.path / name, time.monotonic() - began)


def _reached(place: PrivateFolder) -> str:
    """A path that leads to the very folder that is open, if the system has one."""
    through = f"/proc/self/fd/{place.descriptor}"  # a child has the same descriptor until it starts
    return through if place.descriptor is not None and os.path.isdir(through) else str(place.path)


@contextlib.contextmanager
def _alone(place: PrivateFolder) -> Iterator[None]:
    """Hold the folder: one build at a time. The lock ends with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # not POSIX: two builds at once both end with a whole file
        yield
        return
    assert place.descriptor is not None
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(place.descriptor, fcntl.LOCK_EX)
    yield


# --- files ---------------------------------------------------------------------------------------


def folder() -> pathlib.Path:
    """Where libraries are stored; `NoHomeFolder` if there is no such place."""
    where: pathlib.Path = environment().cache_folder("native")
    return where


def find(library: Library) -> pathlib.Path | None:
    """The library's file, if it is there and no other user could have put it there.

    Whoever loads it opens it again, and checks what was opened: see `open_library`.
    """
    compiler = find_compiler()
    return find_built(library, None if isinstance(compiler, str) else compiler)


def find_built(library: Library, compiler: Compiler | None = None) -> pathlib.Path | None:
    """The same, whichever compiler has made it if none is given: none is started to be asked."""
    with contextlib.suppress(OSError), PrivateFolder.open(folder()) as place:
        for name in fnmatch.filter(place.names(), file_name(library, compiler)):
            if _is_trusted(place, name):
                return place.path / name
    return None


def open_library(file: pathlib.Path) -> int:
    """A descriptor of a library that no other user could have made or changed.

    What is loaded runs with our rights: it must be ours, in a folder of ours, where nobody else can
    replace it. Raises `OSError` or `ValueError` with the reason.
    """
    with PrivateFolder.open(file.parent) as place:
        return place.open_file(file.name, never=_WRITABLE)


def file_name(library: Library, compiler: Compiler | None) -> str:
    """What the library is called when this compiler makes it; with None, a pattern for any."""
    import jaxlib

    version = getattr(jaxlib, "__version__", "")
    key = _short(library.source_hash(), *FLAGS, processor(), version)
    made_by = "*" if compiler is None else _short(*compiler.command, compiler.version)
    return f"{library.name}-{key}-{made_by}.so"


def _short(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _is_trusted(place: PrivateFolder, name: str) -> bool:
    try:
        with place.opened(name, never=_WRITABLE):
            return True
    except (OSError, ValueError):
        return False
