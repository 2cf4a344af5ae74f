"""Tuned entries as a file: plain, sorted JSON that reads well in a diff and ships in a wheel.

A bundle is what a store knows, without the samples behind it. Nothing in it is ever executed: a
config is plain data, and becomes an object only as the config class of the kernel that asks for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..markup import one_line
from .durable import write_whole
from .keys import to_columns
from .quality import quality, why_better
from .reading import LARGEST, parse_json, read_regular, shown
from .rows import sound_about, wrong_about

FORMAT = "ejkernel-configs"
VERSION = 1

Entry = dict[str, Any]
Key = tuple[str, str, str]


class BundleError(ValueError):
    """A file that is no bundle, or not a whole one; the message says where and why."""


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Two bundles (or a bundle and a store) had different configs for one key.

    Attributes:
      key: device, operation, call.
      kept: the entry that was taken.
      dropped: the other one.
      reason: why, in words.
    """

    key: Key
    kept: Entry
    dropped: Entry
    reason: str

    def __str__(self) -> str:
        device, op_id, call_key = self.key
        what = self.kept["about"].get("signature") or call_key
        return one_line(
            f"{op_id}({what}) on {device}: kept {_brief(self.kept)} over {_brief(self.dropped)}: "
            f"{self.reason}"
        )


class Bundle:
    """Entries by key.

    Args:
      entries: as `ejkernel.store.Store.entry` gives them; trials are left out.

    >>> bundle = Bundle()
    >>> Bundle.loads(bundle.dumps()) == bundle
    True
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._entries: dict[Key, Entry] = {}
        for number, entry in enumerate(entries):
            checked = _checked(entry, f"entry {number}")
            key: Key = checked["key"]
            if key in self._entries:
                raise BundleError(f"entry {number}: {_named(key)} is there twice")
            self._entries[key] = checked

    # --- as a mapping ----------------------------------------------------------------------------

    def get(self, key: Iterable[str]) -> Entry | None:
        """The entry of a key, or None."""
        return self._entries.get(tuple(key))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Entry]:
        """The entries, by operation, device and call."""
        return (self._entries[key] for key in sorted(self._entries, key=_order))

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bundle) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Bundle({len(self)} entries)"

    # --- as a file -------------------------------------------------------------------------------

    def dumps(self) -> str:
        """The bundle as text; equal bundles give equal texts."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "entries": [
                {**entry, "key": list(entry["key"]), "about": _finite(entry["about"])}
                for entry in self
            ],
        }
        return json.dumps(document, indent=1, sort_keys=True) + "\n"

    @classmethod
    def loads(cls, text: str | bytes, name: str = "bundle") -> Bundle:
        """The bundle of a text; `BundleError`, and nothing else, says what is wrong with it."""
        try:
            document = parse_json(text)
        except ValueError as error:
            raise BundleError(f"{name} is not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise BundleError(f'{name} is no bundle of configs: it lacks "format": "{FORMAT}"')
        version = document.get("version")
        if type(version) is not int or version < 1:
            raise BundleError(f"{name}: version={shown(version)} must be a whole number")
        if version > VERSION:
            raise BundleError(
                f"{name} was written by a newer ejkernel (version {shown(version)}, this one reads "
                f"{VERSION}); upgrade ejkernel to read it"
            )
        entries = document.get("entries")
        if not isinstance(entries, list):
            raise BundleError(f"{name}: entries must be a list, got {type(entries).__name__}")
        try:
            for number, entry in enumerate(entries):
                _check_about(entry, f"entry {number}")
            return cls(entries)
        except BundleError as error:
            raise BundleError(f"{name}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Bundle:
        """The bundle in a regular file of at most 64 MiB."""
        try:
            data = read_regular(path)
        except ValueError as error:
            raise BundleError(f"{os.fspath(path)} is no bundle of configs: {error}") from error
        return cls.loads(data, os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it: whole, or not at all."""
        text = self.dumps()
        if len(text) > LARGEST:  # it is ASCII
            raise BundleError(
                f"{os.fspath(path)}: {len(self)} entries are {len(text):,} bytes, and bundles of "
                f"at most {LARGEST:,} are read; write one per operation or device"
            )
        write_whole(pathlib.Path(path), text)

    # --- with others -----------------------------------------------------------------------------

    def merge(self, *others: Bundle) -> tuple[Bundle, list[Conflict]]:
        """All entries of all bundles; of two for one key, the better measured one.

        Different configs for one key are reported as conflicts, whichever was taken.
        """
        merged = dict(self._entries)
        conflicts: list[Conflict] = []
        for other in others:
            for key, entry in other._entries.items():
                held = merged.get(key)
                merged[key] = entry if held is None else _better(key, held, entry, conflicts)
        return Bundle(merged.values()), conflicts

    def prune(self, drop: Callable[[Entry], bool]) -> Bundle:
        """Without the entries that `drop` is true for."""
        return Bundle(entry for entry in self if not drop(entry))


def _better(key: Key, held: Entry, other: Entry, conflicts: list[Conflict]) -> Entry:
    kept, dropped = (other, held) if quality(other) > quality(held) else (held, other)
    if kept["config"] != dropped["config"]:
        conflicts.append(Conflict(key, kept, dropped, why_better(kept, dropped)))
    return kept


# --- one entry -----------------------------------------------------------------------------------


def _checked(entry: Any, where: str) -> Entry:
    if not isinstance(entry, Mapping):
        raise BundleError(f"{where} must be an object, got {type(entry).__name__}")
    for name in ("key", "config", "config_type", "about"):
        if name not in entry:
            raise BundleError(f"{where} lacks {name!r}")
    key = entry["key"]
    whole = isinstance(key, (list, tuple)) and len(key) == 3
    if not whole or not all(isinstance(part, str) for part in key):
        raise BundleError(f"{where}: key must be [device, op_id, call_key], got {shown(key)}")
    try:
        to_columns(tuple(key))
    except ValueError as error:
        raise BundleError(f"{where}: {error}") from error
    if not isinstance(entry["config_type"], str):
        raise BundleError(f"{where}: config_type must be text, got {shown(entry['config_type'])}")
    if not isinstance(entry["about"], Mapping):
        raise BundleError(f"{where}: about must be an object, got {shown(entry['about'])}")
    about = sound_about(entry["about"])
    trials = about.pop("trials", None)
    if trials is not None:
        about["tried"] = len(trials)
    return {
        "key": tuple(key),
        "config": entry["config"],
        "config_type": entry["config_type"],
        "about": about,
    }


def _check_about(entry: Any, where: str) -> None:
    """What stands in a file is of its kind, or the file is not used."""
    about = entry.get("about") if isinstance(entry, dict) else None
    for name, value in about.items() if isinstance(about, dict) else ():
        if wrong_about(name, value):
            raise BundleError(f"{where}: its {shown(name)} is {shown(value)}")


def _finite(value: Any) -> Any:
    """Plain data in the numbers that JSON has; the others are as good as not known."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _order(key: Key) -> tuple[str, str, str]:
    device, op_id, call_key = key
    return (op_id, device, call_key)


def _named(key: Key) -> str:
    device, op_id, call_key = key
    return one_line(f"{op_id}:{call_key} on {device}")


def _brief(entry: Entry) -> str:
    about = entry["about"]
    where = f" ({about['where']}, {about['when']})" if "when" in about and "where" in about else ""
    return json.dumps(entry["config"], sort_keys=True) + where
