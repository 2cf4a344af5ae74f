"""Stores of earlier and of later schemas."""

from __future__ import annotations

import contextlib
import logging
import sqlite3

import pytest
import sqlalchemy as sa

from ejkernel.ops import PersistentCache
from ejkernel.store import StoreError, StoreNewer, tables

KEY = ("cpu", "op@v1", "0" * 16)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def sql(folder, script):
    with contextlib.closing(sqlite3.connect(folder / "configs.sqlite3")) as connection:
        connection.executescript(script)


def ask(folder, question):
    with contextlib.closing(sqlite3.connect(folder / "configs.sqlite3")) as connection:
        return connection.execute(question).fetchall()


def state_of(folder):
    return {
        table: ask(folder, f"SELECT * FROM {table}")
        for (table,) in ask(folder, "SELECT name FROM sqlite_master WHERE type = 'table'")
    }


# --- the tables of today -------------------------------------------------------------------------


def test_the_migrations_make_the_tables_that_the_code_uses(place):
    cache = PersistentCache(place)
    cache.put(KEY, 1)
    cache.close()
    engine = sa.create_engine(
        f"sqlite:///{place}/configs.sqlite3" if "://" not in str(place) else place
    )
    with engine.connect() as connection:
        found = sa.inspect(connection)
        for table in tables.metadata.sorted_tables:
            columns = {c["name"]: c["nullable"] for c in found.get_columns(table.name)}
            assert columns == {c.name: c.nullable for c in table.columns}
            unique = {tuple(u["column_names"]) for u in found.get_unique_constraints(table.name)}
            declared = [c for c in table.constraints if isinstance(c, sa.UniqueConstraint)]
            assert unique == {tuple(c.name for c in constraint.columns) for constraint in declared}
        assert connection.scalar(sa.select(tables.meta.c.value)) == str(tables.newest_schema())
    engine.dispose()


