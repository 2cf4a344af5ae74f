"""What is asked of the tables: one statement each, built once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from . import schema
from .database import upsert
from .errors import StoreGone
from .keys import Columns
from .rows import NOT_TRIED
from .schema import entries, trials

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
    found = connection.execute(_one_entry, key._asdict()).mappings().first()
    return None if found is None else dict(found)


def find_trials(connection: sa.Connection, key: Columns) -> list[Row]:
    """The rows of a key's trials, in the order in which they were first kept."""
    return _rows(connection.execute(_trials_of_key, key._asdict()))


def find_keys(connection: sa.Connection) -> list[Row]:
    """The key columns of all entries."""
    return _rows(connection.execute(_all_keys))


def count(connection: sa.Connection) -> int:
    """How many entries there are."""
    return connection.execute(_count).scalar_one()


def find_related(connection: sa.Connection, conditions: Mapping[str, str], limit: int) -> list[Row]:
    """Entries with these column values; a value that ends with `*` stands for any ending."""
    statement = sa.select(entries).limit(limit)
    for name, value in conditions.items():
        column = entries.c[name]
        if value.endswith("*"):
            statement = statement.where(column.startswith(value[:-1], autoescape=True))
        else:
            statement = statement.where(column == value)
    return _rows(connection.execute(statement))


def put(connection: sa.Connection, row: Row, trial_rows: Sequence[Row], origin: str) -> None:
    """Keep an entry in place of the one with its key, and merge its trials with those kept."""
    if schema.stated(connection) != schema.newest():
        raise StoreGone("the store changed its schema while it was open")
    connection.execute(upsert(connection.dialect.name, entries, _KEY), row)
    entry = connection.execute(_entry_id, {name: row[name] for name in _KEY}).scalar_one()
    _merge_trials(connection, entry, trial_rows, origin)


def remove(connection: sa.Connection, key: Columns) -> bool:
    """Remove the entry of a key, and with it its trials; False if there was none."""
    if schema.stated(connection) != schema.newest():
        raise StoreGone("the store changed its schema while it was open")
    return connection.execute(entries.delete().where(_this_key), key._asdict()).rowcount > 0


def clear(connection: sa.Connection) -> None:
    """Remove every entry, and with it its trials."""
    if schema.stated(connection) != schema.newest():
        raise StoreGone("the store changed its schema while it was open")
    connection.execute(entries.delete())


def _merge_trials(connection: sa.Connection, entry: int, rows: Iterable[Row], origin: str) -> None:
    """Trials of another origin go; of the same one those stay that the new ones do not replace."""
    connection.execute(_of_another_origin, {"entry": entry, "wanted": origin})
    kept = _rows(connection.execute(_trials_of_entry, {"entry": entry}))
    known = {row["candidate"]: row for row in kept}
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
