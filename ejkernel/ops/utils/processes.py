"""Which process wrote a file, and whether it still runs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
from typing import Self


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """One process, told apart from another one that has its number later, or elsewhere.

    >>> ProcessIdentity.here().is_running()
    True
    """

    host: str
    pid: int
    started: str = ""  # when the process began: process ids are used again
    boot: str = ""
    namespace: str = ""  # process ids of another container mean nothing here

    @classmethod
    def here(cls) -> Self:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _started(pid) or "", _boot(), _namespace())

    def is_running(self) -> bool | None:
        """Does it still run? None if that cannot be seen from this machine or container."""
        here = self.host == socket.gethostname()
        if here and self.boot != _boot():
            return False
        if not here or self.namespace != _namespace():
            return None
        started = _started(self.pid)
        return started is not None and started == self.started


def _started(pid: int) -> str | None:
    """When a process began, in the system's own terms; None if there is none, "" if nobody says."""
    if not pathlib.Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass  # it is somebody else's, and there
        return ""
    try:
        line = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # there is none; or one that cannot be, as no number is so long
        return None
    # After the name, which stands in parentheses and may hold anything: state, then 18 fields more.
    fields = line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _boot() -> str:
    """Which start of this machine this is; empty if nobody says."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    """Which set of process ids is seen here; empty if there is only one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
