"""Many processes at once, processes that die, processes that fork."""

from __future__ import annotations

import contextlib
import sqlite3
import threading

import pytest

from ejkernel.ops import PersistentCache

WRITERS_AND_READERS = """
def child(work):
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(3 if warnings else 0)

def writer(number):
    cache = PersistentCache(args["place"])
    for i in range(args["writes"]):
        config = FwdParams(q_blocksize=number * 1000 + i)
        about = {"trials": [{"config": j, "verdict": "measured"} for j in range(2)]}
        cache.put("cpu", f"op{number}@v1", str(i), config, about=about)
        assert cache.get("cpu", f"op{number}@v1", str(i)).q_blocksize == number * 1000 + i

def reader():
    cache, seen = PersistentCache(args["place"]), 0
    while not os.path.exists(args["stop"]):
        keys = cache.keys()
        assert len(keys) >= seen, (len(keys), seen)  # nothing that was there goes away
        seen = len(keys)
        for key in random.sample(keys, min(5, len(keys))):
            number = int(key.op_id[2:-3])
            assert cache.get(key).q_blocksize == number * 1000 + int(key.call_key)
            assert len(cache.trials(key)) == 2
        time.sleep(0.02)

writers = [child(lambda n=n: writer(n)) for n in range(args["writers"])]
readers = [child(reader) for _ in range(2)]
codes = [os.waitpid(w, 0)[1] for w in writers]
pathlib.Path(args["stop"]).touch()
codes += [os.waitpid(r, 0)[1] for r in readers]
cache = PersistentCache(args["place"])
found = sum(
    cache.get("cpu", f"op{n}@v1", str(i)) == FwdParams(q_blocksize=n * 1000 + i)
    for n in range(args["writers"]) for i in range(args["writes"])
)
result = {"codes": codes, "found": found, "length": len(cache)}
cache.close()
"""


def test_eight_processes_times_two_hundred_writes_lose_nothing(nursery, tmp_path):
    place, stop = tmp_path / "store", tmp_path / "stop"
    done = nursery.run(WRITERS_AND_READERS, place=place, stop=stop, writers=8, writes=200)
    assert done.result == {"codes": [0] * 10, "found": 1600, "length": 1600}
    assert done.warnings == []
    assert [path.name for path in place.iterdir()] == ["configs.sqlite3"]


def test_four_processes_write_to_one_server(nursery, server, tmp_path):
    place, stop = server.new_url(), tmp_path / "stop"
    done = nursery.run(WRITERS_AND_READERS, place=place, stop=stop, writers=4, writes=50)
    assert done.result == {"codes": [0] * 6, "found": 200, "length": 200}
    assert done.warnings == []


