"""Files that are no stores, and places that cannot be used: one warning, and work goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import sqlite3
import stat
import time

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import ConfigSelectorChain, Executor, Kernel, PersistentCache, Tuner
from ejkernel.store import StoreError, StoreUnavailable

NOBODY = 65534
KEYS = [("cpu", "op@v1", f"{i:016x}") for i in range(200)]

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def filled(folder):
    """The file of a store with enough in it to have inner pages."""
    cache = PersistentCache(folder)
    for key in KEYS:
        cache.put(key, {"text": "x" * 300}, about={"trials": [{"config": 1, "verdict": "wrong"}]})
    cache.close()
    return folder / "configs.sqlite3"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("pristine")).read_bytes()


@pytest.fixture
def file(tmp_path, pristine):
    (tmp_path / "store").mkdir()
    path = tmp_path / "store" / "configs.sqlite3"
    path.write_bytes(pristine)
    return path


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- files that are no stores --------------------------------------------------------------------


def zero_bytes(whole):
    return b""


def one_byte(whole):
    return whole[:1]


def cut_in_the_header(whole):
    return whole[:60]


def cut_to_one_page(whole):
    return whole[:4096]


def cut_in_half(whole):
    return whole[: len(whole) // 2]


def last_page_missing(whole):
    return whole[:-4096]


def garbage(whole):
    return bytes(range(256)) * 64


def text(whole):
    return b"hello, world\n"


def zeros(whole):
    return bytes(len(whole))


def garbage_after_the_first_page(whole):
    return whole[:4096] + b"\xa5" * (len(whole) - 4096)


def an_empty_database(whole):
    return in_memory("CREATE TABLE x (y); DROP TABLE x")


def another_database(whole):
    return in_memory("CREATE TABLE users (name)")


def a_store_without_its_note(whole):
    return in_memory("DROP TABLE ejkernel_meta", whole)


def a_store_with_an_odd_note(whole):
    return in_memory("UPDATE ejkernel_meta SET value = 'one' WHERE name = 'schema'", whole)


def a_store_without_entries(whole):
    return in_memory("DROP TABLE ejkernel_entries", whole)


def in_memory(script, content=None):
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        if content is not None:
            # A database in memory has no log: say in its header that it needs none.
            connection.deserialize(content[:18] + b"\x01\x01" + content[20:])
        connection.executescript(script)
        return connection.serialize()


DAMAGES = [
    *(zero_bytes, one_byte, cut_in_the_header, cut_to_one_page, cut_in_half, last_page_missing),
    *(garbage, text, zeros, garbage_after_the_first_page),
    *(an_empty_database, another_database, a_store_without_its_note, a_store_with_an_odd_note),
    a_store_without_entries,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_kept_aside_and_work_goes_on(file, damage, caplog):
    bad = damage(file.read_bytes())
    file.write_bytes(bad)
    cache = PersistentCache(file.parent)
    assert [cache.get(key) for key in KEYS] == [None] * len(KEYS)
    assert cache.keys() == []
    cache.put(KEYS[0], 1)
    assert cache.get(KEYS[0]) == 1
    cache.close()

    (message,) = warnings_of(caplog)
    (aside,) = file.parent.glob("configs.sqlite3.damaged-*Z")
    assert str(aside) in message
    assert "damaged" in message
    assert aside.read_bytes() == bad
    others = {p.name for p in file.parent.iterdir() if not p.name.startswith(aside.name)}
    assert others == {"configs.sqlite3"}
    assert PersistentCache(file.parent).get(KEYS[0]) == 1


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_found_by_a_write_too(file, damage, caplog):
    bad = damage(file.read_bytes())
    file.write_bytes(bad)
    cache = PersistentCache(file.parent)
    cache.put(KEYS[0], 1)
    assert cache.get(KEYS[0]) == 1
    cache.close()
    if list(file.parent.glob("*.damaged-*")) == []:
        # It did not touch a damaged page, and may not have noticed. Whoever does, moves it.
        assert [PersistentCache(file.parent).get(key) for key in KEYS].count(None) > 0
    assert len(warnings_of(caplog)) == 1
    (aside,) = file.parent.glob("*.damaged-*Z")
    assert len(aside.read_bytes()) >= len(bad)


def test_a_log_of_a_damaged_file_goes_aside_with_it(file, caplog):
    log, shared = pathlib.Path(f"{file}-wal"), pathlib.Path(f"{file}-shm")
    file.write_bytes(b"garbage" * 1000)
    log.write_bytes(b"what is left of the log")
    shared.write_bytes(b"and of the memory")
    cache = PersistentCache(file.parent)
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[0], 2)
    cache.close()
    (aside,) = file.parent.glob("configs.sqlite3.damaged-*Z")
    assert aside.read_bytes() == b"garbage" * 1000
    stored = {
        p.name.removeprefix(aside.name): p.read_bytes() for p in file.parent.glob("*.damaged*")
    }
    assert stored["-wal"] == b"what is left of the log"
    assert len(warnings_of(caplog)) == 1


def test_damage_that_happens_while_the_store_is_open(file, caplog):
    first, second = PersistentCache(file.parent), PersistentCache(file.parent)
    assert first.get(KEYS[0]) is not None
    with open(file, "r+b") as stream:
        stream.write(b"\x00" * 8192)
    assert second.get(KEYS[0]) is None  # moves the file away
    second.put(KEYS[0], "second")
    assert first.get(KEYS[0]) == "second"
    first.put(KEYS[1], "first")
    first.close()
    assert second.get(KEYS[1]) == "first"
    second.close()
    assert len(list(file.parent.glob("*.damaged-*Z"))) == 1
    assert len(warnings_of(caplog)) == 1


def test_two_damages_are_two_files_and_two_warnings(file, caplog):
    cache = PersistentCache(file.parent)
    for _ in range(2):
        cache.close()
        file.write_bytes(b"garbage" * 1000)
        assert cache.get(KEYS[0]) is None
        cache.put(KEYS[0], 3)
        assert cache.get(KEYS[0]) == 3
    cache.close()
    assert len(list(file.parent.glob("*.damaged-*"))) == 2
    assert len(warnings_of(caplog)) == 2


def test_many_processes_that_find_the_damage_at_once_move_it_once(nursery, file):
    file.write_bytes(b"garbage" * 1000)
    code = """
    def child(number):
        process = os.fork()
        if process == 0:
            cache = PersistentCache(args["place"])
            while not os.path.exists(args["go"]):
                time.sleep(0.001)
            cache.get("x")
            cache.put(f"child {number}", number)
            os._exit(len(warnings))
        return process
    children = [child(number) for number in range(6)]
    pathlib.Path(args["go"]).touch()
    codes = [os.waitpid(process, 0)[1] >> 8 for process in children]
    cache = PersistentCache(args["place"])
    result = [codes, sorted(cache.get(f"child {n}") for n in range(6))]
    cache.close()
    """
    done = nursery.run(code, place=file.parent, go=file.parent.parent / "go")
    codes, found = done.result
    assert found == list(range(6))
    assert sum(codes) == 1
    assert len(list(file.parent.glob("*.damaged-*"))) == 1


def test_a_sound_store_is_not_moved_for_the_error_of_one_process(file, monkeypatch, caplog):
    from ejkernel.store import StoreDamaged, tables

    def fail_once(connection, key, original=tables.find_entry):
        monkeypatch.setattr(tables, "find_entry", original)
        raise StoreDamaged("a bit fell over in this process")

    monkeypatch.setattr(tables, "find_entry", fail_once)
    cache = PersistentCache(file.parent)
    assert cache.get(KEYS[0]) == {"text": "x" * 300}
    assert list(file.parent.glob("*.damaged-*")) == []
    assert warnings_of(caplog) == []


def test_a_write_into_a_file_that_was_moved_meanwhile_is_done_again(file, monkeypatch):
    from ejkernel.store import tables

    def move_then_put(*arguments, original=tables.put):
        monkeypatch.setattr(tables, "put", original)
        original(*arguments)
        file.rename(file.parent / "moved")

    monkeypatch.setattr(tables, "put", move_then_put)
    cache = PersistentCache(file.parent)
    cache.put(KEYS[0], "stored")
    cache.close()
    assert PersistentCache(file.parent).get(KEYS[0]) == "stored"


def test_triggers_and_views_of_a_file_run_nothing_of_ours(file):
    """A file may bring SQL of its own. It cannot call what SQLAlchemy adds to a connection."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript(
            "CREATE TRIGGER t AFTER INSERT ON ejkernel_entries BEGIN SELECT regexp('a', 'b'); END"
        )
    cache = PersistentCache(file.parent)
    with pytest.raises(StoreError, match="views or triggers"):
        cache.put("new", 1)
    assert cache.get(KEYS[0]) == {"text": "x" * 300}
    cache.close()


