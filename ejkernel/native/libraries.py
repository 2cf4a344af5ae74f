"""Which libraries there are: their source, and what XLA may call in them."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
INCLUDE = _PACKAGE / "native" / "include"


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

FLASH_ATTENTION = Library(
    "flash_attention",
    _PACKAGE / "kernels" / "flash_attention" / "native" / "cpp" / "flash_attention.cc",
    ("ejkernel_flash_attention_forward", "ejkernel_flash_attention_backward"),
)

LIBRARIES: tuple[Library, ...] = (FLASH_ATTENTION,)
