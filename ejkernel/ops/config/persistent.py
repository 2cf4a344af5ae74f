"""Configs on disk: one small JSON file per entry, written whole or not at all.

Files of their own make many processes safe without locks: a writer renames a finished file into
place, a reader sees the old or the new one, and a damaged file costs one entry. Nothing on disk is
touched before the first write, and nothing that is read is ever executed or imported.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import pathlib
import re
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any, overload

from ..core.types import ConfigKey
from ..utils import environment
from ..utils.serialize import (
    from_plain,
    loaded_type,
    qualified_name,
    remember_type,
    to_plain,
)
from ..utils.stable import short_hash
from .cache import as_key

logger = logging.getLogger(__name__)

SCHEMA = 1
_UNSAFE = re.compile(r"[^A-Za-z0-9_.@-]+")


def default_path() -> pathlib.Path:
    """Where configs are kept unless a path is given."""
    return pathlib.Path(environment.CACHE_DIR.read()).expanduser() / "configs"


class PersistentCache:
    """The interface of `ConfigCache`, surviving the process and shared between processes.

    Args:
      path: a folder, made on the first write. Default: `~/.cache/ejkernel/configs`
        (`EJKERNEL_CACHE_DIR` moves it).
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        given = default_path() if path is None else pathlib.Path(path).expanduser()
        if given.exists() and not given.is_dir():
            raise NotADirectoryError(
                f"PersistentCache: path={str(given)!r} is a file; give a folder (it is created "
                "when the first config is kept)"
            )
        self.path = given
        self._lock = threading.Lock()
        self._warned: set[str] = set()

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
        """Keep a config: `put(key, cfg)` or `put(device, op_id, call_key, cfg)`.

        `about` is kept beside it: how it was measured, with which versions, by which source.
        """
        if len(parts) not in (2, 4):
            raise TypeError(
                "put takes (key, cfg) or (device, op_id, call_key, cfg); "
                f"got {len(parts)} arguments"
            )
        key, cfg = as_key(parts[:-1], "put"), parts[-1]
        entry = {
            "schema": SCHEMA,
            "key": _plain_key(key),
            "config": to_plain(cfg),
            "config_type": qualified_name(type(cfg)),
            "about": {
                "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "where": socket.gethostname(),
                **(about or {}),
            },
        }
        text = json.dumps(entry, indent=1, sort_keys=True)
        remember_type(type(cfg))
        self._write(self._file(key), text)

    def _write(self, file: pathlib.Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".writing-", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise

    def clear(self) -> None:
        """Remove every entry."""
        for file in self._files():
            file.unlink(missing_ok=True)

    # --- reading ---------------------------------------------------------------------------------

    @overload
    def get(self, key: Any, /) -> Any: ...
    @overload
    def get(self, device: str, op_id: str, call_key: str, /) -> Any: ...
    def get(self, *parts: Any) -> Any:
        """The config of `(key)` or `(device, op_id, call_key)`, or None.

        It is rebuilt as the class it was written from if that class is loaded in this process, and
        as plain data otherwise.
        """
        entry = self.entry(as_key(parts, "get"))
        return None if entry is None else self.rebuild(entry)

    def get_as(self, key: ConfigKey, config_type: Any) -> Any:
        """The config of a key as `config_type` (any type if None), or None."""
        entry = self.entry(key)
        return None if entry is None else self.rebuild(entry, config_type)

    def entry(self, key: Any) -> dict[str, Any] | None:
        """Everything kept under a key, as plain data, or None."""
        return self._read(self._file(key))

    def rebuild(self, entry: Mapping[str, Any], config_type: Any = None) -> Any:
        """The config of what `entry` gave, as `config_type`; None, with a warning, if it cannot be.

        Without a type it is the class it was written from, if that is loaded, else plain data.
        """
        try:
            return from_plain(entry["config"], config_type or loaded_type(entry["config_type"]))
        except (TypeError, ValueError) as error:
            self._warn(
                f"{entry['key']}",
                f"the stored config of {entry['key']} no longer fits its class and is not used: "
                f"{error}",
            )
            return None

    def _read(self, file: pathlib.Path) -> dict[str, Any] | None:
        try:
            text = file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            self._warn(str(file), f"{file} cannot be read and is not used: {error}")
            return None
        try:
            entry = json.loads(text)
            if entry["schema"] > SCHEMA:
                self._warn(
                    "schema",
                    f"{file} was written by a newer ejkernel (schema {entry['schema']}, this one "
                    f"knows {SCHEMA}) and is not used",
                )
                return None
            _check_entry(entry)
        except (ValueError, KeyError, TypeError) as error:
            self._warn(str(file), f"{file} is damaged and is not used: {error!r}")
            return None
        return dict(entry)

    def _warn(self, about: str, message: str) -> None:
        with self._lock:
            if about in self._warned:
                return
            self._warned.add(about)
        logger.warning("ejkernel store: %s", message)

    # --- the folder ------------------------------------------------------------------------------

    def keys(self) -> list[Any]:
        """The keys of all readable entries."""
        entries = (self._read(file) for file in self._files())
        return [_key_from_plain(entry["key"]) for entry in entries if entry is not None]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return self.entry(as_key((key,), "in")) is not None

    def __len__(self) -> int:
        return len(self.keys())

    def __repr__(self) -> str:
        return f"PersistentCache({str(self.path)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process opens the same store."""
        return type(self), (self.path,)

    def _files(self) -> Iterator[pathlib.Path]:
        return (file for file in self.path.glob("*/[!.]*.json") if file.is_file())

    def _file(self, key: Any) -> pathlib.Path:
        plain = _plain_key(key)
        folder = plain[1] if isinstance(plain, list) else "other"
        return (
            self.path / _UNSAFE.sub("_", folder)[:80] / f"{short_hash(json.dumps(plain), 24)}.json"
        )


def _check_entry(entry: dict[str, Any]) -> None:
    key, config_type = entry["key"], entry["config_type"]
    parts = [key] if isinstance(key, str) else list(key)
    if len(parts) not in (1, 3) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"the key {key!r} is not one")
    if not isinstance(config_type, str):
        raise ValueError(f"the config type {config_type!r} is not a name")
    if "config" not in entry:
        raise KeyError("config")


def _plain_key(key: Any) -> Any:
    if isinstance(key, ConfigKey):
        return list(key)
    if isinstance(key, str):
        return key
    raise TypeError(
        f"PersistentCache keys are (device, op_id, call_key) or a string, got {key!r} "
        f"({type(key).__name__})"
    )


def _key_from_plain(plain: Any) -> Any:
    return ConfigKey(*plain) if isinstance(plain, list) else plain
