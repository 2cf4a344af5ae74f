"""The tables: their schema, how a store of an earlier schema becomes one of today, and what is
asked of them.

`MIGRATIONS[n]` makes schema n+1 of schema n, and an empty database counts as schema 0: a new store
goes the same way as an old one. A migration is never changed once it was released. A store of a
newer schema is read if its tables still have what we need, and never changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from .database import Database
from .errors import StoreDamaged, StoreError, StoreGone, StoreNewer, StoreReadOnly, WarnOnce
from .rows import NOT_TRIED, Columns

metadata = sa.MetaData()


def _texts(*names: str, nullable: bool = False) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=nullable) for name in names]


def _table(name: str, *columns: Any) -> sa.Table:
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite counts in INTEGER only
    return sa.Table(name, metadata, sa.Column("id", number, primary_key=True), *columns)


meta = sa.Table(
    "ejkernel_meta", metadata, sa.Column("name", sa.Text, primary_key=True), *_texts("value")
)

entries = _table(
    "ejkernel_entries",
    *_texts("device", "op_id", "call_key", "config", "config_type"),
    *_texts("signature", "call", "measured", nullable=True),
    sa.Column("seconds", sa.Double),
    sa.Column("heuristic_seconds", sa.Double),
    *_texts("incomplete", "source", "versions", nullable=True),
    *_texts("when", "where", "about"),
    # In this order it also answers "the same operation, other calls" and "… other devices".
    sa.UniqueConstraint("op_id", "call_key", "device", name="ejkernel_entries_key"),
)

trials = _table(
    "ejkernel_trials",
    sa.Column("entry_id", sa.ForeignKey("ejkernel_entries.id", ondelete="CASCADE"), nullable=False),
    *_texts("candidate", "origin", "config", "verdict"),
    sa.Column("seconds", sa.Double),
    *_texts("samples_ns", "reason", "when", "about"),
    sa.UniqueConstraint("entry_id", "candidate", name="ejkernel_trials_candidate"),
)


# --- migrations ----------------------------------------------------------------------------------

_MIGRATION_LOCK = 0x656A6B65726E  # any number that other programs do not use: "ejkern"


def create_tables(connection: sa.Connection) -> None:
    """Schema 0 (nothing) to schema 1.

    Whoever changes the tables above writes them down here as they were, for schema 1, and adds a
    migration to schema 2.
    """
    metadata.create_all(connection)


MIGRATIONS: list[Callable[[sa.Connection], None]] = [create_tables]


def newest_schema() -> int:
    """The schema that this version of ejkernel reads and writes."""
    return len(MIGRATIONS)


def schema_of(connection: sa.Connection) -> int | None:
    """The schema of an open database, None if it has no table of ours."""
    inspector = sa.inspect(connection)
    # In this order: another process may be making them, and makes both at once.
    has_entries, has_meta = (inspector.has_table(table.name) for table in (entries, meta))
    if has_entries and not has_meta:
        raise StoreDamaged("it does not say which schema it has")
    for table in metadata.sorted_tables if has_meta else ():
        columns = inspector.get_columns(table.name) if inspector.has_table(table.name) else ()
        if any("computed" in column and column["name"] in table.columns for column in columns):
            # A file of some kilobytes can so hold gigabytes.
            raise StoreDamaged("it has columns that are computed, which no store has")
    return _stated_schema(connection) if has_meta else None


def _stated_schema(connection: sa.Connection) -> int:
    value = connection.scalar(sa.select(meta.c.value).where(meta.c.name == "schema"))
    if not isinstance(value, str) or not value.isdecimal():
        raise StoreDamaged(f"it does not say which schema it has, but {value!r}")
    return int(value)


def is_readable(connection: sa.Connection) -> bool:
    """True if a newer store still has what reading needs."""
    inspector = sa.inspect(connection)
    return all(
        inspector.has_table(table.name)
        and set(table.columns.keys()) <= {c["name"] for c in inspector.get_columns(table.name)}
        for table in (entries, trials)
    )


def create_or_migrate(connection: sa.Connection) -> None:
    """Bring a store, or an empty database, to the newest schema; for use in a transaction."""
    if connection.dialect.name == "postgresql":  # SQLite's transactions exclude each other anyway
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    since = schema_of(connection) or 0
    if since < newest_schema():  # else someone was faster
        for step in MIGRATIONS[since:]:
            step(connection)
        connection.execute(meta.delete().where(meta.c.name == "schema"))
        connection.execute(meta.insert().values(name="schema", value=str(newest_schema())))


def bring_up_to_date(
    database: Database, shown: str, schema: int, warn_once: WarnOnce
) -> StoreError | None:
    """Make an existing store usable; what it gives is why it may not be written, if so."""
    newest = newest_schema()
    if schema < newest:
        try:
            database.write(create_or_migrate)
        except StoreReadOnly as error:
            if not database.read(is_readable):
                raise
            return error
    if schema <= newest:
        return None
    newer = (
        f"{shown} was made by a newer ejkernel (schema {schema}, this one knows {newest}); "
        "update ejkernel to write it"
    )
    if not database.read(is_readable):
        raise StoreNewer(f"{newer} or to read it")
    refusal = StoreNewer(f"{newer}; until then it is only read")
    warn_once(StoreNewer, str(refusal))
    return refusal


# --- queries: one statement each, built once -----------------------------------------------------

Row = Mapping[str, Any]

_KEY = ("op_id", "call_key", "device")
_this_key = sa.and_(*(entries.c[name] == sa.bindparam(name) for name in _KEY))
_one_entry = sa.select(entries).where(_this_key)
_entry_id = sa.select(entries.c.id).where(_this_key)
_trials_of_key = sa.select(trials).join(entries).where(_this_key).order_by(trials.c.id)
_trials_of_entry = sa.select(trials).where(trials.c.entry_id == sa.bindparam("entry"))
_all_keys = sa.select(entries.c.device, entries.c.op_id, entries.c.call_key).order_by(entries.c.id)
_count = sa.select(sa.func.count()).select_from(entries)
_of_another_origin = trials.delete().where(
    trials.c.entry_id == sa.bindparam("entry"), trials.c.origin != sa.bindparam("wanted")
)
_replace_trial = trials.update().where(trials.c.id == sa.bindparam("trial"))
_CONTENT = ("verdict", "seconds", "samples_ns", "reason", "about")


def find_entry(connection: sa.Connection, key: Columns) -> Row | None:
    """The row of a key."""
    row = connection.execute(_one_entry, key._asdict()).mappings().first()
    return None if row is None else dict(row)


def find_trials(connection: sa.Connection, key: Columns) -> list[Row]:
    """The rows of a key's trials, in the order in which they were first stored."""
    return _rows(connection.execute(_trials_of_key, key._asdict()))


