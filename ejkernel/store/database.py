"""An open database: short transactions, patience with other processes, one code for all of them."""

from __future__ import annotations

import pathlib
import random
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.pool import NullPool, QueuePool

from .errors import StoreBusy, StoreError, meaning, message_of
from .location import ServerLocation
from .sqlite_file import connect, deadline, leave_mark

T = TypeVar("T")
Transaction = Callable[[sa.Connection], T]

_ONE_WAIT = 0.2
"""Seconds that SQLite waits by itself; `Database` then tries again while there is patience."""

_ONE_CONNECTION: dict[str, Any] = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}


class Database:
    """One connection, opened when it is needed and used by one thread at a time.

    `read` and `write` run a function in a transaction of its own, again if others were in the way,
    and raise nothing but `StoreError`, whose text holds no password.
    """

    def __init__(self, engine: sa.Engine, shown: str, scrub: Callable[[str], str] = str) -> None:
        self._engine = engine
        self._is_server = engine.dialect.name != "sqlite"
        # SQLite shows a reader one state anyway; a server does when asked to.
        self._reading = {"isolation_level": "REPEATABLE READ"} if self._is_server else {}
        self._shown = shown
        self._scrub = scrub

    def read(self, transaction: Transaction[T]) -> T:
        """What `transaction(connection)` gives, from one consistent state of the store."""
        return self._run(transaction, writes=False)

    def write(self, transaction: Transaction[T]) -> T:
        """Run `transaction(connection)` and store all of what it changed, or nothing."""
        return self._run(transaction, writes=True)

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        self._engine.dispose()

    def _run(self, transaction: Transaction[T], *, writes: bool) -> T:
        until = deadline()
        again_after_loss = True
        while True:
            try:
                with self._engine.connect() as connection:
                    options = {"ejkernel_writes": True} if writes else self._reading
                    connection = connection.execution_options(**options)
                    with connection.begin():
                        if not writes or self._is_server:
                            return transaction(connection)
                        driver: Any = connection.connection.driver_connection
                        before = driver.total_changes
                        done = transaction(connection)
                        if driver.total_changes != before:
                            leave_mark(connection)
                        return done
            except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
                failure = meaning(error)(f"{self._shown}: {self._scrub(message_of(error))}")
                lost = bool(getattr(error, "connection_invalidated", False))  # a new one may work
            except StoreError as error:  # of our own: a transaction does not know where it runs
                failure, lost = type(error)(f"{self._shown}: {error}"), False
            # Outside of `except`: the original error, which may quote what nobody shall read, is
            # not even attached to the new one.
            if lost and again_after_loss:
                again_after_loss = False  # what we write can be written twice
            elif not isinstance(failure, StoreBusy) or time.monotonic() > until:
                raise failure
            else:
                time.sleep(random.uniform(0.001, 0.02))


# --- SQLite --------------------------------------------------------------------------------------


def open_file(
    file: pathlib.Path, *, mode: str = "rw", shown: str = "", journal: str = ""
) -> Database:
    """The database in a file that exists already: opening never creates one.

    `mode` is `rw`, `ro`, or `immutable` (nobody writes). A file that is still empty is given a
    `journal` mode, and is `shown` by the name that it will have.
    """

    def create() -> sqlite3.Connection:
        connection = connect(file, mode, _ONE_WAIT)
        # Damaged text costs its entry, not the query.
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        for pragma in (
            "foreign_keys = ON",
            "synchronous = FULL",  # what was acknowledged survives a power cut too
            "cell_size_check = ON",
            *([f"journal_mode = {journal}"] if journal else ()),  # the file remembers it
        ):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    # If it is not as immutable as it looks, every new connection sees the latest state.
    pool: dict[str, Any] = {"poolclass": NullPool} if mode == "immutable" else _ONE_CONNECTION
    engine = sa.create_engine("sqlite://", creator=create, **pool)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return Database(engine, shown or str(file))


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
        location.url, connect_args=defaults, hide_parameters=True, **_ONE_CONNECTION
    )
    sa.event.listen(engine, "connect", _prepare_server)
    return Database(engine, location.shown, location.scrub)


def _prepare_server(connection: Any, record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '10s'")
        cursor.execute("SET statement_timeout = '60s'")
    connection.commit()
