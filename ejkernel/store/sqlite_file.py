"""The SQLite file of a store, below SQLAlchemy: which file it is, who has it open, how it is read
as data, and whether the log next to it is its own.

**Who has it open.** The system drops all locks that a process has on a file as soon as it closes
*any* descriptor of it, SQLite's locks included; another process would then clear away the log that
this one is writing. So a file that is open here is never opened by anything but SQLite.

**Whose log it is.** SQLite writes into a log first (`-wal`; on network file systems it saves what
was there before, in `-journal`) and merges it with the file later, also after a crash. It does not
ask whether the file is still the one that the log was written for. Next to a file that was removed
and made anew, or restored from a backup, a log that was left over would overwrite what is in the
new one. So every write leaves a mark in the file's header: a random number, and that of the state
it started from. A log whose first state did not start from the file's own is of another file. And
so is a log that others are using while nobody has this file open.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import errno
import os
import pathlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from .errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreForeignLog,
    StoreUnavailable,
    meaning,
    message_of,
)
from .location import FolderLocation
from .private import check_owner
from .reading import READ_ONLY, not_regular

try:
    import fcntl
except ImportError:  # not POSIX: a file in use cannot be moved there
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import sqlite3

    import sqlalchemy as sa

Identity = tuple[int, int]
"""Which file it is: device and inode."""


def identity(location: FolderLocation) -> Identity | None:
    """Which file is there now; None if there is none.

    Something else than a file in its place is as good as no store: opening a pipe would wait.
    """
    with as_store_errors(f"{location.file} cannot be read"):
        try:
            status = os.stat(location.file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        reason = not_regular(status)
        if reason is not None:
            raise StoreUnavailable(f"{location.file} cannot be read: {reason}")
        return status.st_dev, status.st_ino


@contextlib.contextmanager
def as_store_errors(what: str, advice: str = "") -> Iterator[None]:
    """Turn what the system says about files, which others may change, into `StoreUnavailable`."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreUnavailable(f"{what}: {error.strerror or error}{advice}") from None


# --- a connection to what anybody may have written -----------------------------------------------

LARGEST_ROW = 64 * 2**20
"""Bytes of the largest row that is read or written; the values of a row have 8 MiB at most."""


def connect(file: pathlib.Path, mode: str, timeout: float) -> sqlite3.Connection:
    """Open an existing file so that it is data: what it defines itself does not run.

    A file may define views and triggers, which run whenever a table is used, and need not end; a
    store has none. `mode` is `rw`, `ro`, or `immutable` (nobody writes).
    """
    import sqlite3  # not before there is something to read

    def only_what_is_asked(*action_and_source: object) -> int:
        # The last one is the view or the trigger that wants to do something, if one does.
        return sqlite3.SQLITE_OK if action_and_source[-1] is None else sqlite3.SQLITE_DENY

    parameters = "mode=ro&immutable=1" if mode == "immutable" else f"mode={mode}"
    connection = sqlite3.connect(
        f"{file.absolute().as_uri()}?{parameters}",
        uri=True,
        timeout=timeout,
        check_same_thread=False,  # one thread at a time, not always the same one
        isolation_level=None,  # transactions begin where we say so
    )
    connection.set_authorizer(only_what_is_asked)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_ROW)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


# --- open in this process ------------------------------------------------------------------------

guard = threading.RLock()
"""Held from looking whether a file is open until it is; taken after the lock on its folder."""

_open: collections.Counter[tuple[Identity, str]] = collections.Counter()


def is_open(file: Identity) -> bool:
    """True if SQLite has the file open in this process."""
    return any(known == file for known, _ in _open)


def count_connection(file: Identity, path: str, change: int) -> None:
    """Say that SQLite opened (+1) or closed (-1) a connection to a file that was at a path."""
    with guard:
        _open[file, path] += change
        if _open[file, path] <= 0:
            del _open[file, path]


# --- locks between processes ---------------------------------------------------------------------

