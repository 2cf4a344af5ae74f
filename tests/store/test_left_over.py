"""A log that was left over next to a file that was removed, or restored from a backup.

SQLite merges any log that it finds. All of this is done with real processes that are killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3

import pytest

from ejkernel.ops import PersistentCache
from ejkernel.store import backends
from ejkernel.store.errors import StoreUnavailable
from ejkernel.store.sqlite_file import foreign_log

# Puts what it is told and dies with the store open: what it wrote is in the log.
WRITE = """
process = os.fork()
if process == 0:
    cache = PersistentCache(args["place"])
    for key in args["keys"]:
        cache.put(key, args["value"])
        if key == args.get("merge"):  # a part of the log is merged with the file
            import sqlite3
            other = sqlite3.connect(pathlib.Path(args["place"], "configs.sqlite3"))
            other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    os._exit(7 if warnings else 0)
result = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
"""
OLD = [f"old {i}" for i in range(12)]
NEW = [f"new {i}" for i in range(12)]


def files(place):
    return sorted(path.name for path in place.iterdir())


def log_of(place):
    return place / "configs.sqlite3-wal"


def write(nursery, place, keys, value="written", code=0, **args):
    assert nursery.run(WRITE, place=place, keys=keys, value=value, **args).result == code
    assert log_of(place).stat().st_size > 0


def backup(place, *keys):
    """A copy of a store in its place, as it is before the other things happen."""
    cache = PersistentCache(place)
    for key in keys:
        cache.put(key, "stored")
    cache.close()
    copy = place.parent / "backup"
    shutil.copy(place / "configs.sqlite3", copy)
    cache.put("after the backup", 1)
    cache.close()
    return copy


def remove(place, copy):
    (place / "configs.sqlite3").unlink()


def remove_most(place, copy):
    (place / "configs.sqlite3").unlink()
    (place / "configs.sqlite3-shm").unlink()


def move_back(place, copy):
    os.replace(copy, place / "configs.sqlite3")


def copy_back(place, copy):
    shutil.copyfile(copy, place / "configs.sqlite3")


def move_another(place, copy):
    cache = PersistentCache(place.parent / "another")
    cache.put("stored 0", "stored")
    cache.close()
    os.replace(place.parent / "another" / "configs.sqlite3", place / "configs.sqlite3")


WAYS = [remove, remove_most, move_back, copy_back, move_another]


@pytest.mark.parametrize(
    "merge",
    [
        pytest.param(None, id="log"),
        pytest.param("old 8", id="log merged in part", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_log_that_was_left_over_is_moved_aside(nursery, tmp_path, way, merge):
    place = tmp_path / "store"
    copy = backup(place, "stored 0")
    write(nursery, place, OLD, merge=merge)
    log = log_of(place).read_bytes()
    way(place, copy)
    # The new one is written by a process that dies too: its own log must be merged.
    write(nursery, place, NEW, code=7)  # and has warned
    cache = PersistentCache(place)
    assert [cache.get(key) for key in NEW] == ["written"] * len(NEW)
    assert [cache.get(key) for key in OLD] == [None] * len(OLD)
    assert len(cache) == len(NEW) + (0 if way in (remove, remove_most) else 1)
    cache.close()
    with contextlib.closing(sqlite3.connect(place / "configs.sqlite3")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    [aside] = place.glob("*left-over*-wal")
    assert aside.read_bytes() == log


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_reading_first_warns_once_and_finds_what_is_there(nursery, tmp_path, way, caplog):
    place = tmp_path / "store"
    copy = backup(place, "stored 0")
    write(nursery, place, OLD)
    way(place, copy)
    cache = PersistentCache(place)
    found = [cache.get("stored 0"), cache.get("old 1"), len(cache)]
    removed = way in (remove, remove_most)
    assert found == ([None, None, 0] if removed else ["stored", None, 1])
    cache.put("new", 1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "is of another file" in message
    assert "left-over" in message
    cache.close()


@pytest.mark.parametrize(
    "merge",
    [None, "old 6", *(pytest.param(m, marks=pytest.mark.long) for m in ("old 0", "old 11"))],
)
def test_the_log_of_a_process_that_died_is_used(nursery, tmp_path, merge):
    place = tmp_path / "store"
    for round_ in range(3):
        keys = [f"{round_} {key}" for key in OLD]
        write(nursery, place, keys, merge=merge and f"{round_} {merge}")
        assert foreign_log(place / "configs.sqlite3") is None
    cache = PersistentCache(place)
    assert len(cache) == 3 * len(OLD)
    cache.close()
    assert files(place) == ["configs.sqlite3"]


def test_a_pair_that_is_restored_together_is_used(nursery, tmp_path):
    place = tmp_path / "store"
    write(nursery, place, OLD)
    shutil.copytree(place, tmp_path / "copy")
    write(nursery, place, NEW)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "copy", place)
    cache = PersistentCache(place)
    assert len(cache) == len(OLD)
    cache.close()


def test_a_store_that_others_wrote_without_marks_is_used(nursery, tmp_path):
    """An earlier ejkernel, or the program of SQLite."""
    place = tmp_path / "store"
    backup(place, "stored 0")
    done = nursery.run(
        """
        process = os.fork()
        if process == 0:
            import sqlite3
            other = sqlite3.connect(pathlib.Path(args["place"], "configs.sqlite3"))
            for _ in range(3):
                other.execute("UPDATE ejkernel_entries SET config = '\\"7\\"'")
                other.commit()
                other.execute("CREATE TABLE IF NOT EXISTS more (x)")
                other.commit()
            os._exit(0)
        result = os.waitpid(process, 0)[1]
        """,
        place=place,
    )
    assert done.result == 0
    assert log_of(place).stat().st_size > 0
    cache = PersistentCache(place)
    assert cache.get("stored 0") == "7"
    cache.close()
    assert files(place) == ["configs.sqlite3"]


# --- others have it open -------------------------------------------------------------------------

LONG_LIVED = """
place = pathlib.Path(args["place"])
to_child, from_child = os.pipe(), os.pipe()
process = os.fork()
if process == 0:
    cache = PersistentCache(place)
    number = 0
    for word in iter(lambda: os.read(to_child[0], 1), b"q"):
        try:
            cache.put(f"long {number}", number)
            os.write(from_child[1], b"k")
        except StoreError:
            os.write(from_child[1], b"e")
        number += 1
    cache.close()
    os._exit(0)

