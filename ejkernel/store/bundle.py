"""Tuned entries as files: bundles, how two of them are merged, and which ones this machine has.

A bundle is plain, sorted JSON that reads well in a diff and ships in a wheel: what a store knows,
without the samples behind it. Nothing in it is ever executed: a config is plain data, and becomes
an object only as the config class of the kernel that asks for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..markup import one_line
from .private import write_whole
from .reading import LARGEST, parse_json, read_regular, shown
from .rows import sound_about, to_columns, wrong_about

FORMAT = "ejkernel-configs"
VERSION = 1

StoredEntry = dict[str, Any]
"""An entry as plain data: `key`, `config`, `config_type` and `about`."""

BundleKey = tuple[str, str, str]
"""Device, operation, call."""


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

    key: BundleKey
    kept: StoredEntry
    dropped: StoredEntry
    reason: str

    def __str__(self) -> str:
        device, op_id, call_key = self.key
        what = self.kept["about"].get("signature") or call_key

        def brief(entry: StoredEntry) -> str:
            about, config = entry["about"], json.dumps(entry["config"], sort_keys=True)
            known = "when" in about and "where" in about
            return f"{config} ({about['where']}, {about['when']})" if known else config

        return one_line(
            f"{op_id}({what}) on {device}: kept {brief(self.kept)} over {brief(self.dropped)}: "
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
        self._entries: dict[BundleKey, StoredEntry] = {}
        for number, entry in enumerate(entries):
            checked = _checked(entry, f"entry {number}")
            key: BundleKey = checked["key"]
            if key in self._entries:
                device, op_id, call_key = map(one_line, key)
                raise BundleError(f"entry {number}: {op_id}:{call_key} on {device} is there twice")
            self._entries[key] = checked

    # --- as a mapping ----------------------------------------------------------------------------

    def get(self, key: Iterable[str]) -> StoredEntry | None:
        """The entry of a key, or None."""
        return self._entries.get(tuple(key))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[StoredEntry]:
        """The entries, by operation, device and call."""
        ordered = sorted(self._entries, key=lambda key: (key[1], key[0], key[2]))
        return (self._entries[key] for key in ordered)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bundle) and self._entries == other._entries

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
                held = merged.setdefault(key, entry)
                pair = (entry, held) if quality(entry) > quality(held) else (held, entry)
                merged[key] = pair[0]
                if entry["config"] != held["config"]:
                    conflicts.append(Conflict(key, *pair, why_better(*pair)))
        return Bundle(merged.values()), conflicts

    def prune(self, drop: Callable[[StoredEntry], bool]) -> Bundle:
        """Without the entries that `drop` is true for."""
        return Bundle(entry for entry in self if not drop(entry))


# --- of two entries, the better one --------------------------------------------------------------

# Times of two machines cannot be compared, so a smaller time says nothing. What says something is
# whether the run was finished and its race decided, how many candidates it tried, and when.
_CRITERIA = (
    ("it was measured", lambda about: about.get("seconds") is not None),
    ("its run was finished", lambda about: not about.get("incomplete")),
    ("its race was decided", lambda about: bool(about.get("sure"))),
    ("it won against more candidates", lambda about: _tried(about)),
    ("it is newer", lambda about: str(about.get("when", ""))),
)


def quality(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Comparable: the larger, the better measured."""
    return tuple(value(entry["about"]) for _, value in _CRITERIA)


def why_better(kept: StoredEntry, dropped: StoredEntry) -> str:
    """Why one entry was preferred to another, in words."""
    pairs = zip(_CRITERIA, quality(kept), quality(dropped), strict=True)
    reasons = (criterion[0] for criterion, one, other in pairs if one != other)
    return next(reasons, "both were measured equally well, and it was there first")


def _tried(about: Mapping[str, Any]) -> int:
    trials, tried = about.get("trials"), about.get("tried")
    if isinstance(trials, list):
        return len(trials)
    return tried if isinstance(tried, int) else 0


# --- one entry -----------------------------------------------------------------------------------


def _checked(entry: Any, where: str) -> StoredEntry:
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


# --- the bundles of this machine -----------------------------------------------------------------

GROUP = "ejkernel.configs"
"""The entry points by which a library ships bundles.

Their value is a package of the library that holds `*.json` files (`"mylib.configs"`), or one file
in it (`"mylib.configs:v5e.json"`). The package is looked up, never imported.
"""

_VALUE = re.compile(r"\s*([\w.]+)\s*(?::\s*([\w./-]+)\s*)?")


