"""Where a store is: a folder of this machine, or a server named by a URL.

Nothing here opens anything, and no text that is made here shows a password.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import re
import urllib.parse
from typing import Any

from ..installation import how_to_install
from .errors import StoreUnavailable

FILE_NAME = "configs.sqlite3"

_HARMLESS = {
    *("host", "hostaddr", "port", "service", "options", "application_name", "sslmode"),
    *("connect_timeout", "target_session_attrs"),
}
"""Parameters of a URL that are shown. What others may hold, nobody knows."""

_SHORT_PASSWORD = 6


@dataclasses.dataclass(frozen=True)
class FolderLocation:
    """A folder that holds the file of the store; made on the first write."""

    folder: pathlib.Path
    name: str = FILE_NAME

    @property
    def file(self) -> pathlib.Path:
        """The SQLite file."""
        return self.folder / self.name

    @property
    def shown(self) -> str:
        """How messages call it."""
        return str(self.folder)


@dataclasses.dataclass(frozen=True, repr=False)
class ServerLocation:
    """A database server. The URL with its password is never shown: see `shown` and `scrub`."""

    url: Any  # sqlalchemy.URL
    shown: str
    _secrets: tuple[str, ...] = ()

    def scrub(self, text: str) -> str:
        """The text with every password of the URL, also percent-encoded, taken out."""
        for secret in self._secrets:
            if len(secret) < _SHORT_PASSWORD:  # as a whole word only: it may be part of any word
                text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
            else:
                text = text.replace(secret, "***")
        return text

    def __repr__(self) -> str:
        return f"ServerLocation({self.shown!r})"


Location = FolderLocation | ServerLocation


def locate(given: str | os.PathLike[str]) -> Location:
    """The location that a folder or a URL names.

    Raises `NotADirectoryError` if the folder is a file, `ValueError` for a URL that is not
    understood, and `ModuleNotFoundError` if the driver of its database is not installed.
    """
    if isinstance(given, str) and "://" in given:
        return _from_url(given)
    folder = expanded(given)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(
            f"PersistentCache: path={str(folder)!r} is a file; give a folder (it is created "
            "when the first config is stored) or a URL"
        )
    return FolderLocation(folder)


def expanded(given: str | os.PathLike[str]) -> pathlib.Path:
    """A path in which `~` stands for a home folder; `StoreUnavailable` if nobody has that."""
    try:
        return pathlib.Path(given).expanduser()
    except RuntimeError:
        raise StoreUnavailable(
            f"{os.fspath(given)}: there is no such home folder; give another path"
        ) from None


def _from_url(text: str) -> Location:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    scheme = text.partition("://")[0]
    url = None
    with contextlib.suppress(ArgumentError, ValueError):  # they may quote the password
        url = make_url(re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", text))
    if url is None:
        raise ValueError(
            f"PersistentCache: the URL {scheme}://… cannot be read; it has the form "
            "postgresql+psycopg://user:password@host:port/database, where special characters of "
            "the password are percent-encoded (urllib.parse.quote(password, safe=''))"
        )
    if url.get_backend_name() == "sqlite":
        if not url.database or url.database == ":memory:" or url.query:
            raise ValueError(
                "PersistentCache: an SQLite URL names a file and has no parameters, as in "
                "sqlite:////home/me/configs.sqlite3; for configs in memory use ConfigCache"
            )
        file = expanded(url.database)
        return FolderLocation(file.parent, file.name)
    if url.drivername != "postgresql+psycopg":
        raise ValueError(
            f"PersistentCache: the URL {scheme}://… names a database that is not supported; use a "
            "folder (SQLite) or postgresql+psycopg://user@host/database"
        )
    if importlib.util.find_spec("psycopg") is None:
        raise ModuleNotFoundError(
            f"PersistentCache: a store on PostgreSQL needs psycopg: {how_to_install('postgres')}"
        )
    return _server(url)


def _server(url: Any) -> ServerLocation:
    passwords = [url.password or ""]
    for name, values in url.query.items():
        if name not in _HARMLESS:
            passwords += [values] if isinstance(values, str) else values
    secrets: set[str] = set()
    for password in filter(None, map(str, passwords)):
        secrets |= {password, urllib.parse.quote(password, safe=""), urllib.parse.quote(password)}
        secrets |= {urllib.parse.quote_plus(password), repr(password)[1:-1]}
    longest_first = tuple(sorted(secrets, key=lambda secret: (-len(secret), secret)))
    hidden = {name: "***" for name in url.query if name not in _HARMLESS}
    shown = url.update_query_dict(hidden).render_as_string(hide_password=True)
    return ServerLocation(url, shown.replace("%2A%2A%2A", "***"), longest_first)
