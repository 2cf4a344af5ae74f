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

_open: collections.Counter[Identity] = collections.Counter()


def is_open(file: Identity) -> bool:
    """True if SQLite has the file open in this process."""
    return _open[file] > 0


def opened(file: Identity) -> None:
    """One more connection."""
    with guard:
        _open[file] += 1


def closed(file: Identity) -> None:
    """One less."""
    with guard:
        _open[file] -= 1
        if _open[file] <= 0:
            del _open[file]
