"""Entries by key, in a file or on a server; many threads, processes and machines at once.

Reading never fails: a store that cannot be read is said once, and is then as good as empty.
Writing raises a `StoreError`. Nothing is opened before the first use, nothing is written before
the first write, and SQLAlchemy is imported when there is something to read.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from . import rows
from .errors import StoreBusy, StoreError, StoreGone
from .folder import hurried, identity
from .keys import Key, to_columns
from .location import FolderLocation, Location
from .notices import Notices

if TYPE_CHECKING:
    import sqlalchemy as sa

    from .database import Database

T = TypeVar("T")
Row = Mapping[str, Any]


class Home(Protocol):
    """Where a store lives: what a new kind of database has to supply."""

    def database(self, *, write: bool) -> Database | None:
        """The open database; None if there is none yet and none is needed to read."""
        ...

    def is_current(self) -> bool:
        """False if what was open is not the store any more: a write must be done again."""
        ...

    def recover(self, error: StoreError) -> bool:
        """Put right what can be after an error; True if another attempt makes sense."""
        ...

    def close(self) -> None:
        """Close it; the next use opens it again."""
        ...


class Store:
    """Entries and their trials as plain data.

    Args:
      location: see `ejkernel.store.locate`.
      notices: where troubles are said, once each.
    """

    def __init__(self, location: Location, notices: Notices | None = None) -> None:
        self.location = location
        self.notices = notices or Notices()
        self._slot = _Slot()
        self._was_busy = False  # when it was read last
        self._lock = threading.RLock()  # one thread at a time; forking waits for it too
        _watch_forks(self)
        weakref.finalize(self, self._slot.close)

    # --- reading ---------------------------------------------------------------------------------

    def entry(self, key: Key) -> dict[str, Any] | None:
        """What is kept under a key, without its trials: one row is read."""
        try:
            columns = to_columns(key)
        except ValueError:  # a key that cannot be kept is not there
            return None
        row: Row | None = self._read(lambda c: _queries().find_entry(c, columns), None)
        return None if row is None else self._whole(rows.entry_of, row, str(key))

    def trials(self, key: Key) -> list[dict[str, Any]]:
        """Every candidate of a key with its time or its error, the oldest first."""
        try:
            columns = to_columns(key)
        except ValueError:
            return []
        found: list[Row] = self._read(lambda c: _queries().find_trials(c, columns), [])
        whole = (self._whole(rows.trial_of, row, f"a trial of {key}") for row in found)
        return [trial for trial in whole if trial is not None]

    def list_keys(self) -> list[Key]:
        """All keys, the oldest first."""
        found: list[Row] = self._read(lambda c: _queries().find_keys(c), [])
        keys = (self._whole(rows.key_of, row, "a key") for row in found)
        return [key for key in keys if key is not None]

    def count(self) -> int:
        """How many entries there are."""
        return self._read(lambda c: _queries().count(c), 0)

    def related(self, limit: int = 200, **columns: str) -> list[dict[str, Any]]:
        """Entries with these `device`, `op_id`, `call_key`; `matmul@v*` stands for any ending."""
        found: list[Row] = self._read(lambda c: _queries().find_related(c, columns, limit), [])
        entries = (self._whole(rows.entry_of, row, "an entry") for row in found)
        return [entry for entry in entries if entry is not None]

    # --- writing ---------------------------------------------------------------------------------

    def put(self, key: Key, config: Any, config_type: str, about: Mapping[str, Any]) -> None:
        """Keep an entry. When this returns it is on disk, or on the server.

        Trials (`about["trials"]`) are kept per candidate: those already there stay if they were
        measured from the same source, in the same way, with the same compilers.
        """
        row, trials = rows.entry_row(key, config, config_type, about)
        origin = rows.origin(about)
        self._write(lambda c: _queries().put(c, row, trials, origin))

    def remove(self, key: Key) -> bool:
        """Remove the entry of a key with its trials; False if there was none."""
        columns = to_columns(key)
        if not self._holds_something():
            return False
        return self._write(lambda c: bool(_queries().remove(c, columns)))

    def clear(self) -> None:
        """Remove every entry."""
        if self._holds_something():
            self._write(lambda c: _queries().clear(c))

    def check(self, *, write: bool = False) -> None:
        """Raise the `StoreError` that reading, or writing, would meet; nothing if all is well.

        Reading never raises, so whoever has to know beforehand asks here. With `write` a store
        that does not exist is made.
        """
        with self._lock:
            if write:
                self._attempt(lambda database: database.write(lambda _: None), None, write=True)
            elif not self._is_empty():
                self._attempt(
                    lambda database: database.read(lambda c: _queries().count(c)), 0, write=False
                )

    def close(self) -> None:
        """Close what is open; the next use opens it again."""
        with self._lock:
            self._slot.close()

    # --- how -------------------------------------------------------------------------------------

    def _read(self, work: Callable[[sa.Connection], T], otherwise: T) -> T:
        try:
            with self._lock:
                if self._slot.home is None and self._is_empty():
                    return otherwise
                # Every call that is traced reads: one that is locked for good costs one wait.
                with hurried(self._was_busy):
                    found = self._attempt(lambda d: d.read(work), otherwise, write=False)
                self._was_busy = False
                return found
        except StoreError as error:
            self._was_busy = isinstance(error, StoreBusy)
            self.notices.once(error.trouble, f"going on without it: {error}")
            return otherwise

    def _write(self, work: Callable[[sa.Connection], T]) -> T:
        with self._lock:
            done = self._attempt(lambda database: database.write(work), None, write=True)
        return cast(T, done)  # what is written to is never absent

    def _holds_something(self) -> bool:
        """True if there is a store: removing from one that is not there must not make it."""
        with self._lock:
            return not self._is_empty() and self._attempt(lambda _: True, False, write=False)

    def _attempt(self, act: Callable[[Database], T], otherwise: T, *, write: bool) -> T:
        home = self._found_home()
        for last in (False, False, True):  # a second recovery may follow from the first
            try:
                database = home.database(write=write)
                if database is None:
                    return otherwise
                found = act(database)
                if not write or home.is_current():
                    return found
            except StoreError as error:
                if last or not home.recover(error):
                    raise
        raise StoreGone(f"{self.location.shown} was replaced again and again while it was written")

    def _is_empty(self) -> bool:
        """True if there is no file: a look at the folder, without importing anything."""
        return isinstance(self.location, FolderLocation) and identity(self.location) is None

    def _found_home(self) -> Home:
        if self._slot.home is None:
            if isinstance(self.location, FolderLocation):
                from .files import FileHome

                self._slot.home = FileHome(self.location, self.notices)
            else:
                from .server import ServerHome

                self._slot.home = ServerHome(self.location, self.notices)
        return self._slot.home

    def _whole(self, read: Callable[[Any], T], row: Any, what: str) -> T | None:
        try:
            return read(row)
        except ValueError as error:
            self.notices.once(
                f"row {what}", f"{what} in {self.location.shown} is damaged and not used: {error}"
            )
            return None


def _queries() -> Any:
    from . import queries

    return queries


class _Slot:
    """What a store has open: apart from the store, so that it can be closed when that is gone."""

    home: Home | None = None

    def close(self) -> None:
        if self.home is not None:
            self.home.close()


# --- forks ---------------------------------------------------------------------------------------

_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_stores_lock = threading.Lock()
_paused: list[Store] = []
_watching = False


def _watch_forks(store: Store) -> None:
    global _watching
    with _stores_lock:
        _stores.add(store)
        if not _watching and hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
            )
            _watching = True


def _before_fork() -> None:
    # SQLite remembers its locks per process, and a child would inherit the memory without the
    # locks. So nothing is open while a process forks; both open again what they need.
    _stores_lock.acquire()
    for store in list(_stores):
        store._lock.acquire()
        _paused.append(store)
        store._slot.close()


def _after_fork() -> None:
    while _paused:
        _paused.pop()._lock.release()
    _stores_lock.release()
