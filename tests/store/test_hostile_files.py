"""A file that somebody else has made: what it defines is not run, and it costs little time and
memory, whatever it holds. So do the files next to it.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import time
import tracemalloc

import pytest

from ejkernel.ops import PersistentCache
from ejkernel.store import StoreError, backends, locate
from ejkernel.store.rows import LARGEST_VALUE
from ejkernel.store.sqlite_file import count_entries

KEY = ("cpu|x", "m@v1", "0" * 16)
ANOTHER = ("cpu|x", "m@v1", "1" * 16)
FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


def view(table, columns):
    """A view in the place of a table, with endlessly many rows."""
    shown = ", ".join(f"'{i}' || x AS \"{name}\"" for i, name in enumerate(columns))
    return f"CREATE VIEW {table} AS {FOREVER} SELECT {shown} FROM c"


def as_view(connection, table):
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    connection.execute("PRAGMA legacy_alter_table = ON")
    connection.execute(f"ALTER TABLE {table} RENAME TO old")
    connection.execute(view(table, columns))


def trigger(what):
    def plant(connection):
        connection.execute(
            f"CREATE TRIGGER planted AFTER INSERT ON ejkernel_entries BEGIN {what}; END"
        )

    return plant


HOSTILE = {
    "a view of entries": lambda c: as_view(c, "ejkernel_entries"),
    "a view of the note": lambda c: as_view(c, "ejkernel_meta"),
    "a view of trials": lambda c: as_view(c, "ejkernel_trials"),
    "a trigger that deletes": trigger("DELETE FROM ejkernel_entries"),
    "a trigger without an end": trigger(
        f"INSERT INTO ejkernel_meta SELECT x, x FROM ({FOREVER} SELECT x FROM c)"
    ),
}

# In another process: what does not end is killed.
USE = """
cache = PersistentCache(args["store"])
key, another = ("cpu|x", "m@v1", "0" * 16), ("cpu|x", "m@v1", "1" * 16)
cache.get(key), cache.trials(key), cache.related(device="cpu|x"), cache.keys(), len(cache)
try:
    cache.put(another, {"a": 2}, about={"trials": [{"config": 1, "verdict": "measured"}]})
except OSError as error:
    result = [str(error), cache.get(key)]
"""


@pytest.fixture
def store(tmp_path):
    cache = PersistentCache(tmp_path / "store")
    cache.put(KEY, {"a": 1})
    cache.close()
    return tmp_path / "store"


def next_to(store, suffix):
    return store / f"configs.sqlite3{suffix}"


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_file_defines_is_not_run(store, what, nursery):
    with sqlite3.connect(next_to(store, "")) as connection:
        HOSTILE[what](connection)
    connection.close()
    if "entries" in what:
        with pytest.raises(StoreError, match="views or triggers"):
            count_entries(locate(store))
    told, found = nursery.run(USE, store=store).result
    assert "view" in told or "trigger" in told
    assert found == (None if "entries" in what or "note" in what else {"a": 1})


def test_a_trigger_that_is_added_to_an_open_store_is_not_run(store):
    cache = PersistentCache(store)
    assert cache.get(KEY) == {"a": 1}
    with sqlite3.connect(next_to(store, "")) as connection:
        HOSTILE["a trigger that deletes"](connection)
    connection.close()
    with pytest.raises(StoreError, match="views or triggers"):
        cache.put(ANOTHER, {"a": 2})
    assert cache.get(KEY) == {"a": 1}


def test_a_value_of_many_megabytes_costs_its_entry(store, caplog):
    cache = PersistentCache(store)
    cache.put(ANOTHER, {"a": 2})
    with sqlite3.connect(next_to(store, "")) as connection:
        huge = f"[{'[],' * (LARGEST_VALUE // 3)}1]"
        connection.execute("UPDATE ejkernel_entries SET config = ? WHERE id = 1", (huge,))
    connection.close()
    assert cache.get(KEY) is None
    assert f"its config has more than {LARGEST_VALUE:,} bytes" in caplog.text
    assert [entry["key"] for entry in cache.related(device="cpu|x")] == [ANOTHER]
    with pytest.raises(StoreError, match="at most"):  # else it could not be read again
        cache.put(KEY, "x" * LARGEST_VALUE)


def test_a_small_file_that_computes_gigabytes_is_no_store(store, nursery):
    with sqlite3.connect(next_to(store, "")) as connection:
        (made,) = connection.execute(
            "SELECT sql FROM sqlite_master WHERE name = 'ejkernel_trials'"
        ).fetchone()
        connection.execute("DROP TABLE ejkernel_trials")
        computed = "reason TEXT GENERATED ALWAYS AS (hex(zeroblob(400000000))) VIRTUAL"
        connection.execute(made.replace("reason TEXT NOT NULL", computed))
    connection.close()
    use = """
    cache = PersistentCache(args["store"])
    result = cache.get(("cpu|x", "m@v1", "0" * 16))
    cache.put("key", 1)
    """
    done = nursery.run(use, store=store)
    assert done.result is None
    (message,) = done.warnings
    assert "computed" in message
    assert PersistentCache(store).get("key") == 1


def test_a_row_of_hundreds_of_megabytes_is_not_read(store, caplog):
    cache = PersistentCache(store)
    cache.put(ANOTHER, {"a": 2})
    with sqlite3.connect(next_to(store, "")) as connection:
        connection.execute("UPDATE ejkernel_entries SET about = zeroblob(100000000) WHERE id = 1")
    connection.close()
    tracemalloc.start()
    assert cache.get(KEY) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert "too big" in caplog.text
    assert cache.get(ANOTHER) == {"a": 2}


LOGS = {
    "-wal": struct.pack(">8I", 0x377F0682, 3007000, 512, 0, 0, 0, 0, 0),
    "-journal": bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", 0, 0, 1, 512, 512),
}


@pytest.mark.parametrize("suffix", LOGS)
def test_a_log_of_terabytes_of_nothing_is_not_walked_through(store, suffix):
    with open(next_to(store, suffix), "wb") as log:
        log.write(LOGS[suffix])
        log.truncate(2**42)
    start = time.monotonic()
    PersistentCache(store).get(KEY)  # a forged journal can take it away
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link"])
def test_something_else_in_the_place_of_a_log_is_not_opened(store, suffix, kind, caplog):
    place = next_to(store, suffix)
    if kind == "a pipe":
        os.mkfifo(place)
    elif kind == "a folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero")
    assert PersistentCache(store).get(KEY) is None
    assert f"it is {kind}, not a regular file" in caplog.text
    for attempt in (
        lambda: PersistentCache(store).put(KEY, 1),
        lambda: count_entries(locate(store)),
    ):
        with pytest.raises(StoreError, match="move it away"):
            attempt()
    place.rmdir() if kind == "a folder" else place.unlink()
    assert PersistentCache(store).get(KEY) == {"a": 1}


def test_something_with_the_name_of_an_unfinished_file_is_not_in_the_way(tmp_path):
    next_to(tmp_path, ".new-x").mkdir()
    cache = PersistentCache(tmp_path)
    cache.put(KEY, 1)
    assert cache.get(KEY) == 1


def test_a_file_that_is_removed_while_it_is_opened_is_made_again(store, monkeypatch):
    really_open = backends.open_file

    def removed(*args, **keywords):
        monkeypatch.undo()
        next_to(store, "").unlink()
        return really_open(*args, **keywords)

    monkeypatch.setattr(backends, "open_file", removed)
    cache = PersistentCache(store)
    cache.put(ANOTHER, {"a": 2})
    assert cache.get(ANOTHER) == {"a": 2}