def test_the_file_has_a_log_and_waits_for_the_disk(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put(KEY, 1)
    assert ask(tmp_path, "PRAGMA journal_mode") == [("wal",)]
    from ejkernel.store.database import open_file

    database = open_file(tmp_path / "configs.sqlite3")
    levels = {
        name: database.read(lambda c, n=name: c.exec_driver_sql(f"PRAGMA {n}").scalar())
        for name in ("synchronous", "foreign_keys", "trusted_schema")
    }
    assert levels == {"synchronous": 2, "foreign_keys": 1, "trusted_schema": 0}
    database.close()
    cache.close()


# --- older ---------------------------------------------------------------------------------------

# A made-up schema 0: one table, configs under one text key, no trials, no note.
OLD = """
CREATE TABLE ejkernel_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO ejkernel_meta VALUES ('schema', '0');
CREATE TABLE old_configs ("key" TEXT PRIMARY KEY, config TEXT NOT NULL);
INSERT INTO old_configs VALUES ('cpu op@v1 0000000000000000', '{"rows": 1}');
INSERT INTO old_configs VALUES ('cpu op@v1 1111111111111111', '{"rows": 2}');
"""


def from_old_configs(connection):
    tables.create_tables(connection)
    for key, config in connection.execute(sa.text("SELECT key, config FROM old_configs")).all():
        device, op_id, call_key = key.split(" ")
        connection.execute(
            tables.entries.insert().values(
                device=device,
                op_id=op_id,
                call_key=call_key,
                config=config,
                config_type="builtins:dict",
                when="2020-01-01",
                where="",
                about="{}",
            )
        )
    connection.execute(sa.text("DROP TABLE old_configs"))


@pytest.fixture
def old(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MIGRATIONS", [from_old_configs])
    sql(tmp_path, OLD)
    return tmp_path


def test_an_older_store_is_migrated_with_what_is_in_it(old, caplog):
    cache = PersistentCache(old)
    assert cache.get(KEY) == {"rows": 1}
    assert len(cache) == 2
    cache.put(KEY, {"rows": 3})
    cache.close()
    assert ask(old, "SELECT value FROM ejkernel_meta WHERE name = 'schema'") == [("1",)]
    assert PersistentCache(old).get(("cpu", "op@v1", "1" * 16)) == {"rows": 2}
    assert warnings_of(caplog) == []
    assert not list(old.glob("*.damaged*"))


def test_a_migration_that_fails_changes_nothing(old, monkeypatch, caplog):
    def half_way(connection):
        from_old_configs(connection)
        connection.execute(sa.text("SELECT * FROM no_such_table_at_all"))

    before = state_of(old)
    monkeypatch.setattr(tables, "MIGRATIONS", [half_way])
    cache = PersistentCache(old)
    assert cache.get(KEY) is None
    with pytest.raises(StoreError):
        cache.put(KEY, 1)
    cache.close()
    assert state_of(old) == before
    assert len(warnings_of(caplog)) == 1
    assert not list(old.glob("*.damaged*"))
    monkeypatch.setattr(tables, "MIGRATIONS", [from_old_configs])
    assert PersistentCache(old).get(KEY) == {"rows": 1}


def add_a_column(connection):
    connection.execute(sa.text("ALTER TABLE ejkernel_entries ADD COLUMN colour TEXT"))


def test_a_store_of_today_becomes_one_of_tomorrow(place, monkeypatch, caplog):
    """The step from schema 1 on, in both databases, and what a program of today makes of it."""
    today = PersistentCache(place)
    today.put(KEY, {"rows": 1})
    today.close()
    assert today.get(KEY) == {"rows": 1}  # open, with schema 1

    with monkeypatch.context() as patch:
        patch.setattr(tables, "MIGRATIONS", [*tables.MIGRATIONS, add_a_column])
        tomorrow = PersistentCache(place)
        assert tomorrow.get(KEY) == {"rows": 1}
        tomorrow.put(KEY, {"rows": 2})
        tomorrow.close()
    assert warnings_of(caplog) == []

    with pytest.raises(StoreNewer, match="newer ejkernel"):
        today.put(KEY, {"rows": 3})  # noticed although it was open all the time
    with pytest.raises(StoreNewer, match="newer ejkernel"):
        today.clear()
    assert today.get(KEY) == {"rows": 2}
    assert len(warnings_of(caplog)) == 1
    today.close()


def test_many_processes_migrate_once(nursery, tmp_path):
    PersistentCache(tmp_path / "store").put(KEY, 1)
    code = """
    import sqlalchemy as sa
    from ejkernel.store import tables
    def add(connection):
        connection.execute(sa.text("ALTER TABLE ejkernel_entries ADD COLUMN colour TEXT"))
    tables.MIGRATIONS.append(add)
    children = []
    for number in range(6):
        process = os.fork()
        if process == 0:
            cache = PersistentCache(args["place"])
            assert cache.get(("cpu", "op@v1", "0" * 16)) == 1
            cache.put(f"child {number}", number)
            os._exit(len(warnings))
        children.append(process)
    result = [os.waitpid(process, 0)[1] for process in children]
    """
    assert nursery.run(code, place=tmp_path / "store").result == [0] * 6
    assert ask(tmp_path / "store", "SELECT value FROM ejkernel_meta") == [("2",)]
    assert ask(tmp_path / "store", "SELECT count(*) FROM ejkernel_entries") == [(7,)]


# --- newer ---------------------------------------------------------------------------------------


def newer_store(folder, script=""):
    cache = PersistentCache(folder)
    cache.put(KEY, {"rows": 1}, about={"trials": [{"config": 1, "verdict": "wrong"}]})
    cache.close()
    sql(folder, f"UPDATE ejkernel_meta SET value = '99'; {script}")


def test_a_newer_store_is_read_with_one_message_and_never_changed(tmp_path, caplog):
    newer_store(
        tmp_path,
        "ALTER TABLE ejkernel_entries ADD COLUMN colour TEXT DEFAULT 'red';"
        "CREATE TABLE ejkernel_more (x);",
    )
    before = state_of(tmp_path)
    cache = PersistentCache(tmp_path)
    assert cache.get(KEY) == {"rows": 1}
    assert len(cache.trials(KEY)) == 1
    assert len(cache) == 1
    for change in (lambda: cache.put(KEY, 2), lambda: cache.put("new", 2), cache.clear):
        with pytest.raises(StoreNewer, match=r"schema 99, this one knows 1.*update ejkernel"):
            change()
    cache.close()
    (message,) = warnings_of(caplog)
    assert "schema 99" in message
    assert state_of(tmp_path) == before


@pytest.mark.parametrize(
    "script",
    [
        "ALTER TABLE ejkernel_entries RENAME COLUMN config TO value;",
        "ALTER TABLE ejkernel_entries RENAME TO ejkernel_configs;",
        "DROP TABLE ejkernel_trials;",
    ],
)
def test_a_newer_store_that_cannot_be_read_is_not_used_and_not_changed(tmp_path, script, caplog):
    newer_store(tmp_path, script)
    before = state_of(tmp_path)
    cache = PersistentCache(tmp_path)
    assert cache.get(KEY) is None
    assert (len(cache), cache.keys()) == (0, [])
    with pytest.raises(StoreNewer):
        cache.put(KEY, 2)
    cache.close()
    assert len(warnings_of(caplog)) == 1
    assert state_of(tmp_path) == before
    assert not list(tmp_path.glob("*.damaged*"))
