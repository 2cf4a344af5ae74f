"""Which files this process has open through SQLite.

The system drops all locks that a process has on a file as soon as it closes *any* descriptor of it,
SQLite's locks included; another process would then clear away the log that this one is writing. So
a file that is open here is never opened by anything but SQLite.
"""

from __future__ import annotations

import collections
import threading

from .folder import Identity

guard = threading.RLock()
"""Held from looking whether a file is open until it is; taken after the lock on its folder."""

_open: collections.Counter[tuple[Identity, str]] = collections.Counter()


def is_open(file: Identity) -> bool:
    """True if SQLite has the file open in this process."""
    return any(known == file for known, _ in _open)


def another_is_open(file: Identity, path: str) -> bool:
    """True if SQLite has another file open in this process that was at the same path."""
    return any(known != file and where == path for known, where in _open)


def opened(file: Identity, path: str) -> None:
    """One more connection."""
    with guard:
        _open[file, path] += 1


def closed(file: Identity, path: str) -> None:
    """One less."""
    with guard:
        _open[file, path] -= 1
        if _open[file, path] <= 0:
            del _open[file, path]
