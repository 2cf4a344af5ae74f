"""Entries by key, in a file or on a server; many threads, processes and machines at once.

Reading never fails: a store that cannot be read costs one warning, and is then as good as empty.
Writing raises a `StoreError`. Nothing is opened before the first use, nothing is written before
the first write, and SQLAlchemy is imported when there is something to read.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from . import rows
from .errors import StoreBusy, StoreError, StoreGone, WarnOnce
from .location import FolderLocation, Location
from .rows import StoreKey, to_columns
from .sqlite_file import hurried, identity

if TYPE_CHECKING:
    import sqlalchemy as sa

    from .backends import Backend
    from .database import Database

T = TypeVar("T")


class Store:
    """Entries and their trials as plain data.

    Args:
      location: see `ejkernel.store.locate`.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self.warn_once = WarnOnce()
        self._slot = _Slot()
        self._was_busy = False  # when it was read last
        self._lock = threading.RLock()  # one thread at a time; forking waits for it too
        _watch_forks(self)
        weakref.finalize(self, self._slot.close)

    # --- reading ---------------------------------------------------------------------------------

    def entry(self, key: StoreKey) -> dict[str, Any] | None:
        """What is stored under a key, without its trials: one row is read."""
        try:
            columns = to_columns(key)
        except ValueError:  # a key that cannot be stored is not there
            return None
        row = self._read(lambda c: _tables().find_entry(c, columns), None)
        return None if row is None else self._sound(rows.entry_of, row, str(key))

    def trials(self, key: StoreKey) -> list[dict[str, Any]]:
        """Every candidate of a key with its time or its error, the oldest first."""
        try:
            columns = to_columns(key)
        except ValueError:
            return []
        stored: list[Any] = self._read(lambda c: _tables().find_trials(c, columns), [])
        return self._all_sound(rows.trial_of, stored, f"a trial of {key}")

    def list_keys(self) -> list[StoreKey]:
        """All keys, the oldest first."""
        return self._all_sound(
            rows.key_of, self._read(lambda c: _tables().find_keys(c), []), "a key"
        )

    def count(self) -> int:
        """How many entries there are."""
        return self._read(lambda c: _tables().count(c), 0)

    def related(self, limit: int = 200, **columns: str) -> list[dict[str, Any]]:
        """Entries with these `device`, `op_id`, `call_key`; `matmul@v*` stands for any ending."""
        stored: list[Any] = self._read(lambda c: _tables().find_related(c, columns, limit), [])
        return self._all_sound(rows.entry_of, stored, "an entry")

    # --- writing ---------------------------------------------------------------------------------

    def put(self, key: StoreKey, config: Any, config_type: str, about: Mapping[str, Any]) -> None:
        """Store an entry. When this returns it is on disk, or on the server.

        Trials (`about["trials"]`) are stored per candidate: those already there stay if they were
        measured from the same source, in the same way, with the same compilers.
        """
        row, trials = rows.entry_row(key, config, config_type, about)
        origin = rows.origin(about)
        self._write(lambda c: _tables().put(c, row, trials, origin))

    def remove(self, key: StoreKey) -> bool:
        """Remove the entry of a key with its trials; False if there was none."""
        columns = to_columns(key)
        if not self._holds_something():
            return False
        return self._write(lambda c: bool(_tables().remove(c, columns)))

    def clear(self) -> None:
        """Remove every entry."""
        if self._holds_something():
            self._write(lambda c: _tables().clear(c))

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
                    lambda database: database.read(lambda c: _tables().count(c)), 0, write=False
                )

    def close(self) -> None:
        """Close what is open; the next use opens it again."""
        with self._lock:
            self._slot.close()

    # --- how -------------------------------------------------------------------------------------

    def _read(self, transaction: Callable[[sa.Connection], T], otherwise: T) -> T:
        try:
            with self._lock:
                if self._slot.backend is None and self._is_empty():
                    return otherwise
                # Every call that is traced reads: one that is locked for good costs one wait.
                with hurried(self._was_busy):
                    done = self._attempt(lambda d: d.read(transaction), otherwise, write=False)
                self._was_busy = False
                return done
        except StoreError as error:
            self._was_busy = isinstance(error, StoreBusy)
            self.warn_once(type(error), f"going on without it: {error}")
            return otherwise

    def _write(self, transaction: Callable[[sa.Connection], T]) -> T:
        with self._lock:
            done = self._attempt(lambda database: database.write(transaction), None, write=True)
        return cast(T, done)  # what is written to is never absent

    def _holds_something(self) -> bool:
        """True if there is a store: removing from one that is not there must not make it."""
        with self._lock:
            return not self._is_empty() and self._attempt(lambda _: True, False, write=False)

    def _attempt(self, act: Callable[[Database], T], otherwise: T, *, write: bool) -> T:
        if self._slot.backend is None:
            from .backends import backend_of

            self._slot.backend = backend_of(self.location, self.warn_once)
        backend = self._slot.backend
        for last in (False, False, True):  # a second recovery may follow from the first
            try:
                database = backend.database(write=write)
                if database is None:
                    return otherwise
                done = act(database)
                if not write or backend.is_current():
                    return done
            except StoreError as error:
                if last or not backend.recover(error):
                    raise
        raise StoreGone(f"{self.location.shown} was replaced again and again while it was written")

    def _is_empty(self) -> bool:
        """True if there is no file: a look at the folder, without importing anything."""
        return isinstance(self.location, FolderLocation) and identity(self.location) is None

    def _all_sound(self, read: Callable[[Any], T], stored: list[Any], what: str) -> list[T]:
        values = (self._sound(read, row, what) for row in stored)
        return [value for value in values if value is not None]

    def _sound(self, read: Callable[[Any], T], row: Any, what: str) -> T | None:
        try:
            return read(row)
        except ValueError as error:
            self.warn_once(("row", what), f"{what} in {self.location.shown} is damaged: {error}")
            return None


def _tables() -> Any:
    from . import tables

    return tables


class _Slot:
    """What a store has open: apart from the store, so that it can be closed when that is gone."""

    backend: Backend | None = None

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()


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
