"""Folders of this user alone, worked in by descriptor.

What lies in the cache folder is believed, and some of it is run, so nobody else may have put it
there. A folder is opened once and checked as it is open; everything in it is then reached through
that descriptor and never through a link. So there is no moment between the check and the use, and
what is made is private whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from .folder import ours, reason_against_parent, user
from .reading import LARGEST, not_regular, read_descriptor

_POSIX = os.name == "posix"  # elsewhere folders cannot be opened, and paths have to do
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


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
        reason = reason_against_parent(folder, shared=False)
        if reason is not None:
            raise _refused(folder, reason)
        if create:
            make_private(folder)
        if not _POSIX:
            if not folder.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
            return cls(folder, None)
        link = os.lstat(folder)
        if stat.S_ISLNK(link.st_mode) and not ours(link):
            raise _refused(folder, f"it is a link made by {user(link.st_uid)}")
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
        with cls.open(path, create=create) as folder, folder.inner(name, create=create) as found:
            yield found

    @classmethod
    def _checked(cls, path: pathlib.Path, descriptor: int) -> Self:
        status = os.fstat(descriptor)
        reason = None
        if not ours(status):
            reason = f"it belongs to {user(status.st_uid)}"
        elif status.st_mode & stat.S_IWOTH:
            reason = "everyone may write in it"
        if reason is None:
            return cls(path, descriptor)
        os.close(descriptor)
        raise _refused(path, reason)

    def close(self) -> None:
        """Close the descriptor; the folder must not be used afterwards."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
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
            descriptor = os.open(self._name(name), _FILE, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError("it is a link, not a regular file") from None
            raise
        try:
            status = os.fstat(descriptor)
            irregular = not_regular(status)
            if irregular is not None:
                raise ValueError(irregular)
            if not ours(status):
                raise _refused(self.path / name, f"it belongs to {user(status.st_uid)}")
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

    def write(self, name: str, data: bytes) -> None:
        """Write a file that only its owner may read: whole, or not at all."""
        temporary = f".writing-{uuid.uuid4().hex}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | getattr(os, "O_BINARY", 0)
        descriptor = os.open(self._name(temporary), flags, 0o600, dir_fd=self.descriptor)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                if _POSIX:
                    os.fchmod(stream.fileno(), 0o600)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            self.move(temporary, self, name)
        except BaseException:
            self.remove(temporary)
            raise

    def move(self, name: str, target: PrivateFolder, new_name: str) -> None:
        """Move something to another folder or name, in place of what is there."""
        os.replace(
            self._name(name),
            target._name(new_name),
            src_dir_fd=self.descriptor,
            dst_dir_fd=target.descriptor,
        )
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
    if descriptor is not None:
        missing = [folder]
    else:
        missing = [folder, *folder.parents]
        there = next((i for i, place in enumerate(missing) if os.path.lexists(place)), 0)
        missing = missing[:there]
    for place in reversed(missing):
        try:
            os.mkdir(place, 0o700, dir_fd=descriptor)
        except FileExistsError:
            continue
        made = os.stat(place, dir_fd=descriptor, follow_symlinks=False)
        if _POSIX and stat.S_IMODE(made.st_mode) != 0o700:  # the umask took something away
            os.chmod(place, 0o700, dir_fd=descriptor)


def _refused(place: pathlib.Path, why: str) -> FolderRefused:
    return FolderRefused(
        f"{place} is not used: {why}. Remove it, or set EJKERNEL_CACHE_DIR to a folder of your own"
    )