def find_keys(connection: sa.Connection) -> list[Row]:
    """The key columns of all entries."""
    return _rows(connection.execute(_all_keys))


def count(connection: sa.Connection) -> int:
    """How many entries there are."""
    return connection.execute(_count).scalar_one()


def find_related(connection: sa.Connection, conditions: Mapping[str, str], limit: int) -> list[Row]:
    """Entries with these column values; a value that ends with `*` stands for any ending."""
    wanted = [
        entries.c[name].startswith(value[:-1], autoescape=True)
        if value.endswith("*")
        else entries.c[name] == value
        for name, value in conditions.items()
    ]
    return _rows(connection.execute(sa.select(entries).where(*wanted).limit(limit)))


def put(connection: sa.Connection, row: Row, trial_rows: Sequence[Row], origin: str) -> None:
    """Store an entry in place of the one with its key, and merge its trials with those there."""
    _check_schema(connection)
    connection.execute(_upsert(connection.dialect.name), row)
    entry = connection.execute(_entry_id, {name: row[name] for name in _KEY}).scalar_one()
    _merge_trials(connection, entry, trial_rows, origin)


def remove(connection: sa.Connection, key: Columns) -> bool:
    """Remove the entry of a key, and with it its trials; False if there was none."""
    _check_schema(connection)
    return connection.execute(entries.delete().where(_this_key), key._asdict()).rowcount > 0


def clear(connection: sa.Connection) -> None:
    """Remove every entry, and with it its trials."""
    _check_schema(connection)
    connection.execute(entries.delete())


def _check_schema(connection: sa.Connection) -> None:
    if _stated_schema(connection) != newest_schema():
        raise StoreGone("the store changed its schema while it was open")


@functools.cache
def _upsert(dialect: str) -> Any:
    """The statement that inserts an entry, or replaces the one with the same key."""
    insert: Any = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert(entries)
    columns = [c.name for c in entries.columns if c.name not in _KEY and not c.primary_key]
    changes = {name: statement.excluded[name] for name in columns}
    return statement.on_conflict_do_update(index_elements=_KEY, set_=changes)


def _merge_trials(connection: sa.Connection, entry: int, rows: Iterable[Row], origin: str) -> None:
    """Trials of another origin go; of the same one those stay that the new ones do not replace."""
    connection.execute(_of_another_origin, {"entry": entry, "wanted": origin})
    stored = _rows(connection.execute(_trials_of_entry, {"entry": entry}))
    known = {row["candidate"]: row for row in stored}
    new, changed = [], []
    for row in rows:
        old = known.get(row["candidate"])
        if old is None:
            new.append({**row, "entry_id": entry})
        elif row["verdict"] != NOT_TRIED and any(row[c] != old[c] for c in _CONTENT):
            changed.append({**row, "trial": old["id"]})
    if new:
        connection.execute(trials.insert(), new)
    if changed:
        connection.execute(_replace_trial, changed)


def _rows(result: sa.CursorResult[Any]) -> list[Row]:
    return [dict(row) for row in result.mappings()]
