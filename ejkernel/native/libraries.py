"""Libraries: their source, and what XLA may call in them. Operations declare theirs."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

INCLUDE = pathlib.Path(__file__).resolve().parent / "include"


@dataclasses.dataclass(frozen=True)
class Library:
    """One shared library.

    Args:
      name: what its file is called.
      source: the file that is compiled; headers lie beside it and in `ejkernel/native/include`.
      handlers: functions in it, which XLA knows by the same names.
    """

    name: str
    source: pathlib.Path
    handlers: tuple[str, ...]

    def files(self) -> list[pathlib.Path]:
        """Everything that is compiled into it, in a fixed order."""
        folders = (self.source.parent, INCLUDE)
        return [f for folder in folders for f in sorted(folder.iterdir()) if f.suffix in _SOURCES]

    def source_hash(self) -> str:
        """Changes with every change of the source."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files():
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()


_SOURCES = (".cc", ".h")
_declared: dict[str, Library] = {}


def declare(library: Library) -> Library:
    """Make a library known by its name, so that it is built and loaded with all others."""
    _declared[library.name] = library
    return library


def declared_libraries() -> tuple[Library, ...]:
    """Those of all operations that are imported; `ejkernel.modules` imports every one."""
    return tuple(_declared.values())