class BundleFile(NamedTuple):
    """A file of configs, and who says that it is one."""

    path: pathlib.Path
    origin: str

    def __str__(self) -> str:
        return f"{self.path} ({self.origin})"


class BundleProblem(NamedTuple):
    """Something that was to be a bundle and cannot be used."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


class Shipped:
    """The bundles of a team (`EJKERNEL_CONFIG_PATH`) and of installed libraries, in this order.

    Args:
      search_path: files and folders, divided as in `PATH`; they come before installed packages.
      packages: look for installed packages that ship configs.
    """

    def __init__(self, search_path: str = "", *, packages: bool = True) -> None:
        self.problems: list[BundleProblem] = []
        self.bundles: list[tuple[BundleFile, Bundle]] = []
        for file in [*self._on_path(search_path), *(self._installed() if packages else ())]:
            try:
                self.bundles.append((file, Bundle.load(file.path)))
            except FileNotFoundError:
                self._add_problem(file, "there is no such file or folder")
            except (OSError, BundleError) as error:
                self._add_problem(file, error)

    def find(self, key: BundleKey) -> tuple[StoredEntry, BundleFile] | None:
        """The first of `all_of`, or None."""
        return next(iter(self.all_of(key)), None)

    def all_of(self, key: BundleKey) -> list[tuple[StoredEntry, BundleFile]]:
        """The entries of a key, each with its file; those that were measured come first."""
        entries = [(bundle.get(key), file) for file, bundle in self.bundles]
        there = [(entry, file) for entry, file in entries if entry is not None]
        return sorted(there, key=lambda pair: bool(pair[0]["about"].get("estimated")))

    def of_operation(self, op_id: str, device: str) -> Iterator[StoredEntry]:
        """All entries of an operation on a device."""
        for _, bundle in self.bundles:
            yield from (entry for entry in bundle if entry["key"][:2] == (device, op_id))

    def _add_problem(self, what: object, reason: object) -> None:
        self.problems.append(BundleProblem(str(what), str(reason)))

    def _on_path(self, search_path: str) -> Iterator[BundleFile]:
        for part in filter(None, search_path.split(os.pathsep)):
            given = BundleFile(pathlib.Path(part), "EJKERNEL_CONFIG_PATH")
            try:
                yield from self._files(given._replace(path=given.path.expanduser()))
            except RuntimeError as error:  # nobody has this home folder
                self._add_problem(given, error)

    def _installed(self) -> Iterator[BundleFile]:
        for point in sorted(self._entry_points(), key=lambda point: (point.name, point.value)):
            origin = f"entry point {point.name} = {point.value}"
            match = _VALUE.fullmatch(point.value)
            if match is None or (folder := _folder_of(match[1])) is None:
                reason = "there is no such package; the value is a package with *.json files"
                self._add_problem(origin, reason)
            else:
                yield from self._files(BundleFile(folder / (match[2] or ""), origin))

    def _entry_points(self) -> Iterable[importlib.metadata.EntryPoint]:
        with contextlib.suppress(Exception):  # a damaged package, which may not concern us at all
            return importlib.metadata.entry_points(group=GROUP)
        points: list[importlib.metadata.EntryPoint] = []
        for package in importlib.metadata.distributions():  # then one by one
            try:
                points += package.entry_points.select(group=GROUP)
            except Exception as error:  # noqa: BLE001
                what = f"the installed package {getattr(package, '_path', package)}"
                self._add_problem(what, f"its entry points cannot be read: {error}")
        return points

    def _files(self, given: BundleFile) -> Iterator[BundleFile]:
        """A file as it is given, or the `*.json` files of a folder."""
        try:
            if not given.path.is_dir():
                yield given
                return
            files = sorted(n for n in os.listdir(given.path) if n.endswith(".json"))
        except OSError as error:
            self._add_problem(given, error.strerror or error)
            return
        if not files:
            self._add_problem(given, "it has no *.json file")
        yield from (given._replace(path=given.path / name) for name in files)


def _folder_of(package: str) -> pathlib.Path | None:
    """The folder of a package. Only the top one is looked up, so that no code of it runs."""
    top, *inside = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except Exception:  # noqa: BLE001  whoever looks for modules here may fail in any way
        return None
    locations = (spec.submodule_search_locations or ()) if spec is not None else ()
    folders = (pathlib.Path(location).joinpath(*inside) for location in locations)
    return next((folder for folder in folders if folder.is_dir()), None)
