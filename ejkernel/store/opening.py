"""From a database that answers to a store that can be used: which schema it has, and what follows.

Older: brought up to date, in one transaction. Newer: read if its tables still have what we need,
never changed.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from . import schema
from .database import Database
from .errors import StoreError, StoreNewer, StoreReadOnly

_MIGRATION_LOCK = 0x656A6B65726E  # any number that other programs do not use: "ejkern"


def bring_up_to_date(
    database: Database, shown: str, found: int, warn: Callable[[str, str], None]
) -> StoreError | None:
    """Make an existing store usable; what it gives is why it may not be written, if so."""
    newest = schema.newest()
    if found < newest:
        try:
            database.write(create_or_migrate)
        except StoreReadOnly as error:
            if not database.read(schema.readable):
                raise
            return error
    if found <= newest:
        return None
    newer = (
        f"{shown} was made by a newer ejkernel (schema {found}, this one knows {newest}); "
        "update ejkernel to write it"
    )
    if not database.read(schema.readable):
        raise StoreNewer(f"{newer} or to read it")
    refusal = StoreNewer(f"{newer}; until then it is only read")
    warn(refusal.trouble, str(refusal))
    return refusal


def create_or_migrate(connection: sa.Connection) -> None:
    """Bring a store, or an empty database, to the newest schema; for use in a transaction."""
    if connection.dialect.name == "postgresql":  # SQLite's transactions exclude each other anyway
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    found = schema.found(connection) or 0
    if found < schema.newest():  # else someone was faster
        schema.migrate(connection, found, schema.MIGRATIONS)
