"""The tables, and how a store of an earlier schema becomes one of today.

`MIGRATIONS[n]` makes schema n+1 of schema n, and an empty database counts as schema 0: a new store
goes the same way as an old one. A migration is never changed once it was released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sqlalchemy as sa

from .errors import StoreDamaged

metadata = sa.MetaData()

_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite counts in INTEGER only

meta = sa.Table(
    "ejkernel_meta",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

entries = sa.Table(
    "ejkernel_entries",
    metadata,
    sa.Column("id", _number, primary_key=True),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("op_id", sa.Text, nullable=False),
    sa.Column("call_key", sa.Text, nullable=False),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("config_type", sa.Text, nullable=False),
    sa.Column("signature", sa.Text),
    sa.Column("call", sa.Text),
    sa.Column("measured", sa.Text),
    sa.Column("seconds", sa.Double),
    sa.Column("heuristic_seconds", sa.Double),
    sa.Column("incomplete", sa.Text),
    sa.Column("source", sa.Text),
    sa.Column("versions", sa.Text),
    sa.Column("when", sa.Text, nullable=False),
    sa.Column("where", sa.Text, nullable=False),
    sa.Column("about", sa.Text, nullable=False),
    # In this order it also answers "the same operation, other calls" and "… other devices".
    sa.UniqueConstraint("op_id", "call_key", "device", name="ejkernel_entries_key"),
)

trials = sa.Table(
    "ejkernel_trials",
    metadata,
    sa.Column("id", _number, primary_key=True),
    sa.Column(
        "entry_id",
        _number,
        sa.ForeignKey("ejkernel_entries.id", ondelete="CASCADE"),
        nullable=False,
    ),
    sa.Column("candidate", sa.Text, nullable=False),
    sa.Column("origin", sa.Text, nullable=False),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("verdict", sa.Text, nullable=False),
    sa.Column("seconds", sa.Double),
    sa.Column("samples_ns", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("when", sa.Text, nullable=False),
    sa.Column("about", sa.Text, nullable=False),
    sa.UniqueConstraint("entry_id", "candidate", name="ejkernel_trials_candidate"),
)


# --- migrations ----------------------------------------------------------------------------------

Migration = Callable[[sa.Connection], None]


def create_tables(connection: sa.Connection) -> None:
    """Schema 0 (nothing) to schema 1.

    Whoever changes the tables above writes them down here as they were, for schema 1, and adds a
    migration to schema 2.
    """
    metadata.create_all(connection)


MIGRATIONS: list[Migration] = [create_tables]


def newest() -> int:
    """The schema that this version of ejkernel reads and writes."""
    return len(MIGRATIONS)


def found(connection: sa.Connection) -> int | None:
    """The schema of an open database, None if it has no table of ours."""
    inspector = sa.inspect(connection)
    # In this order: another process may be making them, and makes both at once.
    has_entries, has_note = (inspector.has_table(table.name) for table in (entries, meta))
    if has_entries and not has_note:
        raise StoreDamaged("it does not say which schema it has")
    for table in metadata.sorted_tables if has_note else ():
        if inspector.has_table(table.name) and _computed(inspector, table):
            # A file of some kilobytes can so hold gigabytes.
            raise StoreDamaged("it has columns that are computed, which no store has")
    return stated(connection) if has_note else None


def _computed(inspector: sa.Inspector, table: sa.Table) -> bool:
    columns = inspector.get_columns(table.name)
    return any("computed" in column and column["name"] in table.columns for column in columns)


def stated(connection: sa.Connection) -> int:
    """The schema that a store's own note states."""
    value = connection.scalar(sa.select(meta.c.value).where(meta.c.name == "schema"))
    if not isinstance(value, str) or not value.isdecimal():
        raise StoreDamaged(f"it does not say which schema it has, but {value!r}")
    return int(value)


def readable(connection: sa.Connection) -> bool:
    """True if a newer store still has what reading needs."""
    inspector = sa.inspect(connection)
    for table in (entries, trials):
        if not inspector.has_table(table.name):
            return False
        have = {column["name"] for column in inspector.get_columns(table.name)}
        if not {column.name for column in table.columns} <= have:
            return False
    return True


def migrate(connection: sa.Connection, since: int, steps: Sequence[Migration]) -> None:
    """Bring a store from schema `since` up to date, inside the caller's transaction."""
    for step in steps[since:]:
        step(connection)
    connection.execute(meta.delete().where(meta.c.name == "schema"))
    connection.execute(meta.insert().values(name="schema", value=str(len(steps))))
