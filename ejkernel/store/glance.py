"""A quick look at a store's file: how many entries, or what is wrong, without SQLAlchemy.

For whoever only wants to know how things are, such as `ejkernel doctor`: the look changes nothing,
waits for nobody, and repairs nothing.
"""

from __future__ import annotations

import sqlite3

from . import folder, in_use, leftover
from .errors import StoreDamaged, StoreError, StoreLeftOver, StoreUnavailable
from .failures import in_words, meaning
from .harmless import make_harmless
from .location import FolderLocation


def count_entries(location: FolderLocation) -> int | None:
    """How many entries the file of a store has; None if there is no file. Raises `StoreError`."""
    with folder.as_store_errors(location):
        there = folder.identity(location)
        if there is None:
            return None
        folder.check_owner(location)
        reason = leftover.irregular(location.file)
        if reason is not None:
            raise StoreUnavailable(reason)
        with in_use.guard:
            foreign = leftover.has_foreign_log(location.file, there)
        if foreign:
            raise StoreLeftOver(
                f"beside {location.file} lies the log of another file; it will be moved aside when "
                "something is read or kept"
            )
    try:
        uri = f"{location.file.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=1.0)
        try:
            make_harmless(connection)
            (found,) = connection.execute("SELECT count(*) FROM ejkernel_entries").fetchone()
            return int(found)
        finally:
            connection.close()
    except sqlite3.Error as error:
        kind: type[StoreError] = meaning(error)
        raise kind(_said(location, kind, in_words(error))) from None


def _said(location: FolderLocation, kind: type[StoreError], words: str) -> str:
    text = f"{location.file}: {words}"
    if kind is StoreDamaged:
        text += "; it is no store, and will be moved aside when something is read or kept"
    return text
