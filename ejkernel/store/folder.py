"""The folder of a store: may it be trusted, who may open or move its file right now."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import os
import pathlib
import stat
import time
from collections.abc import Iterator

from .errors import StoreBusy, StoreError, StoreRefused, StoreUnavailable
from .location import FolderLocation
from .reading import not_regular

Identity = tuple[int, int]

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


def deadline(patience: float) -> float:
    """Until when others are waited for, by the clock of `time.monotonic`."""
    return time.monotonic() + (0.0 if _hurried.get() else patience)


_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs"}


def identity(location: FolderLocation) -> Identity | None:
    """Which file is there now: device and inode; None if there is none.

    Something else than a file in its place is as good as no store: opening a pipe would wait.
    """
    try:
        status = os.stat(location.file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreUnavailable(f"{location.file} cannot be read: {error.strerror}") from None
    reason = not_regular(status)
    if reason is not None:
        raise StoreUnavailable(f"{location.file} cannot be read: {reason}")
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def as_store_errors(location: FolderLocation) -> Iterator[None]:
    """Turn what the system says about a folder, which others may change, into `StoreError`."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreUnavailable(
            f"{location.folder} cannot be used: {error.strerror or error}"
        ) from None


# --- trust ---------------------------------------------------------------------------------------


def check_owner(location: FolderLocation) -> None:
    """Refuse a folder that another user controls: what we read and write there could be theirs.

    Refused are links that someone else made, what a link of one's own leads to if it belongs to
    someone else, and folders of someone else in which everyone may write.
    """
    if not hasattr(os, "geteuid"):
        return
    folder = location.folder
    if not os.path.lexists(folder):
        _check_parent(folder)
        return
    for place in (folder, location.file):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            link = os.lstat(place)
            if not stat.S_ISLNK(link.st_mode):
                continue
            if not ours(link):
                raise _refused(place, f"it is a link made by {user(link.st_uid)}")
            if not ours(os.stat(place)):
                target, owner = os.path.realpath(place), user(os.stat(place).st_uid)
                raise _refused(place, f"it is a link to {target}, which belongs to {owner}")
    status = os.stat(folder)
    if not ours(status, root=False) and status.st_mode & stat.S_IWOTH:
        raise _refused(folder, f"it belongs to {user(status.st_uid)} and everyone may write in it")
    _check_parent(folder)


def _check_parent(folder: pathlib.Path) -> None:
    reason = reason_against_parent(folder)
    if reason is not None:
        raise _refused(folder, reason)


def reason_against_parent(folder: pathlib.Path, *, shared: bool = True) -> str | None:
    """Why the folders above a folder make that useless: somebody can replace what is in them.

    That is who made a link on the way, and the owner of the folder right above: the sticky bit
    binds everyone else. One in which not everyone may write is fine if it may be `shared` with a
    group.
    """
    parents = folder.absolute().parents
    parent = next((p for p in parents if os.path.isdir(p)), None)
    if parent is None or not hasattr(os, "geteuid"):
        return None
    for place in parents:
        with contextlib.suppress(OSError):  # it is not there yet
            link = os.lstat(place)
            if stat.S_ISLNK(link.st_mode) and not ours(link):
                return f"the folder {place} above it is a link made by {user(link.st_uid)}"
    status = os.stat(parent)
    if ours(status) or (shared and not status.st_mode & stat.S_IWOTH):
        return None
    everyone = " and everyone may write in it" if status.st_mode & stat.S_IWOTH else ""
    return (
        f"the folder {parent} above it belongs to {user(status.st_uid)}{everyone}, who may replace "
        "what is in it"
    )


def ours(status: os.stat_result, root: bool = True) -> bool:
    """True if something belongs to this user, or to root, who can do everything anyway."""
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid == os.geteuid() or (root and status.st_uid == 0)


def user(uid: int) -> str:
    """A user, for a message."""
    return "root" if uid == 0 else f"another user (uid {uid})"


def _refused(place: pathlib.Path, why: str) -> StoreRefused:
    return StoreRefused(
        f"{place} is not used: {why}. Give a folder of your own: PersistentCache(path), or "
        "EJKERNEL_CACHE_DIR"
    )


def why_nothing_can_be_kept(folder: pathlib.Path) -> str | None:
    """Why nothing can be written to a folder, which may have to be made first; None if it can."""
    places = (folder.absolute(), *folder.absolute().parents)
    there = next(place for place in places if os.path.lexists(place))
    if not os.path.isdir(there):
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written"


# --- locks ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def held(location: FolderLocation, *, alone: bool) -> Iterator[bool]:
    """Hold the folder while opening the store's file, or alone while making or moving it.

    The lock is on the folder itself, so that it leaves no file behind. True if it is a real one;
    some file systems have none.
    """
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield False
        return
    try:
        descriptor = os.open(location.folder, os.O_RDONLY)
    except OSError as error:
        raise StoreUnavailable(f"{location.folder} cannot be read: {error.strerror}") from None
    try:
        yield _locked(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, location)
    finally:
        os.close(descriptor)  # and with it the lock


def _locked(descriptor: int, kind: int, location: FolderLocation) -> bool:
    import fcntl

    until = deadline(PATIENCE)
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


# --- file systems --------------------------------------------------------------------------------


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
        fields, point = left.split(), ""
        if len(fields) > 4:
            point = fields[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= len(best):
            best, kind = point, right.split(" ", 1)[0]
    return kind in _NETWORK or kind.startswith("fuse.sshfs")
