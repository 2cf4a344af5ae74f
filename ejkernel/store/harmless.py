"""A connection to an SQLite file that anybody may have written: its content is data.

A file may define views and triggers, which run whenever a table is used, and need not end. A store
has none.
"""

from __future__ import annotations

import sqlite3

LARGEST_ROW = 64 * 2**20
"""Bytes of the largest row that is read or written; the values of a row have 8 MiB at most."""

RUNS_SOMETHING = "it has views or triggers, which no store has, and they are not run; move it away"
"""What to say where SQLite says that something is not authorised."""


def make_harmless(connection: sqlite3.Connection) -> None:
    """Let a connection run what is asked of it, and nothing that its file defines."""
    connection.set_authorizer(_only_what_is_asked)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_ROW)
    connection.execute("PRAGMA trusted_schema = OFF")


def _only_what_is_asked(
    action: int, first: str | None, second: str | None, database: str | None, source: str | None
) -> int:
    """`source` is the view or the trigger that wants to do something, if one does."""
    return sqlite3.SQLITE_OK if source is None else sqlite3.SQLITE_DENY
