"""Folders that nobody else can tamper with, and files that are whole or not there.

What lies in the cache folder is believed, and some of it is run, so nobody else may have put it
there. A `PrivateFolder` is opened once and checked as it is open; everything in it is then reached
through that descriptor and never through a link. So there is no moment between the check and the
use, and what is made is private whatever the umask. SQLite opens its files by path, so the folder
of a store is checked by `check_owner` before that.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import stat
import uuid
from collections.abc import Iterator
from typing import Self

from .errors import StoreRefused
from .location import FolderLocation
from .reading import LARGEST, READ_ONLY, not_regular, read_descriptor

_POSIX = os.name == "posix"  # elsewhere folders cannot be opened, and paths have to do
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | getattr(os, "O_BINARY", 0)


class FolderRefused(OSError):
    """A folder or a file in it that another user could have made or changed."""


class PrivateFolder:
    """An open folder that belongs to this user, or to root, and in which not everyone may write.

    Use `open`; it is a context manager.
    """

    def __init__(self, path: pathlib.Path, descriptor: int | None) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = False) -> Self:
        """Open a folder, with `create` after making it and the folders above it.

        Raises `FileNotFoundError` if it is not there, `FolderRefused` if it is not ours, or if the
        folder above it is not, and other kinds of `OSError`.
        """
        folder = pathlib.Path(path).absolute()
        if (reason := _reason_against_parent(folder, shared=False)) is not None:
            raise _refused(folder, reason)
        if create:
            make_private(folder)
        if not _POSIX:
            os.listdir(folder)  # raises if it is not there
            return cls(folder, None)
        if (reason := _reason_against_link(folder)) is not None:
            raise _refused(folder, reason)
        return cls._checked(folder, os.open(folder, _FOLDER))

    def inner(self, name: str, *, create: bool = False) -> Self:
        """Open a folder inside of this one; a link in its place is refused."""
        if create:
            make_private(pathlib.Path(self._name(name)), self.descriptor)
        if not _POSIX:
            return type(self).open(self.path / name)
        try:
            descriptor = os.open(name, _FOLDER | _NOFOLLOW, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _refused(self.path / name, "it is a link or a file") from None
            raise
        return self._checked(self.path / name, descriptor)

    @classmethod
    @contextlib.contextmanager
    def open_inner(
        cls, path: str | os.PathLike[str], name: str, *, create: bool = False
    ) -> Iterator[Self]:
        """Open a folder, and one inside of it for as long as the block runs."""
        with cls.open(path, create=create) as folder, folder.inner(name, create=create) as inner:
            yield inner

    @classmethod
    def _checked(cls, path: pathlib.Path, descriptor: int) -> Self:
        status = os.fstat(descriptor)
        if _ours(status) and not status.st_mode & stat.S_IWOTH:
            return cls(path, descriptor)
        os.close(descriptor)
        owner = f"it belongs to {_user(status.st_uid)}"
        raise _refused(path, "everyone may write in it" if _ours(status) else owner)

    def close(self) -> None:
        """Close the descriptor; the folder must not be used afterwards."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- what is in it ---------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of what is in it, sorted."""
        return sorted(os.listdir(self.path if self.descriptor is None else self.descriptor))

    def status(self, name: str) -> os.stat_result:
        """What a name stands for; of a link, the link."""
        return os.stat(self._name(name), dir_fd=self.descriptor, follow_symlinks=False)

    @contextlib.contextmanager
    def opened(self, name: str, *, never: int = stat.S_IWOTH) -> Iterator[int]:
        """A descriptor of a regular file of ours, to read, for as long as the block runs.

        Raises `FileNotFoundError`, `ValueError` if it is no regular file, and `FolderRefused` if it
        is not ours or its mode has one of the bits of `never`.
        """
        descriptor = self.open_file(name, never=never)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def open_file(self, name: str, *, never: int = stat.S_IWOTH) -> int:
        """As `opened`, for whoever closes the descriptor themselves."""
        try:
            descriptor = os.open(self._name(name), READ_ONLY | _NOFOLLOW, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError("it is a link, not a regular file") from None
            raise
        try:
            status = os.fstat(descriptor)
            if (irregular := not_regular(status)) is not None:
                raise ValueError(irregular)
            if not _ours(status):
                raise _refused(self.path / name, f"it belongs to {_user(status.st_uid)}")
            if _POSIX and status.st_mode & never:
                raise _refused(self.path / name, "others may write it")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, *, limit: int = LARGEST) -> bytes:
        """The bytes of a file; raises what `opened` does, and `ValueError` if it is too large."""
        with self.opened(name) as descriptor:
            return read_descriptor(descriptor, limit=limit)

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write a file that only its owner may read: whole, or not at all.

        Without `durable` the disk is not waited for: a machine that loses power loses the file.
        """
        temporary = f".writing-{uuid.uuid4().hex}"
        descriptor = os.open(self._name(temporary), _NEW, 0o600, dir_fd=self.descriptor)
        try:
            if _POSIX:
                os.fchmod(descriptor, 0o600)
            _write_and_close(descriptor, data, durable=durable)
            self.move(temporary, self, name, durable=durable)
        except BaseException:
            self.remove(temporary)
            raise

    def move(
        self, name: str, target: PrivateFolder, new_name: str, *, durable: bool = True
    ) -> None:
        """Move something to another folder or name, in place of what is there."""
        os.replace(
            self._name(name),
            target._name(new_name),
            src_dir_fd=self.descriptor,
            dst_dir_fd=target.descriptor,
        )
        if durable:
            target.flush()

    def remove(self, name: str) -> bool:
        """Remove a file, or a link itself; False if it was not there."""
        try:
            os.unlink(self._name(name), dir_fd=self.descriptor)
        except FileNotFoundError:
            return False
        return True

    def flush(self) -> None:
        """Make names durable: a new one, a rename or a removal is only in memory before."""
        if self.descriptor is not None:
            os.fsync(self.descriptor)

    def _name(self, name: str) -> str:
        return name if self.descriptor is not None else str(self.path / name)


def make_private(folder: pathlib.Path, descriptor: int | None = None) -> None:
    """Make a folder, and those above it, for its owner alone; nothing if it is there already.

    With the `descriptor` of an open folder, `folder` is a name in that.
    """
    missing = [folder]
    if descriptor is None:
        above = itertools.takewhile(lambda path: not os.path.lexists(path), folder.parents)
        missing = [] if os.path.lexists(folder) else [folder, *above]
    for path in reversed(missing):
        try:
            os.mkdir(path, 0o700, dir_fd=descriptor)
        except FileExistsError:
            continue
        made = os.stat(path, dir_fd=descriptor, follow_symlinks=False)
        if _POSIX and stat.S_IMODE(made.st_mode) != 0o700:  # the umask took something away
            os.chmod(path, 0o700, dir_fd=descriptor)


def why_not_writable(folder: pathlib.Path) -> str | None:
    """Why nothing can be written to a folder, which may have to be made first; None if it can."""
    paths = (folder.absolute(), *folder.absolute().parents)
    there = next(path for path in paths if os.path.lexists(path))
    if not os.path.isdir(there):
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written"


def _refused(path: pathlib.Path, why: str, kind: type[OSError] = FolderRefused) -> OSError:
    return kind(
        f"{path} is not used: {why}. Remove it, or give a folder of your own: EJKERNEL_CACHE_DIR, "
        "or PersistentCache(path)"
    )


# --- whose folder it is --------------------------------------------------------------------------


def check_owner(location: FolderLocation) -> None:
    """Refuse a folder that another user controls: what we read and write there could be theirs.

    Refused are links that someone else made, what a link of one's own leads to if it belongs to
    someone else, and folders of someone else in which everyone may write.
    """
    for path, reason in _reasons_against(location):
        if reason is not None:
            raise _refused(path, reason, StoreRefused)


def _reasons_against(location: FolderLocation) -> Iterator[tuple[pathlib.Path, str | None]]:
    folder = location.folder
    if hasattr(os, "geteuid") and os.path.lexists(folder):
        for path in (folder, location.file):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                yield path, _reason_against_link(path)
        status = os.stat(folder)
        if status.st_uid != os.geteuid() and status.st_mode & stat.S_IWOTH:
            yield folder, f"it belongs to {_user(status.st_uid)} and everyone may write in it"
    yield folder, _reason_against_parent(folder)


def _reason_against_link(path: pathlib.Path) -> str | None:
    link = os.lstat(path)
    if not stat.S_ISLNK(link.st_mode):
        return None
    if not _ours(link):
        return f"it is a link made by {_user(link.st_uid)}"
    if _ours(target := os.stat(path)):
        return None
    return f"it is a link to {os.path.realpath(path)}, which belongs to {_user(target.st_uid)}"


def _reason_against_parent(folder: pathlib.Path, *, shared: bool = True) -> str | None:
    """Why the folders above a folder make that useless: somebody can replace what is in them.

    That is who made a link on the way, and the owner of the folder right above: the sticky bit
    binds everyone else. One in which not everyone may write is fine if it may be `shared` with a
    group.
    """
    parents = folder.absolute().parents
    parent = next((p for p in parents if os.path.isdir(p)), None)
    if parent is None or not hasattr(os, "geteuid"):
        return None
    for path in parents:
        with contextlib.suppress(OSError):  # it is not there yet
            link = os.lstat(path)
            if stat.S_ISLNK(link.st_mode) and not _ours(link):
                return f"the folder {path} above it is a link made by {_user(link.st_uid)}"
    status = os.stat(parent)
    if _ours(status) or (shared and not status.st_mode & stat.S_IWOTH):
        return None
    everyone = " and everyone may write in it" if status.st_mode & stat.S_IWOTH else ""
    owner = f"{_user(status.st_uid)}{everyone}"
    return f"the folder {parent} above it belongs to {owner}, who may replace what is in it"


def _ours(status: os.stat_result) -> bool:
    """True if something belongs to this user, or to root, who can do everything anyway."""
    return not hasattr(os, "geteuid") or status.st_uid in (os.geteuid(), 0)


def _user(uid: int) -> str:
    return "root" if uid == 0 else f"another user (uid {uid})"


# --- whole files ---------------------------------------------------------------------------------


def write_whole(file: pathlib.Path, text: str) -> None:
    """Write a file under another name and move it into place; its folder is made if need be.

    A pipe or a device (`/dev/stdout`) is written to and stays what it is; so does a link.
    """
    file = pathlib.Path(os.path.realpath(file))
    if file.exists() and not file.is_file() and not file.is_dir():
        file.write_text(text, encoding="utf-8")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".writing-{uuid.uuid4().hex}")
    try:
        _write_and_close(os.open(temporary, _NEW, 0o666), text.encode())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(file.parent)


def _write_and_close(descriptor: int, data: bytes, *, durable: bool = True) -> None:
    """Write to a descriptor, which is closed; if it is to be durable, wait for the disk."""
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        if durable:
            os.fsync(stream.fileno())


def flush_folder(folder: pathlib.Path) -> None:
    """Make names durable: a new one, a rename or a removal is only in memory before."""
    if _POSIX:  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
