"""Where a store lives: an SQLite file of this machine, or a database server.

A file is made on the first write, whole or not at all. One that is no store is moved aside, for a
person to look at, and so is a log that belongs to another file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
import stat
import time
import uuid

from . import tables
from .database import Database, open_file, open_server
from .errors import (
    StoreDamaged,
    StoreError,
    StoreForeignLog,
    StoreGone,
    StoreReadOnly,
    StoreUnavailable,
    WarnOnce,
)
from .location import FolderLocation, Location, ServerLocation
from .private import check_owner, flush_folder, make_private
from .sqlite_file import (
    COMPANIONS,
    Identity,
    as_store_errors,
    check_companions,
    count_connection,
    folder_lock,
    guard,
    has_foreign_log,
    identity,
    is_open,
    log_is_foreign,
    nobody_uses,
)
from .tables import bring_up_to_date, create_or_migrate


def backend_of(location: Location, warn_once: WarnOnce) -> FileBackend | ServerBackend:
    """The backend of a store; nothing is opened yet."""
    if isinstance(location, FolderLocation):
        return FileBackend(location, warn_once)
    return ServerBackend(location, warn_once)


# --- a file --------------------------------------------------------------------------------------


@dataclasses.dataclass
class _OpenFile:
    database: Database
    identity: Identity
    path: str
    refusal: StoreError | None  # why it may not be written

    def __post_init__(self) -> None:
        count_connection(self.identity, self.path, +1)

    def close(self) -> None:
        self.database.close()
        count_connection(self.identity, self.path, -1)


class FileBackend:
    """Opens the file when it is needed, and again when another one has taken its place."""

    def __init__(self, location: FolderLocation, warn_once: WarnOnce) -> None:
        self._location = location
        self._warn_once = warn_once
        self._open_file: _OpenFile | None = None

    def database(self, *, write: bool) -> Database | None:
        """The open database; None if there is none yet and none is needed to read."""
        with self._store_errors():
            there = identity(self._location)
            if self._open_file is None or self._open_file.identity != there:
                self.close()
                if there is None and not write:
                    return None
                check_owner(self._location)
                if there is None:
                    self._make()
                self._open_file = self._open()
        refusal = self._open_file.refusal
        if write and refusal is not None:
            self.close()  # and look again the next time: rights can be given
            raise type(refusal)(str(refusal))
        return self._open_file.database

    def is_current(self) -> bool:
        """False if what was open is not the store any more: a write must be done again."""
        return self._open_file is not None and self._open_file.identity == identity(self._location)

    def recover(self, error: StoreError) -> bool:
        """Repair what can be repaired after an error; True if another attempt makes sense."""
        seen = None if self._open_file is None else self._open_file.identity
        self.close()
        with self._store_errors():
            if isinstance(error, StoreForeignLog):
                self._warn_left_over(_set_log_aside(self._location))
            elif isinstance(error, StoreDamaged):
                aside = _set_aside(self._location, seen or identity(self._location))
                if aside is not None:
                    target, reason = aside
                    self._warn_once(
                        target,
                        f"{self._location.file} is damaged: {reason}. It was moved to {target}; "
                        "work goes on with an empty store",
                    )
        return isinstance(error, (StoreGone, StoreForeignLog, StoreDamaged))

    def close(self) -> None:
        """Close it; the next use opens it again."""
        if self._open_file is not None:
            self._open_file.close()
            self._open_file = None

    def _store_errors(self) -> contextlib.AbstractContextManager[None]:
        return as_store_errors(f"{self._location.folder} cannot be used")

    def _warn_left_over(self, target: pathlib.Path | None) -> None:
        if target is not None:
            self._warn_once(
                target,
                f"the log that lay next to {self._location.file} is of another file, which was "
                f"removed or replaced. It was moved to {target}-*; what it holds is not in the "
                "store",
            )

    def _open(self) -> _OpenFile:
        file = self._location.file
        with folder_lock(self._location, alone=False), guard:
            there = identity(self._location)
            if there is None:
                raise StoreGone(f"{file} was removed a moment ago")
            if (reason := _wrong_from_the_start(file, there)) is not None:
                raise StoreDamaged(f"{file} is damaged: {reason}")
            check_companions(file)
            if has_foreign_log(file, there):
                raise StoreForeignLog(f"next to {file} lies the log of another file")
            database, schema, refusal = self._connected()
            opened = _OpenFile(database, there, str(file), refusal)
        try:
            if schema is None:
                raise StoreDamaged(f"{file} has not the tables of a store")
            refusal = bring_up_to_date(database, str(file), schema, self._warn_once)
        except StoreError:
            opened.close()
            raise
        opened.refusal = refusal or opened.refusal
        return opened

    def _connected(self) -> tuple[Database, int | None, StoreError | None]:
        """The database in the freest way that works, its schema, and why it may not be written."""
        refusal: StoreError | None = None
        for mode in ("rw", "ro", "immutable"):
            # Without the right to write next to it, a log that is there cannot be read along.
            log = pathlib.Path(f"{self._location.file}-wal")
            if mode == "immutable" and log.exists() and log.stat().st_size > 0:
                break
            database = open_file(self._location.file, mode=mode)
            try:
                return database, database.read(tables.schema_of), refusal
            except StoreError as error:
                database.close()
                if not isinstance(error, (StoreUnavailable, StoreReadOnly)):
                    raise
                refusal = refusal or StoreReadOnly(str(error))
        if identity(self._location) is None:
            raise StoreGone(f"{self._location.file} was removed a moment ago")
        raise StoreUnavailable(f"{refusal}. Check who may read and write {self._location.folder}")

    def _make(self) -> None:
        """Make the file under another name and move it into place: it is never seen half made."""
        location = self._location
        advice = "; give a folder that you may write: PersistentCache(path), or EJKERNEL_CACHE_DIR"
        with as_store_errors(f"{location.folder} cannot be made", advice):
            make_private(location.folder)
        with folder_lock(location, alone=True) as really:
            if identity(location) is not None:
                return  # someone was faster
            if really:
                for draft in location.folder.glob(f"{location.name}.new-*"):
                    _remove(draft)  # of a process that died
            draft = location.folder / f"{location.name}.new-{uuid.uuid4().hex}"
            try:
                with as_store_errors(f"{location.folder} cannot be written"):
                    self._fill(draft)
                    self._warn_left_over(_move_log(location))  # of a file that was removed
                    if really:
                        os.rename(draft, location.file)
                    else:  # two may be here at once: the first one wins
                        with contextlib.suppress(FileExistsError):
                            os.link(draft, location.file)
                    flush_folder(location.folder)
            finally:
                for suffix in ("", *COMPANIONS):
                    _remove(f"{draft}{suffix}")

    def _fill(self, draft: pathlib.Path) -> None:
        """Make an empty store in a file as private as its folder: one that we made is ours alone.

        Whoever shares a folder, with a group or to be read, shares the store, whatever the umask.
        SQLite gives the files next to it the same mode.
        """
        folder = self._location.folder
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if os.name == "posix":
                shared = os.stat(folder).st_mode & 0o066
                os.fchmod(descriptor, 0o600 | (0 if shared & stat.S_IWOTH else shared))
        finally:
            os.close(descriptor)
        journal = "DELETE" if on_network(folder) else "WAL"
        new = open_file(draft, shown=str(self._location.file), journal=journal)
        with contextlib.closing(new):
            new.write(create_or_migrate)


def _remove(path: str | os.PathLike[str]) -> None:
    with contextlib.suppress(OSError):  # whatever it is, it is not in the way
        os.unlink(path)


_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs"}


def on_network(folder: pathlib.Path) -> bool:
    """True if other machines may have the same folder: SQLite's shared memory ends at this one."""
    try:
        mounts = pathlib.Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    path = os.path.realpath(folder)
    best, kind = "", ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = (*left.split(), *[""] * 5)[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= len(best):
            best, kind = point, right.split(" ", 1)[0]
    return kind in _NETWORK or kind.startswith("fuse.sshfs")


# --- moving aside --------------------------------------------------------------------------------

_MAGIC = b"SQLite format 3\0"


def _set_aside(location: FolderLocation, seen: Identity | None) -> tuple[pathlib.Path, str] | None:
    """Move the damaged file `seen` away; where to, and what is wrong with it.

    None if there is nothing to do: the file is sound after all, or another process was faster.
    """
    with folder_lock(location, alone=True), guard:
        # Looked at again, now that nobody is opening or moving it: a passing fault of one process
        # must not take the store away from all of them.
        if seen is None or identity(location) != seen:
            return None
        if (reason := _damage(location, seen)) is None:
            return None
        what = f"{location.file} is damaged ({reason}) and cannot be moved aside"
        with as_store_errors(what, "; move it away yourself"):
            target = _free_name(location, "damaged")
            # The file goes last. Next to a new, empty file SQLite would delete a log it finds.
            _move(location, target, (*COMPANIONS, ""))
            return target, reason


def _set_log_aside(location: FolderLocation) -> pathlib.Path | None:
    """Move the log of another file away from this one; where to, or None if there is none.

    Others that have the file open would go on with the log that they know, and what they write
    there would be lost. That can only be if the file was overwritten while they had it open.
    """
    with folder_lock(location, alone=True), guard:
        there = identity(location)
        if there is None or is_open(there):
            return None
        what = f"next to {location.file} lies the log of another file, which cannot be moved aside"
        with (
            as_store_errors(what, "; move it away yourself"),
            nobody_uses(location.file) as alone,
        ):
            if not log_is_foreign(location.file, there, alone):  # looked at again
                return None
            if not alone:
                raise StoreUnavailable(
                    f"{location.file} was overwritten while other processes have it open; end "
                    "them, and it can be used"
                )
            return _move_log(location)


def _move_log(location: FolderLocation) -> pathlib.Path | None:
    """Move what SQLite has next to a file away from it; where to, None if there is nothing.

    To be called with the lock on the folder, when nobody has the file open or there is none. Who
    still has a file that was removed goes on with its own log, under another name.
    """
    target = _free_name(location, "left-over")
    return target if _move(location, target, COMPANIONS) else None


def _move(location: FolderLocation, target: pathlib.Path, suffixes: tuple[str, ...]) -> bool:
    there = [suffix for suffix in suffixes if os.path.lexists(f"{location.file}{suffix}")]
    for suffix in there:
        os.rename(f"{location.file}{suffix}", f"{target}{suffix}")
    return bool(there)


def _free_name(location: FolderLocation, why: str) -> pathlib.Path:
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    target, number = location.folder / f"{location.name}.{why}-{moment}", 1
    while any(os.path.lexists(f"{target}{suffix}") for suffix in ("", *COMPANIONS)):
        number += 1
        target = location.folder / f"{location.name}.{why}-{moment}-{number}"
    return target


def _wrong_from_the_start(file: pathlib.Path, identity: Identity) -> str | None:
    """What a look at the first bytes of a file tells, or None if they are those of SQLite.

    SQLite itself would make a store of an empty file, and throw away the log of one it cannot read.
    To be called with `guard`.
    """
    if is_open(identity):
        return None  # it was looked at before, and must not be opened like this now
    try:
        with open(file, "rb") as stream:
            start = stream.read(len(_MAGIC))
    except OSError:
        return None  # SQLite will say why
    if start == _MAGIC:
        return None
    return "it is no SQLite database" if start else "it is empty"


def _damage(location: FolderLocation, identity: Identity) -> str | None:
    """What is wrong with the file of a store, or None if it is sound."""
    if (reason := _wrong_from_the_start(location.file, identity)) is not None:
        return reason
    with contextlib.closing(open_file(location.file)) as database:
        try:
            schema = database.read(tables.schema_of)
            is_todays = schema == tables.newest_schema()
            if schema is None or (is_todays and not database.read(tables.is_readable)):
                return "it has not the tables of a store"
            check = database.read(lambda c: c.exec_driver_sql("PRAGMA integrity_check(1)").scalar())
        except StoreDamaged as error:
            return str(error)
    return None if check == "ok" else str(check)


# --- a server ------------------------------------------------------------------------------------

REST = 30.0
"""Seconds in which nobody waits again for a server that did not answer."""


class ServerBackend:
    """As `FileBackend`: connects when it is needed, and makes its tables on the first write."""

    def __init__(self, location: ServerLocation, warn_once: WarnOnce) -> None:
        self._location = location
        self._warn_once = warn_once
        self._database: Database | None = None
        self._refusal: StoreError | None = None
        self._ready = False
        self._rest_until = 0.0

    def database(self, *, write: bool) -> Database | None:
        shown = self._location.shown
        # A write is worth the wait: its result took longer to measure.
        if not write and time.monotonic() < self._rest_until:
            raise StoreUnavailable(f"{shown} did not answer a moment ago")
        if self._database is None:
            self._database = open_server(self._location)
        if not self._ready:
            schema = self._database.read(tables.schema_of)
            if schema is not None:
                self._refusal = bring_up_to_date(self._database, shown, schema, self._warn_once)
            elif write:
                self._database.write(create_or_migrate)
            else:
                return None
            self._ready = True
        if write and self._refusal is not None:
            raise type(self._refusal)(str(self._refusal))
        return self._database

    def is_current(self) -> bool:
        return True  # there is one server

    def recover(self, error: StoreError) -> bool:
        if isinstance(error, StoreUnavailable):
            self._rest_until = time.monotonic() + REST
        self.close()
        return isinstance(error, StoreGone)

    def close(self) -> None:
        """Close the connection; what is known about the server is asked again."""
        self._ready = False
        self._refusal = None
        if self._database is not None:
            self._database.close()
            self._database = None
