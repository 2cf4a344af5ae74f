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
import hashlib
import logging
import os
import pathlib
import stat
import time
import uuid
from collections.abc import Iterator

from ejkernel.ops.utils import environment
from ejkernel.store.durable import flush_folder

from .libraries import INCLUDE, LIBRARIES, Library
from .toolchain import FLAGS, Compiler, find_compiler, processor

logger = logging.getLogger(__name__)


class BuildFailed(RuntimeError):
    """A library could not be built; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the native kernels can be used, and if not, why.

    Args:
      available: they serve, or will after a build that `EJKERNEL_NATIVE=auto` allows.
      built: their files are there.
      mode: the value of `EJKERNEL_NATIVE`.
      compiler: what it calls itself, or why there is none.
      folder: where the files are kept.
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
    mode, compiler, where = environment.NATIVE.read(), find_compiler(), folder()
    files = {library.name: file for library in LIBRARIES if (file := find(library)) is not None}
    built = len(files) == len(LIBRARIES)
    compiles = mode == "auto" and isinstance(compiler, Compiler)
    if mode == "off":
        reason = "native kernels are turned off (EJKERNEL_NATIVE=off)"
    elif built:
        reason = f"native kernels are built and used, from {where}"
    elif isinstance(compiler, str):
        reason = f"native kernels are not built, and {compiler}"
    elif compiles:
        reason = f"native kernels will be built on first use, with {compiler.version}"
    else:
        reason = not_built_reason()
    return Status(
        available=mode != "off" and (built or compiles),
        built=built,
        mode=mode,
        compiler=compiler if isinstance(compiler, str) else compiler.version,
        folder=where,
        files=files,
        reason=reason,
    )


def not_built_reason() -> str:
    """What to say when there is a compiler, but it may not be used unasked."""
    return (
        "native kernels are not built; build them with `ejkernel native build` "
        "(ejkernel.native.build()), or allow it on first use with EJKERNEL_NATIVE=auto"
    )


def build(*, force: bool = False) -> Status:
    """Build what is not built yet, whatever `EJKERNEL_NATIVE` says; with `force` all of it.

    Raises `BuildFailed` with what the compiler said.
    """
    for library in LIBRARIES:
        build_library(library, force=force)
    return status()


def build_library(library: Library, *, force: bool = False) -> pathlib.Path:
    """The library's file, built if it is not there (or in any case, with `force`)."""
    if not force and (found := find(library)) is not None:
        return found
    compiler = find_compiler()
    if isinstance(compiler, str):
        raise BuildFailed(f"native kernels cannot be built: {compiler}")
    file = folder() / file_name(library, compiler)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(file.parent):
            if force or not file.exists():  # else another process was faster
                _build(library, compiler, file)
    except OSError as error:
        where = error.filename or file.parent
        raise BuildFailed(
            f"native kernels cannot be kept in {where}: {error.strerror or error}; "
            "EJKERNEL_CACHE_DIR names another folder"
        ) from error
    return file


def _build(library: Library, compiler: Compiler, file: pathlib.Path) -> None:
    import jax

    logger.warning(
        "compiling the native kernels of %s for this processor with %s; this is done once and "
        "takes some seconds (EJKERNEL_NATIVE=off does without)",
        library.name,
        compiler.version,
    )
    for left in file.parent.glob(f"{_UNFINISHED}*"):
        left.unlink(missing_ok=True)
    unfinished = file.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}.so")
    began = time.monotonic()
    try:
        include = (INCLUDE, pathlib.Path(jax.ffi.include_dir()))
        said = compiler.compile(library.source, include, unfinished)
        if said is not None:
            raise BuildFailed(
                f"native kernels of {library.name} cannot be compiled with "
                f"{' '.join(compiler.command)} ({compiler.version}): {said}"
            )
        with open(unfinished, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(unfinished, file)
        flush_folder(file.parent)
    finally:
        unfinished.unlink(missing_ok=True)
    logger.info("compiled %s in %.1f s", file, time.monotonic() - began)


_UNFINISHED = ".building-"


@contextlib.contextmanager
def _alone(where: pathlib.Path) -> Iterator[None]:
    """Hold the folder: one build at a time. The lock ends with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # not POSIX: two builds at once both end with a whole file
        yield
        return
    descriptor = os.open(where, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- files ---------------------------------------------------------------------------------------


def folder() -> pathlib.Path:
    """Where libraries are kept."""
    return pathlib.Path(environment.CACHE_DIR.read()).expanduser() / "native"


def find(library: Library) -> pathlib.Path | None:
    """The library's file, if it is there and no other user could have put it there."""
    compiler = find_compiler()
    if isinstance(compiler, Compiler):
        candidates = [folder() / file_name(library, compiler)]
    else:
        candidates = sorted(folder().glob(f"{library.name}-{_key(library)}-*.so"))
    return next((file for file in candidates if _is_trusted(file)), None)


def file_name(library: Library, compiler: Compiler) -> str:
    """What the library is called when this compiler makes it."""
    made_by = _short(*compiler.command, compiler.version)
    return f"{library.name}-{_key(library)}-{made_by}.so"


def _key(library: Library) -> str:
    import jaxlib

    version = getattr(jaxlib, "__version__", "")
    return _short(library.source_hash(), *FLAGS, processor(), version)


def _short(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _is_trusted(file: pathlib.Path) -> bool:
    """What is loaded runs with our rights: it must be ours, where others cannot replace it."""
    try:
        states = (os.stat(file), os.stat(file.parent))
    except OSError:
        return False
    if not hasattr(os, "geteuid"):
        return True
    return all(
        state.st_uid in (os.geteuid(), 0) and not state.st_mode & stat.S_IWOTH for state in states
    )