PATIENCE = 30.0
"""Seconds to wait for others before giving up; they hold locks for milliseconds."""

_hurried = contextvars.ContextVar("ejkernel_store_hurried", default=False)


@contextlib.contextmanager
def hurried(yes: bool) -> Iterator[None]:
    """Inside the block nobody is waited for, if `yes`: who waited in vain once need not again."""
    before = _hurried.set(yes)
    try:
        yield
    finally:
        _hurried.reset(before)


def deadline() -> float:
    """Until when others are waited for, by the clock of `time.monotonic`."""
    return time.monotonic() + (0.0 if _hurried.get() else PATIENCE)


@contextlib.contextmanager
def folder_lock(location: FolderLocation, *, alone: bool) -> Iterator[bool]:
    """Hold the folder while opening the store's file, or alone while making or moving it.

    The lock is on the folder itself, so that it leaves no file behind. True if it is a real one;
    some file systems have none.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(location.folder, os.O_RDONLY)
    try:
        yield _locked(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, location)
    finally:
        os.close(descriptor)  # and with it the lock


def _locked(descriptor: int, kind: int, location: FolderLocation) -> bool:
    until = deadline()
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                return False
        else:
            return True
        if time.monotonic() > until:
            raise StoreBusy(f"{location.folder} was locked by others for {PATIENCE:.0f} s")
        time.sleep(0.01)


@contextlib.contextmanager
def _bytes_locked(file: str | os.PathLike[str], first: int, count: int) -> Iterator[bool]:
    """Lock the bytes of a file that SQLite locks; False if another process has done so."""
    if fcntl is None:
        yield True
        return
    descriptor = os.open(file, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
    alone = False
    try:
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
            alone = True
        yield alone
    finally:
        os.close(descriptor)  # and with it the lock


def nobody_uses(file: pathlib.Path) -> contextlib.AbstractContextManager[bool]:
    """Stop every SQLite from opening a file; False if one of another process has it open."""
    return _bytes_locked(file, 0x40000002, 510)  # locked for as long as a file is open


# --- marks, and the log --------------------------------------------------------------------------

COMPANIONS = ("-wal", "-shm", "-journal")
"""What SQLite has next to a file while it is in use."""

_HEADER = 100  # bytes of a database's header, at the start of its first page
_WAL_MAGIC = (0x377F0682, 0x377F0683)
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")

ReadAt = Callable[[int, int], bytes]
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


def check_companions(file: pathlib.Path) -> None:
    """Refuse what has the name of a log and is none: a pipe, a folder, a link.

    SQLite would open it, and wait for as long as a pipe has no other end.
    """
    for suffix in COMPANIONS:
        with contextlib.suppress(FileNotFoundError):
            reason = not_regular(os.lstat(f"{file}{suffix}"))
            if reason is not None:
                raise StoreUnavailable(f"{file}{suffix} is in the way: {reason}; move it away")


def has_foreign_log(file: pathlib.Path, identity: Identity) -> bool:
    """True if the log next to a file is of another one. To be called with `guard`."""
    if is_open(identity) or not any(os.path.lexists(f"{file}{c}") for c in COMPANIONS):
        return False
    try:
        with nobody_uses(file) as alone:
            return log_is_foreign(file, identity, alone)
    except OSError:  # it may not be written
        return log_is_foreign(file, identity, alone=False)


def log_is_foreign(file: pathlib.Path, identity: Identity, alone: bool) -> bool:
    """As `has_foreign_log`, for whoever knows whether another process has the file open."""
    if any(known != identity and path == str(file) for known, path in _open):
        return True  # this process still has the file open that was here before
    if alone:  # nobody has the file open, so whoever uses the log has another one open
        with contextlib.suppress(OSError), _bytes_locked(f"{file}-shm", 128, 1) as unused:
            if not unused:  # these bytes are locked for as long as a log is used
                return True
    return foreign_log(file) is not None


def foreign_log(file: pathlib.Path) -> str | None:
    """The suffix of a log next to a file that was written for another one; None if there is none.

    None too if that cannot be told: if a log says nothing, or one of them cannot be read. To be
    called when SQLite has not the file open in this process, as it opens it.
    """
    for suffix in ("-wal", "-journal"):
        with contextlib.suppress(OSError):
            for _ in range(10):  # others may be at work: what is read has to be of one moment
                with _reader(file) as read, _reader(f"{file}{suffix}") as read_log:
                    mark, start = header_mark(read(_HEADER, 0)), read_log(32, 0)
                    marks = list(log_marks(read_log))
                    same = mark == header_mark(read(_HEADER, 0)) and start == read_log(32, 0)
                if same:
                    break
            if not same or mark is None or not marks:
                continue
            if suffix == "-journal":  # it holds what was there before; the file may be ahead
                own = marks[0].state in mark
            else:  # the file is where the log began, or as far as it was merged
                own = mark.state in (marks[0].before, *(each.state for each in marks))
            if not own:
                return suffix
    return None


def header_mark(page: bytes) -> Mark | None:
    """The mark in the header of a database.

    >>> header_mark(b"SQLite format 3") is None
    True
    """
    if len(page) < _HEADER:
        return None
    return Mark(*struct.unpack_from(">I", page, 60), *struct.unpack_from(">I", page, 68))


def log_marks(read: ReadAt) -> Iterator[Mark]:
    """The marks in a log, in order: of all states in a write-ahead log, and in a rollback journal
    that of the state it would restore.

    Both are a header and records, which hold the number of a page and the page. SQLite does not use
    what is not like that either, and stops at a page 0.
    """
    start = read(32, 0)
    if len(start) == 32 and struct.unpack_from(">I", start)[0] in _WAL_MAGIC:
        offset, before, after, salts = 32, 24, 0, start[16:24]
        (size,) = struct.unpack_from(">I", start, 8)
    elif len(start) >= 28 and start[:8] == _JOURNAL_MAGIC:
        offset, size = struct.unpack_from(">II", start, 20)
        before, after, salts = 4, 4, b""
    else:
        return
    if not 512 <= size <= 65536 or not 28 <= offset <= 65536:
        return
    length = before + _HEADER
    while len(record := read(length, offset)) == length and record[8:].startswith(salts):
        (page,), mark = struct.unpack_from(">I", record), header_mark(record[before:])
        if page == 1 and mark is not None:
            yield mark
        if page == 0 or (page == 1 and not salts):  # a journal holds the first page once
            return
        offset += before + size + after


@contextlib.contextmanager
def _reader(file: str | os.PathLike[str]) -> Iterator[ReadAt]:
    with open(os.open(file, READ_ONLY), "rb", buffering=0) as stream:

        def read(count: int, offset: int) -> bytes:
            stream.seek(offset)
            return stream.read(count) or b""

        yield read


# --- a look without SQLAlchemy -------------------------------------------------------------------


def count_entries(location: FolderLocation) -> int | None:
    """How many entries the file of a store has; None if there is no file. Raises `StoreError`.

    For whoever only wants to know how things are, such as `ejkernel doctor`: without SQLAlchemy,
    and the look changes nothing, waits for nobody, and repairs nothing.
    """
    import sqlite3

    with as_store_errors(f"{location.folder} cannot be used"):
        there = identity(location)
        if there is None:
            return None
        check_owner(location)
        check_companions(location.file)
        with guard:
            foreign = has_foreign_log(location.file, there)
        if foreign:
            raise StoreForeignLog(
                f"next to {location.file} lies the log of another file; it will be moved aside at "
                "the next read or write"
            )
    try:
        with contextlib.closing(connect(location.file, "ro", timeout=1.0)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM ejkernel_entries").fetchone()
            return int(count)
    except sqlite3.Error as error:
        kind, message = meaning(error), f"{location.file}: {message_of(error)}"
        if kind is StoreDamaged:
            message += "; it is no store, and will be moved aside at the next read or write"
        raise kind(message) from None