def test_nothing_is_unpickled_or_evaluated(file, monkeypatch):
    import builtins
    import pickle

    def forbidden(*_, **__):
        raise AssertionError("code from the store was run")

    payload = pickle.dumps({"__reduce__": "os.system"})
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE ejkernel_entries SET config = ?, about = ?", (payload, payload))
        connection.execute("UPDATE ejkernel_trials SET config = '__import__(\"os\")'")
        connection.commit()
    for module, name in ((pickle, "loads"), (pickle, "load"), (builtins, "eval")):
        monkeypatch.setattr(module, name, forbidden)
    cache = PersistentCache(file.parent)
    assert cache.get(KEYS[0]) is None
    assert cache.trials(KEYS[0]) == []
    assert cache.related(op_id="op@v1") == []
    monkeypatch.undo()
    sources = pathlib.Path(PersistentCache.__init__.__code__.co_filename).parents[2]
    for source in (sources / "store").glob("*.py"):
        assert "pickle" not in source.read_text()
    cache.close()


# --- places that cannot be used ------------------------------------------------------------------

USE = """
cache = PersistentCache(args["place"])
keys = [tuple(key) if isinstance(key, list) else key for key in args["keys"]]
found = [cache.get(key) for key in keys] + [len(cache), cache.get("absent")]
errors = []
for _ in range(3):
    try:
        cache.put("new", 1)
    except StoreError as error:
        errors.append([type(error).__name__, str(error)])
        cache.warn(error, f"could not be written: {error}")
result = {"found": found, "errors": errors, "new": cache.get("new")}
cache.close()
"""