FIRST_WRITES = """
import traceback
result = []
for place in args["places"]:
    children = []
    for number in range(4):
        process = os.fork()
        if process == 0:
            try:
                cache = PersistentCache(place)
                if number % 2:
                    cache.get("x")
                cache.put(f"child {number}", number)
                os._exit(3 if warnings else 0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(process)
    codes = [os.waitpid(child, 0)[1] for child in children]
    cache = PersistentCache(place)
    result.append([codes, [cache.get(f"child {number}") for number in range(4)]])
    cache.close()
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_processes_that_make_the_same_store_at_once_share_it(nursery, tmp_path, kind, request):
    if kind == "sqlite":
        places = [tmp_path / str(number) for number in range(12)]
    else:
        places = [request.getfixturevalue("server").new_url() for _ in range(8)]
    done = nursery.run(FIRST_WRITES, places=[str(place) for place in places])
    assert done.result == [[[0] * 4, [0, 1, 2, 3]]] * len(places)
    assert done.warnings == []


KILL = """
acknowledged = []
for round in range(args["kills"]):
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        cache, number = PersistentCache(args["place"]), 0
        while True:
            seconds = float(number)
            trials = [{"config": j, "verdict": "measured", "seconds": seconds} for j in range(3)]
            about = {"trials": trials, "source": str(number)}  # another source replaces the trials
            cache.put("cpu", f"op{round}@v1", str(number // 2), number, about=about)
            os.write(writing, f"{round} {number} ".encode())
            number += 1
    os.close(writing)
    # Every other one while it opens the store, the others while they write.
    words = os.read(reading, 100) if round % 2 else b""
    time.sleep(random.uniform(0, 0.05))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with os.fdopen(reading, "rb") as stream:
        words = (words + stream.read()).split()
    acknowledged += list(zip(map(int, words[::2]), map(int, words[1::2])))
result = acknowledged
"""


def test_no_acknowledged_entry_is_lost_when_processes_are_killed(nursery, tmp_path):
    place = tmp_path / "store"
    done = nursery.run(KILL, place=place, kills=50)
    acknowledged = {}
    for round_, number in done.result:
        acknowledged[round_, number // 2] = number
    assert len({round_ for round_, _ in acknowledged}) >= 25

    cache = PersistentCache(place)
    for (round_, call), number in acknowledged.items():
        key = ("cpu", f"op{round_}@v1", str(call))
        # The last write of a process may have been done without being acknowledged any more.
        assert cache.get(key) in (number, number + 1)
        assert [t["seconds"] for t in cache.trials(key)] == [float(cache.get(key))] * 3
    unacknowledged = len(cache) - len(acknowledged)
    assert 0 <= unacknowledged <= 50
    cache.close()

    with contextlib.closing(sqlite3.connect(place / "configs.sqlite3")) as connection:

        def ask(question):
            return connection.execute(question).fetchall()

        assert ask("PRAGMA integrity_check") == [("ok",)]
        assert ask("PRAGMA foreign_key_check") == []
        orphans = "SELECT count(*) FROM ejkernel_trials WHERE entry_id NOT IN (SELECT id FROM %s)"
        assert ask(orphans % "ejkernel_entries") == [(0,)]
        entries = ask("SELECT count(*) FROM ejkernel_entries")[0][0]
        assert ask("SELECT count(*) FROM ejkernel_trials") == [(3 * entries,)]
    assert [path.name for path in place.iterdir()] == ["configs.sqlite3"]


def test_a_process_killed_while_it_makes_the_store_leaves_nothing_in_the_way(nursery, tmp_path):
    code = """
    process = os.fork()
    if process == 0:
        import ejkernel.store.backends as backends
        make = backends.create_or_migrate
        def die(connection):
            make(connection)
            os.kill(os.getpid(), signal.SIGKILL)
        backends.create_or_migrate = die
        PersistentCache(args["place"]).put("key", 1)
    os.waitpid(process, 0)
    left = sorted(os.listdir(args["place"]))
    cache = PersistentCache(args["place"])
    before = cache.get("key")
    cache.put("key", 2)
    cache.close()
    result = [left, before, cache.get("key")]
    cache.close()
    """
    place = tmp_path / "store"
    done = nursery.run(code, place=place)
    left, before, after = done.result
    assert left
    assert all(".new-" in name for name in left)
    assert (before, after) == (None, 2)
    assert done.warnings == []
    assert [path.name for path in place.iterdir()] == ["configs.sqlite3"]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_process_that_forks_and_its_children_share_nothing_open(nursery, tmp_path, kind, request):
    code = """
    cache = PersistentCache(args["place"])
    cache.put("parent", 0)
    children = []
    for number in range(4):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                inherited = [os.path.realpath(f"/proc/self/fd/{n}") for n in range(100)]
                assert not any("configs.sqlite3" in file for file in inherited)
                assert cache.get("parent") is not None
                for i in range(20):
                    cache.put(f"child {number} {i}", i)
                cache.close()
                code = 3 if warnings else 0
            finally:
                os._exit(code)
        children.append(process)
        cache.put("parent", number)
        assert cache.get("parent") == number
    codes = [os.waitpid(child, 0)[1] for child in children]
    result = [codes, len(cache), cache.get("parent")]
    cache.close()
    """
    place = tmp_path if kind == "sqlite" else request.getfixturevalue("server").new_url()
    done = nursery.run(code, place=place)
    assert done.result == [[0] * 4, 81, 3]
    assert done.warnings == []


def test_a_fork_waits_for_the_threads_that_write(nursery, tmp_path):
    code = """
    import threading
    cache, over = PersistentCache(args["place"]), threading.Event()
    count = 0

    def write():
        global count
        while not over.is_set():
            cache.put("thread", count)
            count += 1

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    codes = []
    for number in range(10):
        process = os.fork()
        if process == 0:
            signal.alarm(20)  # a lock that another thread of the parent held would hang here
            cache.put(f"child {number}", number)
            os._exit(0 if cache.get(f"child {number}") == number else 1)
        codes.append(os.waitpid(process, 0)[1])
    over.set()
    for thread in threads:
        thread.join()
    result = [codes, len(cache), count > 10]
    cache.close()
    """
    done = nursery.run(code, place=tmp_path / "store")
    assert done.result == [[0] * 10, 11, True]
    assert done.warnings == []


def test_a_store_that_was_removed_while_open_is_made_again(tmp_path):
    cache = PersistentCache(tmp_path / "store")
    cache.put("key", 1)
    for path in cache.path.iterdir():
        path.unlink()
    assert cache.get("key") is None
    cache.put("key", 2)
    assert PersistentCache(tmp_path / "store").get("key") == 2


def test_a_store_whose_file_was_replaced_is_read_anew(tmp_path):
    old, new = PersistentCache(tmp_path / "old"), PersistentCache(tmp_path / "new")
    old.put("key", "old")
    new.put("key", "new")
    new.close()
    assert old.get("key") == "old"
    (tmp_path / "new" / "configs.sqlite3").replace(tmp_path / "old" / "configs.sqlite3")
    for left in ("-wal", "-shm"):
        (tmp_path / "old" / f"configs.sqlite3{left}").unlink(missing_ok=True)
    assert old.get("key") == "new"
    old.put("key", "newer")
    assert PersistentCache(tmp_path / "old").get("key") == "newer"


def test_reading_goes_on_while_another_process_writes(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put("key", 1)
    with contextlib.closing(sqlite3.connect(tmp_path / "configs.sqlite3")) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("DELETE FROM ejkernel_entries")
        assert cache.get("key") == 1
        other.rollback()


def test_a_lock_that_is_released_in_time_is_waited_for(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put("key", 1)
    other = sqlite3.connect(tmp_path / "configs.sqlite3", check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.rollback)
    release.start()
    cache.put("key", 2)
    release.join()
    other.close()
    assert cache.get("key") == 2


def test_two_objects_of_one_process_do_not_take_each_other_the_locks(nursery, tmp_path):
    """Closing any descriptor of a file ends all locks that the process has on it."""
    first = PersistentCache(tmp_path)
    first.put("a", 1)
    second = PersistentCache(tmp_path)
    assert second.get("a") == 1
    second.close()
    # If the first one had lost its lock, the last to leave would be this process, and it would
    # remove the log that the first one goes on writing.
    code = """
    cache = PersistentCache(args["place"])
    cache.put(args["key"], 2)
    cache.close()
    result = [cache.get(key) for key in "abcd"]
    cache.close()
    """
    assert nursery.run(code, place=tmp_path, key="b").result == [1, 2, None, None]
    first.put("c", 3)
    assert nursery.run(code, place=tmp_path, key="d").result == [1, 2, 3, 2]
    assert [first.get(key) for key in "abcd"] == [1, 2, 3, 2]
    assert (tmp_path / "configs.sqlite3-wal").exists()
    first.close()
