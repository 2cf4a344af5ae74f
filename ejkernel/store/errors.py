"""What can go wrong with a store. All of it is an `OSError`: callers go on without the store."""

from __future__ import annotations

import logging

from ..markup import one_line

logger = logging.getLogger("ejkernel.store")


class StoreError(OSError):
    """A store that cannot do what was asked; the message names it and says what to do."""


class StoreUnavailable(StoreError):
    """It cannot be opened or reached: no right to read it, no server that answers."""


class StoreRefused(StoreError):
    """Its folder is one that other users could tamper with."""


class StoreReadOnly(StoreError):
    """It can be read and not written."""


class StoreNewer(StoreReadOnly):
    """A newer ejkernel made it: read as far as possible, never changed."""


class StoreFull(StoreError):
    """No room to write."""


class StoreBusy(StoreError):
    """Others locked it for longer than we are willing to wait."""


class StoreDamaged(StoreError):
    """Its content is not that of a store."""


class StoreForeignLog(StoreError):
    """Next to its file lies the log of another one."""


class StoreGone(StoreError):
    """Its file or its tables were removed while it was open."""


# --- warnings ------------------------------------------------------------------------------------

MOST_WARNINGS = 1000
"""How many problems of one store are told apart."""


class WarnOnce:
    """Logs each problem of one store a single time, however many entries it concerns."""

    def __init__(self) -> None:
        self._logged: dict[object, object] = {}

    def __call__(self, problem: object, message: str) -> None:
        """Warn, unless this problem (a `StoreError` class, or any name) was logged before."""
        if len(self._logged) >= MOST_WARNINGS:
            problem, message = "more", f"after {MOST_WARNINGS} problems no more of them are logged"
        mark = object()
        if self._logged.setdefault(problem, mark) is mark:  # atomic: no lock that a fork could hold
            logger.warning("ejkernel store: %s", one_line(message))


# --- what an error of a database driver means ----------------------------------------------------

RUNS_SOMETHING = "it has views or triggers, which no store has, and they are not run; move it away"
"""What to say where SQLite says that something is not authorised: see `sqlite_file.connect`."""

_MEANING: dict[type[StoreError], tuple[str, ...]] = {
    StoreGone: ("SQLITE_READONLY_DBMOVED", "42P01"),  # no such table
    StoreReadOnly: ("SQLITE_READONLY", "42501", "25006"),  # no privilege; a standby server
    # Lock not available, cancelled because it took too long, serialisation failure or deadlock.
    StoreBusy: ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL", "55P03", "57014", "40"),
    StoreDamaged: ("SQLITE_CORRUPT", "SQLITE_NOTADB"),
    StoreFull: (
        *("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_TRUNCATE"),
        *("SQLITE_IOERR_SHMSIZE", "53100"),
    ),
}
"""By how SQLite's name of an error, or a server's SQLSTATE, starts; the first match counts."""


def meaning(error: BaseException) -> type[StoreError]:
    """The kind of `StoreError` that a driver's error, or SQLAlchemy's wrapping of one, is."""
    original = getattr(error, "orig", None) or error
    name = getattr(original, "sqlite_errorname", None) or getattr(original, "sqlstate", None) or ""
    if name == "SQLITE_ERROR" and "no such table" in str(original):
        return StoreDamaged
    kinds = (kind for kind, starts in _MEANING.items() if name.startswith(starts))
    return next(kinds, StoreUnavailable)


def message_of(error: BaseException) -> str:
    """The driver's own message, in one line, without SQL and without parameters."""
    original = getattr(error, "orig", None) or error
    if getattr(original, "sqlite_errorname", None) == "SQLITE_AUTH":
        return RUNS_SOMETHING
    text = " ".join(str(original).split()) or type(original).__name__
    return f"there is no room to write ({text})" if meaning(error) is StoreFull else text