def open_to_all(folder):
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


@root_only
def test_a_folder_that_may_not_be_written_is_read(nursery, anywhere):
    (anywhere / "store").mkdir(mode=0o755)  # shared before there was something in it
    filled(anywhere / "store")
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:2])
    assert done.result["found"] == [{"text": "x" * 300}] * 2 + [200, None]
    assert [kind for kind, _ in done.result["errors"]] == ["StoreReadOnly"] * 3
    assert len(done.warnings) == 1
    assert str(anywhere) in done.warnings[0]
    assert [p.name for p in (anywhere / "store").iterdir()] == ["configs.sqlite3"]


@root_only
def test_a_folder_that_may_not_be_written_is_read_while_another_process_uses_it(nursery, anywhere):
    (anywhere / "store").mkdir(mode=0o755)
    filled(anywhere / "store")
    writer = PersistentCache(anywhere / "store")
    writer.put("late", 5)  # is in the log, not yet in the file
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=[*KEYS[:1], "late"])
    writer.close()
    assert done.result["found"] == [{"text": "x" * 300}, 5, 201, None]
    assert len(done.warnings) == 1


@root_only
def test_a_file_that_may_not_be_written_is_read(nursery, anywhere):
    file = filled(anywhere / "store")
    file.chmod(0o444)
    os.chown(anywhere / "store", NOBODY, NOBODY)
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:2])
    assert done.result["found"] == [{"text": "x" * 300}] * 2 + [200, None]
    assert [kind for kind, _ in done.result["errors"]] == ["StoreReadOnly"] * 3
    assert len(done.warnings) == 1


