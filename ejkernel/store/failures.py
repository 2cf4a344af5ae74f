"""What an error of a database driver means for the store."""

from __future__ import annotations

import sqlite3

from .errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreGone,
    StoreReadOnly,
    StoreUnavailable,
)
from .harmless import RUNS_SOMETHING

_SQLITE: dict[int, type[StoreError]] = {
    sqlite3.SQLITE_BUSY: StoreBusy,
    sqlite3.SQLITE_LOCKED: StoreBusy,
    sqlite3.SQLITE_PROTOCOL: StoreBusy,
    sqlite3.SQLITE_CORRUPT: StoreDamaged,
    sqlite3.SQLITE_NOTADB: StoreDamaged,
    sqlite3.SQLITE_AUTH: StoreUnavailable,  # see `harmless`
    sqlite3.SQLITE_READONLY: StoreReadOnly,
    sqlite3.SQLITE_FULL: StoreFull,
    sqlite3.SQLITE_CANTOPEN: StoreUnavailable,
    sqlite3.SQLITE_PERM: StoreUnavailable,
}
_NO_ROOM = (
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)

# By SQLSTATE, the longest prefix first.
_SERVER: tuple[tuple[str, type[StoreError]], ...] = (
    ("42501", StoreReadOnly),  # insufficient privilege
    ("25006", StoreReadOnly),  # read-only transaction: a standby
    ("42P01", StoreGone),  # no such table
    ("55P03", StoreBusy),  # lock not available
    ("57014", StoreBusy),  # cancelled: it took too long
    ("53100", StoreFull),
    ("40", StoreBusy),  # serialisation failure, deadlock
)


def meaning(error: BaseException) -> type[StoreError]:
    """The kind of trouble that a driver's error, or SQLAlchemy's wrapping of one, is."""
    original = getattr(error, "orig", None) or error
    code = getattr(original, "sqlite_errorcode", None)
    if isinstance(code, int):
        if code in _NO_ROOM:
            return StoreFull
        if code == sqlite3.SQLITE_READONLY_DBMOVED:
            return StoreGone
        if code == sqlite3.SQLITE_ERROR and "no such table" in str(original):
            return StoreDamaged
        return _SQLITE.get(code & 0xFF, StoreUnavailable)
    state = getattr(original, "sqlstate", None) or ""
    return next((kind for prefix, kind in _SERVER if state.startswith(prefix)), StoreUnavailable)


def lost_connection(error: BaseException) -> bool:
    """True if a server ended the connection: a new one may work."""
    return bool(getattr(error, "connection_invalidated", False))


def in_words(error: BaseException) -> str:
    """The driver's own message, in one line, without SQL and without parameters."""
    original = getattr(error, "orig", None) or error
    if getattr(original, "sqlite_errorcode", None) == sqlite3.SQLITE_AUTH:
        return RUNS_SOMETHING
    words = " ".join(str(original).split()) or type(original).__name__
    return f"there is no room to write ({words})" if meaning(error) is StoreFull else words
