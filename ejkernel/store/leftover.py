"""Does the log beside a store's file belong to it?

SQLite writes into a log first (`-wal`; on network file systems it keeps what was there before, in
`-journal`) and merges it with the file later, also after a crash. It does not ask whether the file
is still the one that the log was written for. Beside a file that was removed and made anew, or
restored from a backup, a log that was left over would overwrite what is in the new one.

So every write leaves a mark in the file's header: a random number, and that of the state it started
from. A log whose first state did not start from the file's own is of another file. And so is a log
that others are using while nobody has this file open.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from . import in_use
from .folder import Identity
from .reading import not_regular

if TYPE_CHECKING:
    import sqlalchemy as sa

COMPANIONS = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a file while it is in use."""

_HEADER = 100  # bytes of a database's header, at the start of its first page
_WAL_MAGIC = (0x377F0682, 0x377F0683)
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")

Read = Callable[[int, int], bytes]
"""Bytes of a file: how many, from where."""


class Mark(NamedTuple):
    """What a header says: which state this is, and which one it started from."""

    state: int
    before: int


def leave_mark(connection: sa.Connection) -> None:
    """Say in the header that this is a new state; for use at the end of a write."""
    before = connection.exec_driver_sql("PRAGMA user_version").scalar()
    # Not from `random`: two processes may have seeded that alike.
    state = int.from_bytes(os.urandom(4), "big") >> 1 or 1
    connection.exec_driver_sql(f"PRAGMA application_id = {before}")
    connection.exec_driver_sql(f"PRAGMA user_version = {state}")


def irregular(file: pathlib.Path) -> str | None:
    """Something beside a file that has the name of a log and is none: a pipe, a folder, a link.

    SQLite would open it, and wait for as long as a pipe has no other end.
    """
    for suffix in COMPANIONS:
        with contextlib.suppress(FileNotFoundError):
            reason = not_regular(os.lstat(f"{file}{suffix}"))
            if reason is not None:
                return f"{file}{suffix} is in the way: {reason}; move it away"
    return None


def has_foreign_log(file: pathlib.Path, identity: Identity) -> bool:
    """True if the log beside a file is of another one. To be called with `in_use.guard`."""
    if in_use.is_open(identity) or not any(os.path.lexists(f"{file}{c}") for c in COMPANIONS):
        return False
    try:
        with nobody_uses(file) as alone:
            return log_is_foreign(file, identity, alone)
    except OSError:  # it may not be written
        return log_is_foreign(file, identity, alone=False)


def log_is_foreign(file: pathlib.Path, identity: Identity, alone: bool) -> bool:
    """As `has_foreign_log`, for whoever knows whether another process has the file open."""
    if in_use.another_is_open(identity, str(file)):
        return True
    # If nobody has the file open, whoever uses the log has another one open.
    return (alone and log_in_use(file)) or foreign_log(file) is not None


def foreign_log(file: pathlib.Path) -> str | None:
    """The suffix of a log beside a file that was written for another one; None if there is none.

    None too if that cannot be told: if a log says nothing, or one of them cannot be read. To be
    called when SQLite has not the file open in this process, as it opens it.
    """
    for suffix, states in (("-wal", wal_marks), ("-journal", journal_marks)):
        with contextlib.suppress(OSError):
            for _ in range(10):  # others may be at work: what is read has to be of one moment
                with _reader(file) as read, _reader(f"{file}{suffix}") as read_log:
                    mark, start = header_mark(read(_HEADER, 0)), read_log(32, 0)
                    found = list(states(read_log))
                    same = mark == header_mark(read(_HEADER, 0)) and start == read_log(32, 0)
                if same:
                    break
            if same and mark is not None and found and not _belongs(mark, found, suffix):
                return suffix
    return None


def _belongs(mark: Mark, found: list[Mark], suffix: str) -> bool:
    if suffix == "-journal":  # it holds what was there before; the file may be ahead of that
        return found[0].state in mark
    # The file is where the log began, or as far as it was merged.
    return mark.state == found[0].before or any(mark.state == each.state for each in found)


def header_mark(page: bytes) -> Mark | None:
    """The mark in the header of a database.

    >>> header_mark(b"SQLite format 3") is None
    True
    """
    if len(page) < _HEADER:
        return None
    return Mark(*struct.unpack_from(">I", page, 60), *struct.unpack_from(">I", page, 68))


def wal_marks(read: Read) -> Iterator[Mark]:
    """The marks of all states in a write-ahead log, in order."""
    start = read(32, 0)
    if len(start) < 32 or struct.unpack_from(">I", start)[0] not in _WAL_MAGIC:
        return  # SQLite does not use it either
    size, salts = struct.unpack_from(">I", start, 8)[0], start[16:24]
    if not 512 <= size <= 65536:
        return
    place = 32
    while len(frame := read(24 + _HEADER, place)) == 24 + _HEADER and frame[8:16] == salts:
        page, mark = struct.unpack_from(">I", frame)[0], header_mark(frame[24:])
        if page == 0:  # there is no such page: SQLite stops here too
            return
        if page == 1 and mark is not None:
            yield mark
        place += 24 + size


def journal_marks(read: Read) -> Iterator[Mark]:
    """The mark of the state that a rollback journal would restore, if it holds the first page."""
    start = read(28, 0)
    if len(start) < 28 or start[:8] != _JOURNAL_MAGIC:
        return
    sector, size = struct.unpack_from(">II", start, 20)
    if not 512 <= size <= 65536 or not 28 <= sector <= 65536:
        return
    place = sector
    while len(record := read(4 + _HEADER, place)) == 4 + _HEADER:
        page, mark = struct.unpack_from(">I", record)[0], header_mark(record[4:])
        if page == 1 and mark is not None:
            yield mark
        if page < 2:  # there is no page 0: SQLite stops there too
            return
        place += 8 + size


@contextlib.contextmanager
def _reader(file: str | os.PathLike[str]) -> Iterator[Read]:
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(file, flags), "rb", buffering=0) as stream:

        def read(count: int, place: int) -> bytes:
            stream.seek(place)
            return stream.read(count) or b""

        yield read


# --- nobody at work ------------------------------------------------------------------------------

_SHARED = (0x40000002, 510)
"""Where SQLite locks a file, for as long as it is open: first byte, and how many."""

_LOG = 128
"""The byte of the `-shm` file that it locks for as long as it uses the log."""


@contextlib.contextmanager
def nobody_uses(file: pathlib.Path) -> Iterator[bool]:
    """Keep every SQLite off a file; False if one of another process has it open."""
    try:
        import fcntl
    except ImportError:  # not POSIX: a file in use cannot be moved there
        yield True
        return
    descriptor = os.open(file, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
    try:
        first, count = _SHARED
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
        except OSError:
            alone = False
        else:
            alone = True
        yield alone
    finally:
        os.close(descriptor)  # and with it the lock


def log_in_use(file: pathlib.Path) -> bool:
    """True if another process uses the log beside a file, or at least has it open."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        descriptor = os.open(f"{file}-shm", os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOG)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
