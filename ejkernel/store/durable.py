"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import os
import pathlib
import uuid


def write_whole(file: pathlib.Path, text: str) -> None:
    """Write a file under another name and move it into place; its folder is made if need be.

    A pipe or a device (`/dev/stdout`) is written to and stays what it is; so does a link.
    """
    file = pathlib.Path(os.path.realpath(file))
    if file.exists() and not file.is_file() and not file.is_dir():
        file.write_text(text, encoding="utf-8")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".writing-{uuid.uuid4().hex}")
    try:
        with open(temporary, "x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(file.parent)


def flush_folder(folder: pathlib.Path) -> None:
    """Make names durable: a new one, a rename or a removal is only in memory before."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
