"""Configs that survive the process: in an SQLite file, or on a database server for a team.

This turns configs into plain data and back; `ejkernel.store` stores the data. Nothing on disk is
touched before the first write, and nothing that is read is ever executed or imported.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

from ...store import FolderLocation, Store, StoreUnavailable, locate
from ...store.errors import StoreError, WarnOnce
from ..core.types import ConfigKey
from ..utils import environment
from ..utils.serialize import (
    config_type_named,
    declare_type,
    from_plain,
    qualified_name,
    to_plain,
)
from .cache import as_key, key_and_config

if TYPE_CHECKING:
    from ..core.invocation import Invocation
    from ..core.kernel import Kernel


def default_path() -> pathlib.Path:
    """Where configs are stored unless a path is given."""
    try:
        return environment.cache_folder("configs")
    except environment.NoHomeFolder as error:
        raise StoreUnavailable(str(error)) from None


_warn_once = WarnOnce()


def rebuild_or_warn(
    entry: Mapping[str, Any],
    kernel: Kernel[Any, Any] | None = None,
    warn_once: WarnOnce = _warn_once,
) -> Any:
    """The config of an entry of a store or a bundle; None, with a warning, if it cannot be built.

    Without a `kernel` it is of the class it was written from, if this process knows that as one of
    configs, else plain data.
    """
    plain, type_name = entry["config"], entry["config_type"]
    try:
        if kernel is not None:
            return kernel.config_from_plain(plain, type_name)
        return from_plain(plain, config_type_named(type_name))
    except Exception as error:  # noqa: BLE001  a class may check its fields as it likes
        warn_once(
            f"config {entry['key']}",
            f"the stored config of {entry['key']} no longer fits its class and is not used: "
            f"{error}",
        )
        return None


class PersistentCache:
    """The interface of `ConfigCache`, surviving the process and shared between processes.

    Reading never fails for the store's sake: one that cannot be read costs one warning and is then
    as good as empty. `put` and `clear` raise a `StoreError`, which is an `OSError`.

    Args:
      path: a folder, made on the first write, that holds the file `configs.sqlite3`; or the URL of
        a database, `postgresql+psycopg://user@host/database` (needs the extra `postgres`).
        Default: `~/.cache/ejkernel/configs` (`EJKERNEL_CACHE_DIR` moves it).

    >>> import tempfile
    >>> store = PersistentCache(tempfile.mkdtemp())
    >>> store.put("cpu|x", "matmul@v1", "0123456789abcdef", {"block": 64})
    >>> PersistentCache(store.path).get("cpu|x", "matmul@v1", "0123456789abcdef")
    {'block': 64}
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = default_path() if path is None else path
        usual = path is None and not os.path.isfile(self._given)
        self._location = FolderLocation(default_path()) if usual else locate(self._given)

    @functools.cached_property
    def _store(self) -> Store:
        return Store(self._location)

    @property
    def path(self) -> pathlib.Path | str:
        """The folder; of a server its URL, without the password."""
        location = self._location
        return location.folder if isinstance(location, FolderLocation) else location.shown

    # --- writing ---------------------------------------------------------------------------------

    @overload
    def put(self, key: Any, cfg: Any, /, *, about: Mapping[str, Any] | None = None) -> None: ...
    @overload
    def put(
        self,
        device: str,
        op_id: str,
        call_key: str,
        cfg: Any,
        /,
        *,
        about: Mapping[str, Any] | None = None,
    ) -> None: ...
    def put(self, *parts: Any, about: Mapping[str, Any] | None = None) -> None:
        """Store a config: `put(key, cfg)` or `put(device, op_id, call_key, cfg)`.

        `about` is stored with it: how it was measured, with which versions, from which source. Its
        `trials` are stored one by one: those that are there already stay, unless the new ones
        replace them or were made from another source, with another compiler, or in another way.
        """
        key, cfg = key_and_config(parts)
        self._store.put(key, to_plain(cfg), qualified_name(type(cfg)), about or {})
        declare_type(type(cfg))

    def put_plain(
        self, key: ConfigKey, config: Any, config_type: str, *, about: Mapping[str, Any]
    ) -> None:
        """Store what `entry` of a store or a bundle gave: a config that is plain data already."""
        self._store.put(key, config, config_type, about)

    def remove(self, key: Any) -> bool:
        """Remove the entry of a key, with its trials; False if there was none."""
        return self._store.remove(key)

    def clear(self) -> None:
        """Remove every entry."""
        self._store.clear()

    def check(self, *, write: bool = False) -> None:
        """Raise the `StoreError` that reading, or writing, would meet; nothing if all is well.

        With `write` a store that does not exist is made.
        """
        self._store.check(write=write)

    def close(self) -> None:
        """Close the file or the connection; the next use opens it again."""
        self._store.close()

    # --- reading ---------------------------------------------------------------------------------

    @overload
    def get(self, key: Any, /) -> Any: ...
    @overload
    def get(self, device: str, op_id: str, call_key: str, /) -> Any: ...
    def get(self, *parts: Any) -> Any:
        """The config of `(key)` or `(device, op_id, call_key)`, or None.

        It is rebuilt as the class it was written from if a kernel of this process declares that
        class, or this process has put such a config itself, and as plain data otherwise.
        """
        entry = self.entry(as_key(parts, "get"))
        return None if entry is None else rebuild_or_warn(entry, None, self._store.warn_once)

    def entry(self, key: Any) -> dict[str, Any] | None:
        """What is stored under a key, as plain data, or None: `key`, `config`, `config_type` and
        `about`. The trials are apart: see `trials`.
        """
        if self._is_unused():
            return None
        entry = self._store.entry(key)
        return None if entry is None else _with_key(entry)

    def _is_unused(self) -> bool:
        """True if nobody has written anything yet; a first call then need not open the store."""
        location = self._location
        if "_store" in self.__dict__ or not isinstance(location, FolderLocation):
            return False
        try:
            os.stat(location.folder / location.name)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # the store says why
            return False
        return False

    def trials(self, key: Any) -> list[dict[str, Any]]:
        """Every candidate that was tried for a key: its time and samples, or why it has none."""
        return self._store.trials(key)

    def related(self, limit: int = 200, **columns: str) -> list[dict[str, Any]]:
        """Entries with these `device`, `op_id`, `call_key`; a final `*` stands for any ending."""
        return [_with_key(entry) for entry in self._store.related(limit, **columns)]

    def keys(self) -> list[Any]:
        """The keys of all entries, the oldest first."""
        return [_public_key(key) for key in self._store.list_keys()]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return self.entry(as_key((key,), "in")) is not None

    def __len__(self) -> int:
        return self._store.count()

    def __repr__(self) -> str:
        return f"PersistentCache({str(self.path)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process opens the same store: its pickle holds the whole URL."""
        return type(self), (self._given,)

    # --- talking ---------------------------------------------------------------------------------

    def warn(self, error: Exception, message: str) -> None:
        """Log that something could not be stored: each kind of problem of this store once."""
        problem = type(error) if isinstance(error, StoreError) else message
        self._store.warn_once(problem, message)

    def explain_miss(self, inv: Invocation[Any, Any]) -> str:
        """Why there is nothing for a call: what the nearest entries have that it has not."""
        from .explain import explain_miss

        return explain_miss(self, inv)


def _public_key(key: Any) -> Any:
    return ConfigKey(*key) if isinstance(key, tuple) else key


def _with_key(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "key": _public_key(entry["key"])}
