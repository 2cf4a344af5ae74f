"""A store in a file of this machine: made on the first write, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import stat
import uuid

from . import folder, in_use, leftover, quarantine, schema
from .database import Database, new_file, open_file
from .durable import flush_folder
from .errors import (
    StoreDamaged,
    StoreError,
    StoreGone,
    StoreLeftOver,
    StoreReadOnly,
    StoreUnavailable,
)
from .folder import Identity
from .location import FolderLocation
from .notices import Notices
from .opening import bring_up_to_date, create_or_migrate
from .private import make_private


@dataclasses.dataclass
class _Opened:
    database: Database
    identity: Identity
    path: str
    refusal: StoreError | None  # why it may not be written

    def __post_init__(self) -> None:
        in_use.opened(self.identity, self.path)

    def close(self) -> None:
        self.database.close()
        in_use.closed(self.identity, self.path)


class FileHome:
    """Opens the file when it is needed, and again when another one has taken its place."""

    def __init__(self, location: FolderLocation, notices: Notices) -> None:
        self._location = location
        self._notices = notices
        self._opened: _Opened | None = None

    def database(self, *, write: bool) -> Database | None:
        """The open store. None if there is no file and none is needed to read."""
        with folder.as_store_errors(self._location):
            there = folder.identity(self._location)
            if self._opened is None or self._opened.identity != there:
                self.close()
                if there is None and not write:
                    return None
                folder.check_owner(self._location)
                if there is None:
                    self._make()
                self._opened = self._open()
        refusal = self._opened.refusal
        if write and refusal is not None:
            self.close()  # and look again the next time: rights can be given
            raise type(refusal)(str(refusal))
        return self._opened.database

    def is_current(self) -> bool:
        """False if another process moved the file away while it was written."""
        there = folder.identity(self._location)
        return self._opened is not None and self._opened.identity == there

    def recover(self, error: StoreError) -> bool:
        """After an error: put right what can be. True if another attempt makes sense."""
        seen = None if self._opened is None else self._opened.identity
        self.close()
        if isinstance(error, StoreGone):
            return True
        if isinstance(error, StoreLeftOver):
            with folder.as_store_errors(self._location):
                self._say_left_over(quarantine.set_log_aside(self._location))
            return True
        if not isinstance(error, StoreDamaged):
            return False
        with folder.as_store_errors(self._location):
            aside = quarantine.set_aside(self._location, seen or folder.identity(self._location))
        if aside is not None:
            target, reason = aside
            self._notices.once(
                str(target),
                f"{self._location.file} is damaged: {reason}. It was moved to {target} and is "
                "kept; work goes on with an empty store",
            )
        return True

    def _say_left_over(self, moved: pathlib.Path | None) -> None:
        if moved is not None:
            self._notices.once(
                str(moved),
                f"the log that lay beside {self._location.file} is of another file, which was "
                f"removed or replaced. It was moved to {moved}-* and is kept; what it holds is not "
                "in the store",
            )

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # --- opening ---------------------------------------------------------------------------------

    def _open(self) -> _Opened:
        file = self._location.file
        with folder.held(self._location, alone=False), in_use.guard:
            there = folder.identity(self._location)
            if there is None:
                raise StoreGone(f"{file} was removed a moment ago")
            reason = quarantine.wrong_from_the_start(file, there)
            if reason is not None:
                raise StoreDamaged(f"{file} is damaged: {reason}")
            reason = leftover.irregular(file)
            if reason is not None:
                raise StoreUnavailable(reason)
            if leftover.has_foreign_log(file, there):
                raise StoreLeftOver(f"beside {file} lies the log of another file")
            database, found, refusal = self._connected()
            opened = _Opened(database, there, str(file), refusal)
        try:
            if found is None:
                raise StoreDamaged(f"{file} has not the tables of a store")
            refusal = bring_up_to_date(database, str(file), found, self._notices.once)
        except StoreError:
            opened.close()
            raise
        opened.refusal = refusal or opened.refusal
        return opened

    def _connected(self) -> tuple[Database, int | None, StoreError | None]:
        """The database in the freest way that works, its schema, and why it may not be written."""
        refusal: StoreError | None = None
        for mode in ("rw", "ro", "immutable"):
            # Without the right to write beside it, a log that is there cannot be read along.
            if mode == "immutable" and self._has_log():
                break
            database = open_file(self._location, mode=mode)
            try:
                return database, database.read(schema.found), refusal
            except (StoreUnavailable, StoreReadOnly) as error:
                database.close()
                refusal = refusal or StoreReadOnly(str(error))
            except StoreError:
                database.close()
                raise
        if folder.identity(self._location) is None:
            raise StoreGone(f"{self._location.file} was removed a moment ago")
        raise StoreUnavailable(f"{refusal}. Check who may read and write {self._location.folder}")

    def _has_log(self) -> bool:
        log = pathlib.Path(f"{self._location.file}-wal")
        return log.exists() and log.stat().st_size > 0

    # --- making ----------------------------------------------------------------------------------

    def _make(self) -> None:
        """Make the file under another name and move it into place: it is never seen half made."""
        location = self._location
        try:
            make_private(location.folder)
        except OSError as error:
            raise StoreUnavailable(
                f"{location.folder} cannot be made: {error.strerror}; give a folder that you may "
                "write: PersistentCache(path), or EJKERNEL_CACHE_DIR"
            ) from None
        with folder.held(location, alone=True) as really:
            if folder.identity(location) is not None:
                return  # someone was faster
            if really:
                self._remove_unfinished()
            draft = location.folder / f"{location.name}.new-{uuid.uuid4().hex}"
            try:
                self._touch(draft)
                self._fill(draft)
                self._say_left_over(quarantine.move_log(location))  # of a file that was removed
                if really:
                    os.rename(draft, location.file)
                else:  # two may be here at once: the first one wins
                    os.link(draft, location.file)
                flush_folder(location.folder)
            except FileExistsError:
                return
            except OSError as error:
                if isinstance(error, StoreError):
                    raise
                raise StoreUnavailable(
                    f"{location.folder} cannot be written: {error.strerror}"
                ) from None
            finally:
                self._remove(draft)

    def _touch(self, draft: pathlib.Path) -> None:
        """An empty file, as private as its folder: a folder that we made is ours alone.

        Whoever shares a folder, with a group or to be read, shares the store, whatever the umask.
        SQLite gives the files beside it the same mode.
        """
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if os.name == "posix":
                shared = os.stat(self._location.folder).st_mode & 0o066
                os.fchmod(descriptor, 0o600 | (0 if shared & stat.S_IWOTH else shared))
        finally:
            os.close(descriptor)

    def _fill(self, draft: pathlib.Path) -> None:
        journal = "DELETE" if folder.on_network(self._location.folder) else "WAL"
        database = new_file(draft, str(self._location.file), journal=journal)
        try:
            database.write(create_or_migrate)
        finally:
            database.close()

    def _remove_unfinished(self) -> None:
        for left in self._location.folder.glob(f"{self._location.name}.new-*"):
            with contextlib.suppress(OSError):  # whatever it is, it is not in the way
                left.unlink()

    def _remove(self, draft: pathlib.Path) -> None:
        for suffix in ("", *leftover.COMPANIONS):
            with contextlib.suppress(OSError):
                pathlib.Path(f"{draft}{suffix}").unlink(missing_ok=True)
