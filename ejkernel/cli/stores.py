"""Places with configs: the store of this user, any folder or database, bundle files."""

from __future__ import annotations

import dataclasses
import fnmatch
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..markup import one_line
from ..store import StoreError
from ..store.location import expanded
from .exits import Exit, Failure
from .output import note

if TYPE_CHECKING:
    from ..ops import PersistentCache
    from ..store import Bundle

Entry = dict[str, Any]

MANY = 10_000_000  # entries: all of them


@dataclasses.dataclass(frozen=True)
class Place:
    """A store or a bundle, with one interface.

    Attributes:
      shown: how messages call it.
      store: the store; None for a bundle.
      bundle: the bundle; None for a store.
      file: the file of a bundle; None also for the empty place of a user who has no store.
    """

    shown: str
    store: PersistentCache | None = None
    bundle: Bundle | None = None
    file: pathlib.Path | None = None

    def entries(self, op: str | None = None, device: str | None = None) -> list[Entry]:
        """All entries, by operation, device and call; of an operation or device if one is given."""
        from ..store.rows import sound_about

        wanted = [
            {**entry, "about": sound_about(entry["about"])}
            for entry in (self.bundle or () if self.store is None else self.store.related(MANY))
            if isinstance(entry["key"], tuple) and _fits(entry["key"], op, device)
        ]
        return sorted(wanted, key=lambda entry: (entry["key"][1], entry["key"][0], entry["key"][2]))

    def trials(self, entry: Entry) -> list[dict[str, Any]]:
        """Every candidate of an entry; a bundle has none."""
        return [] if self.store is None else self.store.trials(entry["key"])

    def as_bundle(self, op: str | None = None, device: str | None = None) -> Bundle:
        """Its entries as a bundle."""
        from ..store import Bundle

        if self.bundle is not None:
            return self.bundle.prune(lambda entry: not _fits(entry["key"], op, device))
        counted = []
        for entry in self.entries(op, device):
            tried = len(self.trials(entry))
            about = {**entry["about"], **({"tried": tried} if tried else {})}
            counted.append({**entry, "about": about})
        return Bundle(counted)

    def remove(self, entries: list[Entry]) -> None:
        """Take entries out, of a store one by one, of a bundle by writing it anew."""
        if self.store is not None:
            for entry in entries:
                self.store.remove(entry["key"])
            return
        assert self.bundle is not None
        assert self.file is not None
        gone = {tuple(entry["key"]) for entry in entries}
        self.bundle.prune(lambda entry: tuple(entry["key"]) in gone).save(self.file)


def open_place(given: str | None, *, must_exist: bool = True, or_nowhere: bool = False) -> Place:
    """The place that a person named (None: the usual store), checked to be readable.

    With `or_nowhere` a user who has no place for a store gets a note, and an empty place.
    """
    from ..store import Bundle

    if given is not None and _is_bundle(given):
        file = expanded(given)
        if not file.exists():
            raise Failure(f"there is no bundle {given!r}")
        return Place(str(file), bundle=Bundle.load(file), file=file)
    try:
        store = _opened(given)
    except StoreError as error:
        if given is not None or not or_nowhere:
            raise
        note(f"ejkernel: going on without a store: {error}")  # so heuristics are used
        return Place("no store", bundle=Bundle())
    if must_exist and given is not None and "://" not in given and not expanded(given).exists():
        raise Failure(
            f"there is no store in {given!r}: no such folder; name a folder, the URL of a "
            "database, or a bundle file that ends with .json",
            Exit.STORE,
        )
    store.check()
    return Place(str(store.path), store)


def open_store(given: str | None, opened: Place | None = None) -> PersistentCache:
    """A store to write into: made if it does not exist, refused if it cannot be written."""
    if given is not None and _is_bundle(given):
        raise click.UsageError(
            f"--store {given}: a bundle is a file to look at and to ship; give a folder or the URL "
            "of a database, and write a bundle with `ejkernel configs export`"
        )
    store = _opened(given) if opened is None or opened.store is None else opened.store
    store.check(write=True)
    return store


def _opened(given: str | None) -> PersistentCache:
    from ..ops import PersistentCache

    if given is not None and "://" not in given:
        file = expanded(given)
        if file.is_file() and file.suffix in (".sqlite3", ".sqlite", ".db"):
            given = f"sqlite:///{file.resolve()}"
    try:
        return PersistentCache(given)
    except (ValueError, NotADirectoryError) as error:
        raise click.UsageError(str(error).removeprefix("PersistentCache: ")) from error
    except ModuleNotFoundError as error:
        raise Failure(str(error).removeprefix("PersistentCache: "), Exit.MISSING) from error


def _is_bundle(given: str) -> bool:
    return "://" not in given and given.endswith(".json")


def _names(key: Any) -> tuple[str, str]:
    """The operation of a key, with and without its version."""
    return key[1], key[1].partition("@v")[0]


def _fits(key: Any, op: str | None, device: str | None) -> bool:
    if op is not None and not any(fnmatch.fnmatchcase(name, op) for name in _names(key)):
        return False
    if device == "here":
        from ..ops import device_fingerprint

        device = device_fingerprint()
    return device is None or device in key[0]


def find_entry(place: Place, wanted: str) -> Entry:
    """The one entry that a person means: by its key, a beginning of it, a label or an operation."""
    entries = place.entries()
    text = wanted.partition("#")[2] or wanted  # a label without its prefix
    op, _, key = text.rpartition(":")
    matching = [
        entry
        for entry in entries
        if (not op or entry["key"][1] == op) and entry["key"][2].startswith(key)
    ] or [entry for entry in entries if wanted in _names(entry["key"])]
    if len(matching) > 1:
        here = [entry for entry in matching if _fits(entry["key"], None, "here")]
        matching = here if len(here) == 1 else matching
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise click.UsageError(
            f"{place.shown} has no entry {wanted!r}; `ejkernel configs list` shows the keys"
        )
    listed = "".join(f"\n  {_named(entry)}" for entry in matching[:10])
    more = f"\n  and {len(matching) - 10} more" if len(matching) > 10 else ""
    raise click.UsageError(f"{wanted!r} fits {len(matching)} entries; say which:{listed}{more}")


def _named(entry: Mapping[str, Any]) -> str:
    device, op_id, call_key = entry["key"]
    return one_line(f"{op_id}:{call_key}  {entry['about'].get('signature', '')}  on {device}")
