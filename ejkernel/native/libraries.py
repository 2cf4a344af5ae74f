"""What the layers above hand in: the libraries of operations, and the settings of users.

Nothing of `ejkernel.ops` is imported here: what is native is below it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from typing import Any

INCLUDE = pathlib.Path(__file__).resolve().parent / "include"


@dataclasses.dataclass(frozen=True)
class Library:
    """One shared library.

    Args:
      name: what its file is called.
      source: the file to compile; headers are next to it and in `ejkernel/native/include`.
      handlers: functions in it, which XLA knows by the same names.
      headers: more folders with headers, such as those of another operation.
    """

    name: str
    source: pathlib.Path
    handlers: tuple[str, ...]
    headers: tuple[pathlib.Path, ...] = ()

    def files(self) -> list[pathlib.Path]:
        """Everything that is compiled into it, in a fixed order."""
        folders = (self.source.parent, INCLUDE, *self.headers)
        headers = [f for folder in folders for f in sorted(folder.iterdir()) if f.suffix == ".h"]
        return [self.source, *headers]

    def source_hash(self) -> str:
        """Changes with every change of the source."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files():
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()


_declared: dict[str, Library] = {}
_environment: list[Any] = []


def declare(library: Library) -> Library:
    """Make a library known by its name, so that it is built and loaded with all others."""
    _declared[library.name] = library
    return library


def declared_libraries() -> tuple[Library, ...]:
    """Those of all operations that are imported; `ejkernel.modules` imports every one."""
    return tuple(_declared.values())


def provide_environment(module: Any) -> None:
    """Say where the settings are: `ejkernel.ops` hands in `ejkernel.ops.utils.environment`."""
    _environment[:] = [module]


def environment() -> Any:
    """The module that reads the settings of this process."""
    if not _environment:
        raise RuntimeError(
            "ejkernel.native does not know its settings and libraries yet; import ejkernel.modules "
            "first"
        )
    return _environment[0]
