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
from typing import TYPE_CHECKING, Any, TypeVar

from . import rows
from .errors import StoreBusy, StoreError, StoreGone, WarnOnce
from .location import FolderLocation, Location
from .rows import StoreKey, to_columns
from .sqlite_file import hurried, identity

if TYPE_CHECKING:
    from .backends import FileBackend, ServerBackend

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
        with _stores_lock:
            _stores.add(self)
        weakref.finalize(self, self._slot.close)

    # --- reading ---------------------------------------------------------------------------------

    def entry(self, key: StoreKey) -> dict[str, Any] | None:
        """What is stored under a key, without its trials: one row is read."""
        row = self._read_key("find_entry", None, key)
        return None if row is None else self._sound(rows.entry_of, row, str(key))

    def trials(self, key: StoreKey) -> list[dict[str, Any]]:
        """Every candidate of a key with its time or its error, the oldest first."""
        stored = self._read_key("find_trials", [], key)
        return self._all_sound(rows.trial_of, stored, f"a trial of {key}")

    def list_keys(self) -> list[StoreKey]:
        """All keys, the oldest first."""
        return self._all_sound(rows.key_of, self._read("find_keys", []), "a key")

    def count(self) -> int:
        """How many entries there are."""
        return int(self._read("count", 0))

    def related(self, limit: int = 200, **columns: str) -> list[dict[str, Any]]:
        """Entries with these `device`, `op_id`, `call_key`; `matmul@v*` stands for any ending."""
        stored = self._read("find_related", [], columns, limit)
        return self._all_sound(rows.entry_of, stored, "an entry")

    # --- writing ---------------------------------------------------------------------------------

    def put(self, key: StoreKey, config: Any, config_type: str, about: Mapping[str, Any]) -> None:
        """Store an entry. When this returns it is on disk, or on the server.

        Trials (`about["trials"]`) are stored per candidate: those already there stay if they were
        measured from the same source, in the same way, with the same compilers.
        """
        row, trials = rows.entry_row(key, config, config_type, about)
        with self._lock:
            self._attempt("put", None, row, trials, rows.origin(about), write=True)

    def remove(self, key: StoreKey) -> bool:
        """Remove the entry of a key with its trials; False if there was none."""
        return bool(self._change("remove", to_columns(key)))

    def clear(self) -> None:
        """Remove every entry."""
        self._change("clear")

    def check(self, *, write: bool = False) -> None:
        """Raise the `StoreError` that reading, or writing, would meet; nothing if all is well.

        Reading never raises, so whoever has to know beforehand asks here. With `write` a store
        that does not exist is made.
        """
        with self._lock:
            if write or not self._is_empty():
                self._attempt("count", 0, write=write)

    def close(self) -> None:
        """Close what is open; the next use opens it again."""
        with self._lock:
            self._slot.close()

    # --- how -------------------------------------------------------------------------------------

    def _change(self, query: str, *given: Any) -> Any:
        """Change what is there; nothing if there is no store, which is not made for that."""
        with self._lock:
            there = not self._is_empty() and self._attempt("schema_of", None) is not None
            return self._attempt(query, None, *given, write=True) if there else None

    def _read_key(self, query: str, otherwise: Any, key: StoreKey) -> Any:
        try:
            columns = to_columns(key)
        except ValueError:  # a key that cannot be stored is not there
            return otherwise
        return self._read(query, otherwise, columns)

    def _read(self, query: str, otherwise: Any, *given: Any) -> Any:
        try:
            with self._lock:
                if self._slot.backend is None and self._is_empty():
                    return otherwise
                # Every call that is traced reads: one that is locked for good costs one wait.
                with hurried(self._was_busy):
                    done = self._attempt(query, otherwise, *given)
                self._was_busy = False
                return done
        except StoreError as error:
            self._was_busy = isinstance(error, StoreBusy)
            self.warn_once(type(error), f"going on without it: {error}")
            return otherwise

    def _attempt(self, query: str, otherwise: Any, *given: Any, write: bool = False) -> Any:
        """What a function of `tables` gives; `otherwise` if there is nothing to read."""
        if self._slot.backend is None:
            from .backends import backend_of

            self._slot.backend = backend_of(self.location, self.warn_once)
        from . import tables

        backend = self._slot.backend
        for last in (False, False, True):  # a second recovery may follow from the first
            try:
                database = backend.database(write=write)
                if database is None:
                    return otherwise
                run = database.write if write else database.read
                done = run(lambda connection: getattr(tables, query)(connection, *given))
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


class _Slot:
    """What a store has open: apart from the store, so that it can be closed when that is gone."""

    backend: FileBackend | ServerBackend | None = None

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()


# --- forks ---------------------------------------------------------------------------------------

_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_stores_lock = threading.Lock()
_paused: list[Store] = []


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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