def ask(count):
    for _ in range(count):
        os.write(to_child[1], b"p")
        answers.append(os.read(from_child[0], 1).decode())

answers = []
ask(3)
if args["way"] == "removed":
    (place / "configs.sqlite3").unlink()
elif args["way"] == "moved":
    os.replace(args["copy"], place / "configs.sqlite3")
if args["first"] == "they":
    ask(2)
cache = PersistentCache(place)
for i in range(5):
    cache.put(f"here {i}", i)
ask(2)
cache.put("here 5", 5)
os.write(to_child[1], b"q")
os.waitpid(process, 0)
cache.put("here 6", 6)
result = {"answers": "".join(answers), "keys": [k for k in PersistentCache(place).keys()]}
"""


@pytest.mark.parametrize("first", ["they", "we"])
@pytest.mark.parametrize("way", ["removed", "moved", "moved the latest"])
def test_nothing_is_lost_when_a_file_is_replaced_that_others_have_open(
    nursery, tmp_path, way, first
):
    place = tmp_path / "store"
    copy = backup(place, "stored 0")
    latest = way == "moved the latest"  # their log fits this file too, and they are using it
    if latest:
        shutil.copy(place / "configs.sqlite3", copy)
        way = "moved"
    done = nursery.run(LONG_LIVED, place=place, copy=copy, way=way, first=first)
    assert set(done.result["answers"]) == {"k"}
    later = {f"here {i}" for i in range(7)} | {"long 3", "long 4"}
    if first == "they":
        later |= {"long 5", "long 6"}
    cache = PersistentCache(place)
    assert later <= set(cache.keys())
    assert latest or not {"long 0", "long 1", "long 2"} & set(cache.keys())
    for key in later:
        assert cache.get(key) == int(key.split()[1])
    cache.close()
    with contextlib.closing(sqlite3.connect(place / "configs.sqlite3")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_nothing_is_lost_when_a_file_is_replaced_that_this_process_has_open_twice(tmp_path):
    place = tmp_path / "store"
    backup(place, "stored 0")
    for copy in (tmp_path / "backup", tmp_path / "latest"):
        if copy.name == "latest":
            shutil.copy(place / "configs.sqlite3", copy)
        one, other = PersistentCache(place), PersistentCache(place)
        one.put("one", 1)
        other.put("other", 1)
        os.replace(copy, place / "configs.sqlite3")
        one.put("one later", 1)
        other.put("other later", 1)
        one.put("one last", 1)
        one.close()
        other.close()
        cache = PersistentCache(place)
        assert {"one later", "other later", "one last", "stored 0"} <= set(cache.keys())
        cache.close()


OVERWRITTEN = """
place = pathlib.Path(args["place"])
to_child, from_child = os.pipe(), os.pipe()
process = os.fork()
if process == 0:
    cache = PersistentCache(place)
    cache.put("long", 1)
    os.write(from_child[1], b"k")
    os.read(to_child[0], 1)
    os._exit(0)