@root_only
def test_a_file_that_may_not_be_read_is_left_alone(nursery, anywhere):
    file = filled(anywhere / "store")
    file.chmod(0)
    os.chown(anywhere / "store", NOBODY, NOBODY)
    before = file.stat().st_ino
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:2])
    assert done.result["found"] == [None, None, 0, None]
    assert [kind for kind, _ in done.result["errors"]] == ["StoreUnavailable"] * 3
    assert len(done.warnings) == 1
    assert str(file) in done.warnings[0]
    assert file.stat().st_ino == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@root_only
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_without_permission_is_as_good_as_none(nursery, anywhere, mode):
    filled(anywhere / "store")
    (anywhere / "store").chmod(mode)
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:2])
    assert done.result["found"] == [None, None, 0, None]
    assert [kind for kind, _ in done.result["errors"]] == ["StoreUnavailable"] * 3
    assert len(done.warnings) == 1


@root_only
def test_a_place_where_no_folder_can_be_made(nursery, anywhere):
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "a" / "b", keys=KEYS[:1])
    assert done.result["found"] == [None, 0, None]
    assert [kind for kind, _ in done.result["errors"]] == ["StoreUnavailable"] * 3
    assert "Permission denied" in done.result["errors"][0][1]
    assert len(done.warnings) == 1
    assert list(anywhere.iterdir()) == []


@root_only
def test_a_damaged_file_that_cannot_be_moved_is_said_once(nursery, anywhere):
    (anywhere / "store").mkdir(mode=0o755)
    file = filled(anywhere / "store")
    file.write_bytes(b"garbage" * 1000)
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:2])
    assert done.result["found"] == [None, None, 0, None]
    assert [kind for kind, _ in done.result["errors"]] == ["StoreUnavailable"] * 3
    (message,) = done.warnings
    assert "damaged" in message
    assert "cannot be moved aside" in message
    assert file.read_bytes() == b"garbage" * 1000


def test_a_disk_without_room_for_a_store(nursery, tmp_path):
    code = "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))\n" + USE
    done = nursery.run(code, place=tmp_path / "store", keys=KEYS[:1])
    assert done.result["found"] == [None, 0, None]
    assert [kind for kind, _ in done.result["errors"]] == ["StoreFull"] * 3
    assert len(done.warnings) == 1
    assert list((tmp_path / "store").iterdir()) == []


