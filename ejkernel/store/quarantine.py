"""A file that is no store is moved aside: kept for a person to look at, and out of the way."""

from __future__ import annotations

import datetime
import os
import pathlib

from . import folder, in_use, leftover, schema
from .database import open_file
from .errors import StoreDamaged, StoreUnavailable
from .folder import Identity
from .leftover import COMPANIONS
from .location import FolderLocation

_MAGIC = b"SQLite format 3\0"


def set_aside(location: FolderLocation, seen: Identity | None) -> tuple[pathlib.Path, str] | None:
    """Move the damaged file `seen` away; where to, and what is wrong with it.

    None if there is nothing to do: the file is sound after all, or another process was faster.
    """
    with folder.held(location, alone=True), in_use.guard:
        # Looked at again, now that nobody is opening or moving it: a passing fault of one process
        # must not take the store away from all of them.
        if seen is None or folder.identity(location) != seen:
            return None
        reason = damage(location, seen)
        if reason is None:
            return None
        try:
            return _move(location), reason
        except OSError as error:
            raise StoreUnavailable(
                f"{location.file} is damaged ({reason}) and cannot be moved aside: "
                f"{error.strerror}; move it away yourself"
            ) from None


def set_log_aside(location: FolderLocation) -> pathlib.Path | None:
    """Move the log of another file away from this one; where to, or None if there is none.

    Others that have the file open would go on with the log that they know, and what they write
    there would be lost. That can only be if the file was overwritten while they had it open.
    """
    with folder.held(location, alone=True), in_use.guard:
        there = folder.identity(location)
        if there is None or in_use.is_open(there):
            return None
        try:
            with leftover.nobody_uses(location.file) as alone:
                if not leftover.log_is_foreign(location.file, there, alone):  # looked at again
                    return None
                if not alone:
                    raise StoreUnavailable(
                        f"{location.file} was overwritten while other processes have it open; end "
                        "them, and it can be used"
                    )
                return move_log(location)
        except StoreUnavailable:
            raise
        except OSError as error:
            raise StoreUnavailable(
                f"beside {location.file} lies the log of another file, which cannot be moved "
                f"aside: {error.strerror}; move it away yourself"
            ) from None


def move_log(location: FolderLocation) -> pathlib.Path | None:
    """Move what SQLite keeps beside a file away from its place; where to, None if there is nothing.

    To be called with the lock on the folder, when nobody has the file open or there is none. Who
    still has a file that was removed goes on with its own log, under another name.
    """
    target = _free_name(location, "left-over")
    moved = False
    for suffix in COMPANIONS:
        part = pathlib.Path(f"{location.file}{suffix}")
        if os.path.lexists(part):
            os.rename(part, f"{target}{suffix}")
            moved = True
    return target if moved else None


def wrong_from_the_start(file: pathlib.Path, identity: Identity) -> str | None:
    """What a look at the first bytes of a file tells, or None if they are those of SQLite.

    SQLite itself would make a store of an empty file, and throw away the log of one it cannot read.
    To be called with `in_use.guard`.
    """
    if in_use.is_open(identity):
        return None  # it was looked at before, and must not be opened like this now
    try:
        with open(file, "rb") as stream:
            start = stream.read(len(_MAGIC))
    except OSError:
        return None  # SQLite will say why
    if start == _MAGIC:
        return None
    return "it is no SQLite database" if start else "it is empty"


def damage(location: FolderLocation, identity: Identity) -> str | None:
    """What is wrong with the file of a store, or None if it is sound."""
    reason = wrong_from_the_start(location.file, identity)
    if reason is not None:
        return reason
    database = open_file(location)
    try:
        found = database.read(schema.found)
        if found is None or (found == schema.newest() and not database.read(schema.readable)):
            return "it has not the tables of a store"
        check = database.read(lambda c: c.exec_driver_sql("PRAGMA integrity_check(1)").scalar())
        return None if check == "ok" else str(check)
    except StoreDamaged as error:
        return str(error)
    finally:
        database.close()


def _move(location: FolderLocation) -> pathlib.Path:
    target = _free_name(location, "damaged")
    # The file itself goes last. Beside a new, empty file SQLite would delete a log it finds.
    for suffix in (*COMPANIONS, ""):
        part = location.folder / f"{location.name}{suffix}"
        if os.path.lexists(part):
            os.rename(part, f"{target}{suffix}")
    return target


def _free_name(location: FolderLocation, why: str) -> pathlib.Path:
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    target, number = location.folder / f"{location.name}.{why}-{moment}", 1
    while any(os.path.lexists(f"{target}{suffix}") for suffix in ("", *COMPANIONS)):
        number += 1
        target = location.folder / f"{location.name}.{why}-{moment}-{number}"
    return target