os.read(from_child[0], 1)
import shutil
shutil.copyfile(args["copy"], place / "configs.sqlite3")
result = {}
cache = PersistentCache(place)
try:
    cache.put("here", 1)
except StoreError as error:
    result["error"] = str(error)
os.write(to_child[1], b"q")
os.waitpid(process, 0)
cache.put("here", 2)
result["found"] = [cache.get("here"), cache.get("long"), cache.get("stored 0")]
"""


def test_a_file_that_is_overwritten_while_others_have_it_open_is_not_touched(nursery, tmp_path):
    place = tmp_path / "store"
    copy = backup(place, "stored 0")
    done = nursery.run(OVERWRITTEN, place=place, copy=copy)
    assert "overwritten while other processes have it open" in done.result["error"]
    assert done.result["found"] == [2, None, "stored"]


# --- network file systems: a journal in place of a log -------------------------------------------

CRASH = """
process = os.fork()
if process == 0:
    import sqlite3
    other = sqlite3.connect(pathlib.Path(args["place"], "configs.sqlite3"), isolation_level=None)
    other.execute("PRAGMA cache_size = 1")
    other.execute("BEGIN IMMEDIATE")
    (state,) = other.execute("PRAGMA user_version").fetchone()
    other.execute(f"PRAGMA application_id = {state}")
    other.execute("PRAGMA user_version = 12345")
    other.execute("UPDATE ejkernel_entries SET config = ?", ['"' + "x" * 500 + '"'])
    os._exit(0)
result = os.waitpid(process, 0)[1]
"""


@pytest.mark.parametrize("replaced", [True, False])
def test_a_journal_that_was_left_over_is_moved_aside(nursery, tmp_path, monkeypatch, replaced):
    monkeypatch.setattr(backends, "on_network", lambda folder: True)
    place, other = tmp_path / "store", tmp_path / "other"
    for folder, value in ((place, 1), (other, 2)):
        cache = PersistentCache(folder)
        for i in range(60):
            cache.put(f"key {i}", value)
        cache.close()
    assert nursery.run(CRASH, place=place).result == 0
    assert (place / "configs.sqlite3-journal").stat().st_size > 10_000
    if replaced:
        os.replace(other / "configs.sqlite3", place / "configs.sqlite3")
    cache = PersistentCache(place)
    assert {cache.get(f"key {i}") for i in range(60)} == {2 if replaced else 1}
    cache.close()
    assert len(list(place.glob("*left-over*-journal"))) == replaced


# --- looking -------------------------------------------------------------------------------------


def test_doctor_says_so_and_changes_nothing(nursery, tmp_path, capsys):
    from ejkernel.cli import run

    place = tmp_path / "store"
    copy = backup(place, "stored 0")
    write(nursery, place, OLD)
    move_back(place, copy)
    before = files(place)
    assert run(["doctor", "--store", str(place)]) == 1
    assert "log of another file" in " ".join(capsys.readouterr().out.split())
    assert files(place) == before


def test_a_folder_that_may_not_be_written_is_not_read_through_a_foreign_log(
    nursery, tmp_path, monkeypatch
):
    place = tmp_path / "store"
    copy = backup(place, "stored 0")
    write(nursery, place, OLD)
    move_back(place, copy)

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ejkernel.store.backends.os.rename", refused)
    cache = PersistentCache(place)
    assert cache.get("old 1") is None
    with pytest.raises(StoreUnavailable, match="cannot be moved aside"):
        cache.put("new", 1)
    cache.close()
