"""An open database: short transactions, patience with other processes, one code for all of them."""

from __future__ import annotations

import functools
import pathlib
import random
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import NullPool, QueuePool

from .errors import StoreBusy, StoreError
from .failures import in_words, lost_connection, meaning
from .folder import PATIENCE, deadline
from .harmless import make_harmless
from .leftover import leave_mark
from .location import FolderLocation, ServerLocation

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

_INSERTS: Mapping[str, Callable[[sa.Table], Any]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


_ONE_WAIT = 0.2
"""Seconds that SQLite waits by itself; `Database` then tries again while there is patience."""


class Database:
    """One connection, opened when it is needed and used by one thread at a time.

    `read` and `write` run a function in a transaction of its own, again if others were in the way,
    and raise nothing but `StoreError`, whose text holds no password.
    """

    def __init__(self, engine: sa.Engine, shown: str, scrub: Callable[[str], str] = str) -> None:
        self._engine = engine
        # SQLite shows a reader one state anyway; a server does when asked to.
        server = engine.dialect.name != "sqlite"
        self._reading = {"isolation_level": "REPEATABLE READ"} if server else {}
        self._shown = shown
        self._scrub = scrub

    def read(self, work: Work[T]) -> T:
        """What `work(connection)` gives, from one consistent state of the store."""
        return self._run(work, writes=False)

    def write(self, work: Work[T]) -> T:
        """Run `work(connection)` and keep all of what it changed, or nothing."""
        return self._run(work, writes=True)

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        self._engine.dispose()

    def _run(self, work: Work[T], *, writes: bool) -> T:
        until = deadline(PATIENCE)
        again_after_loss = True
        while True:
            try:
                with self._engine.connect() as connection:
                    options = {"ejkernel_writes": True} if writes else self._reading
                    connection = connection.execution_options(**options)
                    with connection.begin():
                        if not writes or connection.dialect.name != "sqlite":
                            return work(connection)
                        before = _changes(connection)
                        done = work(connection)
                        if _changes(connection) != before:
                            leave_mark(connection)
                        return done
            except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
                failure = meaning(error)(f"{self._shown}: {self._scrub(in_words(error))}")
                lost = lost_connection(error)
            except StoreError as error:  # of our own: `work` does not know where it works
                failure, lost = type(error)(f"{self._shown}: {error}"), False
            # Outside of `except`: the original error, which may quote what nobody shall read, is
            # not even attached to the new one.
            if lost and again_after_loss:
                again_after_loss = False  # what we write can be written twice
            elif not isinstance(failure, StoreBusy) or time.monotonic() > until:
                raise failure
            else:
                time.sleep(random.uniform(0.001, 0.02))


def _changes(connection: sa.Connection) -> int:
    """How many rows an SQLite connection has changed since it was opened."""
    return int(connection.connection.driver_connection.total_changes)  # type: ignore[union-attr]


@functools.cache
def upsert(dialect: str, table: sa.Table, unique: tuple[str, ...]) -> Any:
    """The statement that inserts a row, or replaces the one with the same unique columns."""
    statement = _INSERTS[dialect](table)
    columns = [c.name for c in table.columns if c.name not in unique and not c.primary_key]
    changes = {name: statement.excluded[name] for name in columns}
    return statement.on_conflict_do_update(index_elements=unique, set_=changes)


# --- SQLite --------------------------------------------------------------------------------------


def open_file(location: FolderLocation, *, mode: str = "rw") -> Database:
    """The database in an existing file: `mode` is `rw`, `ro`, or `immutable` (nobody writes)."""
    return Database(_sqlite_engine(location.file, mode), str(location.file))


def new_file(draft: pathlib.Path, shown: str, *, journal: str) -> Database:
    """The database in a file that exists and is still empty."""
    engine = _sqlite_engine(draft, "rw")

    def set_journal(connection: Any, record: object) -> None:
        connection.execute(f"PRAGMA journal_mode = {journal}")  # the file remembers it

    sa.event.listen(engine, "connect", set_journal)
    return Database(engine, shown)


def _sqlite_engine(file: pathlib.Path, mode: str) -> sa.Engine:
    """An engine for a file that exists already: opening never creates one."""
    parameters = "mode=ro&immutable=1" if mode == "immutable" else f"mode={mode}"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{file.absolute().as_uri()}?{parameters}",
            uri=True,
            timeout=_ONE_WAIT,
            check_same_thread=False,  # one thread at a time, not always the same one
            isolation_level=None,  # transactions begin where we say so
        )
        connection.text_factory = _readable  # damaged text costs its entry, not the query
        make_harmless(connection)
        return connection

    # If it is not as immutable as it looks, every new connection sees the latest state.
    pool: dict[str, Any] = (
        {"poolclass": NullPool}
        if mode == "immutable"
        else {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
    )
    engine = sa.create_engine("sqlite://", creator=connect, **pool)
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _readable(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _prepare_sqlite(connection: Any, record: object) -> None:
    for pragma in (
        "foreign_keys = ON",
        "synchronous = FULL",  # what was acknowledged survives a power cut too
        "cell_size_check = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and writes later could find that it is too late to write.
    writes = connection.get_execution_options().get("ejkernel_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


# --- servers -------------------------------------------------------------------------------------

_SERVER_DEFAULTS = {
    "connect_timeout": "5",
    "tcp_user_timeout": "15000",  # milliseconds until a silent server counts as gone
    "application_name": "ejkernel",
}


def open_server(location: ServerLocation) -> Database:
    """The database behind a URL. Nothing is connected yet."""
    defaults = {k: v for k, v in _SERVER_DEFAULTS.items() if k not in location.url.query}
    engine = sa.create_engine(
        location.url,
        connect_args=defaults,
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        hide_parameters=True,
    )
    sa.event.listen(engine, "connect", _prepare_server)
    return Database(engine, location.shown, location.scrub)


def _prepare_server(connection: Any, record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '10s'")
        cursor.execute("SET statement_timeout = '60s'")
    connection.commit()