def test_a_disk_that_fills_up_keeps_what_was_acknowledged(nursery, tmp_path):
    code = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    cache, stored, errors = PersistentCache(args["place"]), [], []
    for number in range(200):
        try:
            cache.put(f"key {number}", ["x" * 2000, number])
            stored.append(number)
        except StoreError as error:
            errors.append(type(error).__name__)
            cache.warn(error, str(error))
    whole = all(cache.get(f"key {n}") == ["x" * 2000, n] for n in stored)
    length = len(cache)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    cache.put("later", 1)
    cache.close()
    result = [len(stored), length, sorted(set(errors)), len(errors), whole]
    """
    done = nursery.run(code, place=tmp_path / "store")
    stored, length, kinds, failures, whole = done.result
    assert kinds == ["StoreFull"]
    assert stored + failures == 200
    assert stored > 20
    assert length == stored
    assert whole
    assert len(done.warnings) == 1
    cache = PersistentCache(tmp_path / "store")
    assert (cache.get("later"), len(cache)) == (1, stored + 1)
    cache.close()
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["configs.sqlite3"]


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 1


class Plus(Kernel[Config, jax.Array]):
    def run(self, x, *, cfg):
        return x + 1


def test_a_program_with_an_unusable_store_tunes_and_warns_once(tmp_path, caplog):
    (tmp_path / "configs.sqlite3").mkdir()
    tuner = Tuner(warmup=0, iters=1, progress=False)
    executor = Executor(ConfigSelectorChain(tuner=tuner, persistent=tmp_path))
    assert [float(executor(Plus(), jnp.ones(n))[0]) for n in (1, 2, 3)] == [2.0, 2.0, 2.0]
    (message,) = warnings_of(caplog)
    assert str(tmp_path) in message
    assert [p.name for p in tmp_path.iterdir() if "sqlite" in p.name] == ["configs.sqlite3"]


# --- folders that others control -----------------------------------------------------------------


@root_only
@pytest.mark.parametrize("sticky", [0, stat.S_ISVTX])
def test_a_world_writable_folder_of_another_user_is_refused(nursery, anywhere, sticky):
    folder = anywhere / "store"
    filled(folder)
    open_to_all(folder)
    folder.chmod(0o777 | sticky)
    before = sorted(p.name for p in folder.iterdir())
    done = nursery.run(USE, uid=NOBODY, place=folder, keys=KEYS[:1])
    assert done.result["found"] == [None, 0, None]
    assert [kind for kind, _ in done.result["errors"]] == ["StoreRefused"] * 3
    (message,) = done.warnings
    assert "everyone may write in it" in message
    assert "belongs to root" in message
    assert "EJKERNEL_CACHE_DIR" in message
    assert sorted(p.name for p in folder.iterdir()) == before


@root_only
def test_a_new_folder_in_one_that_others_may_rearrange_is_refused(nursery, anywhere):
    os.chown(anywhere, 12345, 12345)
    for mode in (0o777, 0o777 | stat.S_ISVTX):  # the sticky bit does not bind the owner
        anywhere.chmod(mode)
        done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:1])
        assert [kind for kind, _ in done.result["errors"]] == ["StoreRefused"] * 3
        assert "replace what is in it" in done.warnings[0]
        assert list(anywhere.iterdir()) == []
    os.chown(anywhere, 0, 0)  # as in /tmp, where nobody can touch what is ours
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:1])
    assert done.result["errors"] == []
    assert done.result["new"] == 1
    assert stat.S_IMODE((anywhere / "store").stat().st_mode) == 0o700


@root_only
def test_a_link_made_by_another_user_is_refused(nursery, anywhere):
    (anywhere / "theirs").mkdir()
    os.chown(anywhere / "theirs", NOBODY, NOBODY)
    (anywhere / "link").symlink_to(anywhere / "theirs")
    os.lchown(anywhere / "link", 12345, 12345)
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "link", keys=KEYS[:1])
    assert [kind for kind, _ in done.result["errors"]] == ["StoreRefused"] * 3
    (message,) = done.warnings
    assert "a link made by another user (uid 12345)" in message
    assert list((anywhere / "theirs").iterdir()) == []


@root_only
def test_a_link_of_ones_own_to_a_folder_of_another_user_is_refused(nursery, anywhere):
    (anywhere / "theirs").mkdir()
    os.chown(anywhere / "theirs", 12345, 12345)
    (anywhere / "link").symlink_to(anywhere / "theirs")
    os.lchown(anywhere / "link", NOBODY, NOBODY)
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "link", keys=KEYS[:1])
    assert [kind for kind, _ in done.result["errors"]] == ["StoreRefused"] * 3
    assert "belongs to another user (uid 12345)" in done.warnings[0]


def test_a_link_of_ones_own_to_a_folder_of_ones_own_is_used(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    cache = PersistentCache(tmp_path / "link")
    cache.put("key", 1)
    assert cache.get("key") == 1
    cache.close()
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["configs.sqlite3"]


@root_only
def test_a_linked_file_of_another_user_is_refused(nursery, anywhere):
    file = filled(anywhere / "elsewhere")
    file.parent.chmod(0o755)
    (anywhere / "store").mkdir()
    (anywhere / "store" / file.name).symlink_to(file)
    os.lchown(anywhere / "store" / file.name, 12345, 12345)
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:1])
    assert [kind for kind, _ in done.result["errors"]] == ["StoreRefused"] * 3
    assert done.result["found"] == [None, 0, None]
    assert len(done.warnings) == 1


@root_only
def test_a_folder_of_a_colleague_that_is_shared_with_a_group_is_used(nursery, anywhere):
    filled(anywhere / "store")
    for path in (anywhere / "store", *(anywhere / "store").iterdir()):
        os.chown(path, 12345, NOBODY)
        path.chmod(0o770 if path.is_dir() else 0o660)
    done = nursery.run(USE, uid=NOBODY, place=anywhere / "store", keys=KEYS[:1])
    assert done.result["errors"] == []
    assert done.result["new"] == 1


# --- file systems without shared memory ----------------------------------------------------------


def test_on_a_network_file_system_the_store_uses_no_shared_memory(tmp_path, monkeypatch):
    from ejkernel.store import backends

    monkeypatch.setattr(backends, "on_network", lambda path: True)
    cache = PersistentCache(tmp_path)
    cache.put("key", 1)
    assert cache.get("key") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["configs.sqlite3"]
    with contextlib.closing(sqlite3.connect(tmp_path / "configs.sqlite3")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    cache.close()


def test_network_file_systems_are_told_by_their_mount(monkeypatch, tmp_path):
    from ejkernel.store import backends

    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:5 / /home rw,x shared:1 - nfs4 server:/home rw\n"
        "3 2 0:6 / /home/me/a\\040b rw - tmpfs none rw\n"
    )
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self, **_: mounts)
    assert backends.on_network(pathlib.Path("/home/me/.cache"))
    assert not backends.on_network(pathlib.Path("/homes"))
    assert not backends.on_network(pathlib.Path("/home/me/a b/c"))
    assert not backends.on_network(pathlib.Path("/"))


def test_a_file_system_without_locks_on_folders_works(tmp_path, monkeypatch):
    import errno
    import fcntl

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    cache = PersistentCache(tmp_path)
    cache.put("key", 1)
    assert cache.get("key") == 1
    cache.close()
    assert [p.name for p in tmp_path.iterdir()] == ["configs.sqlite3"]


def test_a_folder_that_stays_locked_is_given_up(tmp_path, monkeypatch, caplog):
    import fcntl

    from ejkernel.store import sqlite_file

    PersistentCache(tmp_path).put("key", 1)
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        cache = PersistentCache(tmp_path)
        assert cache.get("key") is None
        with pytest.raises(StoreError, match="locked by others"):
            cache.put("key", 2)
    finally:
        os.close(descriptor)
    assert len(warnings_of(caplog)) == 1
    assert cache.get("key") == 1


@pytest.mark.parametrize("way", ["folder", "file"])
def test_a_store_that_stays_locked_is_waited_for_once(tmp_path, monkeypatch, way):
    """A program has many calls, and each of them looks into the store while it is traced."""
    import fcntl

    from ejkernel.store import sqlite_file

    PersistentCache(tmp_path).put("key", 1)
    monkeypatch.setattr(sqlite_file, "PATIENCE", 1.0)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    other = sqlite3.connect(tmp_path / "configs.sqlite3", isolation_level=None)
    if way == "folder":
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    else:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("CREATE TABLE another (one)")
    cache = PersistentCache(tmp_path)
    try:
        began = time.monotonic()
        assert cache.get("key") is None
        assert time.monotonic() - began > 0.9  # others may be at work
        began = time.monotonic()
        assert [cache.get("key") for _ in range(2)] == [None] * 2
        assert time.monotonic() - began < 0.9
    finally:
        os.close(descriptor)
        other.close()
    assert cache.get("key") == 1
    assert cache.get("key") == 1


def test_store_errors_are_what_callers_of_files_expect():
    assert issubclass(StoreUnavailable, OSError)
