"""Section 5 of the contract: configs in memory, on disk, and laid over both for a while."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import enum
import gc
import json
import logging
import os
import pathlib
import sqlite3
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Kernel,
    PersistentCache,
    label,
    overlay_cache,
    policy_override,
)

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DEVICE, OP, CALL = "cpu|test", "matmul@v1", "0123456789abcdef"
KEY = (DEVICE, OP, CALL)


class Order(enum.Enum):
    ROWS = "rows"
    COLUMNS = "columns"


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    columns: int = 128


@dataclasses.dataclass(frozen=True)
class NestedConfig:
    tile: Tile
    order: Order = Order.ROWS
    steps: tuple[int, ...] = ()
    dtype: object = None
    backward: Tile | None = None


@dataclasses.dataclass(frozen=True)
class Factor:
    value: float = 1.0


class Scale(Kernel[Factor, jax.Array]):
    """Multiplies by its config: the output says which config ran."""

    def __init__(self):
        super().__init__(name="scale")
        self.traces = 0

    def run(self, x, *, cfg):
        self.traces += 1
        return x * cfg.value

    def heuristic_cfg(self, inv):
        return Factor(1.0)


@pytest.fixture
def kernel():
    return Scale()


@pytest.fixture
def x():
    return jnp.ones(4)


def heuristic_executor():
    return Executor(ConfigSelectorChain(ConfigCache(), autotune=False))


@pytest.fixture(params=["memory", "disk"])
def cache(request, tmp_path):
    return ConfigCache() if request.param == "memory" else PersistentCache(tmp_path / "store")


@pytest.fixture
def store(tmp_path):
    return PersistentCache(tmp_path / "store")


def files_of(store):
    return sorted(path for path in store.path.rglob("*") if path.is_file())


def change_row(store, key=KEY, **columns):
    """Write into the row of an entry what no store would write."""
    changes = ", ".join(f'"{name}" = ?' for name in columns)
    where = "device = ? AND op_id = ? AND call_key = ?"
    with contextlib.closing(sqlite3.connect(store.path / "configs.sqlite3")) as connection:
        changed = connection.execute(
            f"UPDATE ejkernel_entries SET {changes} WHERE {where}", (*columns.values(), *key)
        ).rowcount
        connection.commit()
    assert changed == 1


def run_python(code, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


# --- both caches: one interface ------------------------------------------------------------------


def test_a_config_is_found_under_the_key_it_was_put(cache):
    cache.put(KEY, Tile(8))
    assert cache.get(KEY) == Tile(8)


def test_a_config_is_found_under_its_three_parts(cache):
    cache.put(DEVICE, OP, CALL, Tile(8))
    assert cache.get(DEVICE, OP, CALL) == Tile(8)


def test_both_forms_of_a_key_are_the_same_key(cache):
    cache.put(DEVICE, OP, CALL, Tile(8))
    assert cache.get(KEY) == Tile(8)
    assert KEY in cache
    cache.put(KEY, Tile(9))
    assert cache.get(DEVICE, OP, CALL) == Tile(9)
    assert len(cache) == 1


def test_an_absent_key_gives_none(cache):
    assert cache.get(KEY) is None
    assert cache.get(DEVICE, OP, CALL) is None
    assert KEY not in cache


def test_each_part_of_the_key_matters(cache):
    cache.put(KEY, Tile(8))
    assert cache.get("gpu|other", OP, CALL) is None
    assert cache.get(DEVICE, "matmul@v2", CALL) is None
    assert cache.get(DEVICE, OP, "f" * 16) is None


def test_len_keys_and_iteration_agree(cache):
    keys = {(DEVICE, OP, f"{i:016x}") for i in range(5)}
    for key in keys:
        cache.put(key, Tile(1))
    assert len(cache) == 5
    assert set(cache.keys()) == keys
    assert set(cache) == keys


def test_the_last_put_wins(cache):
    cache.put(KEY, Tile(1))
    cache.put(KEY, Tile(2))
    assert cache.get(KEY) == Tile(2)
    assert len(cache) == 1


def test_clear_forgets_everything_and_the_cache_still_works(cache):
    cache.put(KEY, Tile(1))
    cache.clear()
    assert len(cache) == 0
    assert list(cache.keys()) == []
    assert cache.get(KEY) is None
    cache.put(KEY, Tile(2))
    assert cache.get(KEY) == Tile(2)


def test_keys_is_a_snapshot(cache):
    cache.put(KEY, Tile(1))
    keys = cache.keys()
    cache.clear()
    assert list(keys) == [KEY]


def test_a_plain_string_is_a_key_too(cache):
    cache.put("my own key", Tile(3))
    assert cache.get("my own key") == Tile(3)
    assert "my own key" in cache


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), (1, 2, 3, 4, 5)])
def test_put_with_a_wrong_number_of_arguments_is_a_type_error(cache, arguments):
    with pytest.raises(TypeError, match="put"):
        cache.put(*arguments)


@pytest.mark.parametrize("arguments", [(), (1, 2), (1, 2, 3, 4)])
def test_get_with_a_wrong_number_of_arguments_is_a_type_error(cache, arguments):
    with pytest.raises(TypeError, match="get"):
        cache.get(*arguments)


def test_many_threads_put_get_and_list_at_once(cache):
    count, each = 8, 20
    start = threading.Barrier(count)

    def work(number):
        start.wait()
        for i in range(each):
            cache.put(DEVICE, f"op{number}@v1", f"{i:016x}", Tile(number, i))
            assert cache.get(DEVICE, f"op{number}@v1", f"{i:016x}") == Tile(number, i)
            if i % 5 == 0:
                cache.keys()
                len(cache)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result()
    assert len(cache) == count * each
    assert all(
        cache.get(DEVICE, f"op{number}@v1", f"{i:016x}") == Tile(number, i)
        for number in range(count)
        for i in range(each)
    )


def test_threads_that_clear_while_others_read_break_nothing(cache):
    stop = threading.Event()

    def write():
        while not stop.is_set():
            cache.put(KEY, Tile(1))
            cache.clear()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            assert cache.get(KEY) in (None, Tile(1))
            assert list(cache.keys()) in ([], [KEY])
    finally:
        stop.set()
        writer.join()


# --- memory, and functions that were jitted with its configs -------------------------------------


def test_changing_an_entry_that_a_kernel_call_used_makes_it_select_again(kernel, x):
    executor = heuristic_executor()
    cache, key = executor.selector.cache, kernel.bind(x).key
    cache.put(key, Factor(2.0))
    assert executor(kernel, x)[0] == 2
    cache.put(key, Factor(3.0))
    assert executor(kernel, x)[0] == 3


def test_changing_an_entry_makes_the_users_own_jitted_function_select_again(kernel, x):
    executor = heuristic_executor()
    cache, key = executor.selector.cache, kernel.bind(x).key
    cache.put(key, Factor(2.0))
    outer = jax.jit(lambda x: executor(kernel, x) + 1)
    assert outer(x)[0] == 3
    cache.put(key, Factor(5.0))
    assert outer(x)[0] == 6


def test_clearing_the_cache_makes_jitted_functions_select_again(kernel, x):
    executor = heuristic_executor()
    cache = executor.selector.cache
    cache.put(kernel.bind(x).key, Factor(2.0))
    outer = jax.jit(lambda x: executor(kernel, x))
    assert outer(x)[0] == 2
    cache.clear()
    assert outer(x)[0] == 1
    assert executor(kernel, x)[0] == 1


def test_putting_the_same_config_again_does_not_retrace(kernel, x):
    executor = heuristic_executor()
    cache, key = executor.selector.cache, kernel.bind(x).key
    cache.put(key, Factor(2.0))
    executor(kernel, x)
    before = kernel.traces
    cache.put(key, Factor(2.0))
    assert executor(kernel, x)[0] == 2
    assert kernel.traces == before


def test_an_entry_that_nobody_used_may_change_without_a_retrace(kernel, x):
    executor = heuristic_executor()
    cache = executor.selector.cache
    cache.put(kernel.bind(x).key, Factor(2.0))
    executor(kernel, x)
    before = kernel.traces
    cache.put(DEVICE, "another@v1", CALL, Factor(7.0))
    cache.put(DEVICE, "another@v1", CALL, Factor(8.0))
    assert executor(kernel, x)[0] == 2
    assert kernel.traces == before


def test_a_config_put_after_a_heuristic_call_is_used_by_the_next_call(kernel, x):
    executor = heuristic_executor()
    outer = jax.jit(lambda x: executor(kernel, x))
    assert executor(kernel, x)[0] == 1
    assert outer(x)[0] == 1
    executor.selector.cache.put(kernel.bind(x).key, Factor(4.0))
    assert executor(kernel, x)[0] == 4
    assert outer(x)[0] == 4


def test_a_config_put_after_tuning_and_clearing_is_used_by_the_next_call(kernel, x):
    executor = Executor(ConfigSelectorChain(ConfigCache()))
    cache, key = executor.selector.cache, kernel.bind(x).key
    assert executor(kernel, x)[0] == 1  # tuned: the heuristic is its only candidate
    cache.clear()
    assert executor(kernel, x)[0] == 1
    cache.put(key, Factor(6.0))
    assert executor(kernel, x)[0] == 6


def test_changing_an_entry_in_one_thread_reaches_functions_of_another(kernel, x):
    executor = heuristic_executor()
    cache, key = executor.selector.cache, kernel.bind(x).key
    cache.put(key, Factor(2.0))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: float(executor(kernel, x)[0])).result() == 2
        cache.put(key, Factor(3.0))
        assert pool.submit(lambda: float(executor(kernel, x)[0])).result() == 3


# --- disk: where ---------------------------------------------------------------------------------


def test_the_default_path_follows_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "elsewhere"))
    store = PersistentCache()
    store.put(KEY, Tile(1))
    assert store.path == tmp_path / "elsewhere" / "configs"
    assert files_of(store)


def test_without_the_variable_the_default_path_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PersistentCache().path == tmp_path / ".cache" / "ejkernel" / "configs"


def test_a_tilde_in_the_path_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    store = PersistentCache("~/my-configs")
    store.put(KEY, Tile(1))
    assert (tmp_path / "my-configs").is_dir()
    assert store.get(KEY) == Tile(1)


def test_nothing_is_on_disk_before_the_first_write(tmp_path):
    store = PersistentCache(tmp_path / "a" / "b")
    assert store.get(KEY) is None
    assert KEY not in store
    assert list(store.keys()) == []
    assert len(store) == 0
    store.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_is_refused_with_the_path_in_the_message(tmp_path):
    file = tmp_path / "configs"
    file.write_text("not a folder")
    with pytest.raises(OSError, match="configs"):
        PersistentCache(file).put(KEY, Tile(1))
    assert file.read_text() == "not a folder"


def test_the_default_executor_works_when_its_store_path_is_a_file(
    tmp_path, monkeypatch, kernel, x, caplog
):
    (tmp_path / "configs").write_text("not a folder")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert kernel(x)[0] == 1
    assert any("configs" in record.getMessage() for record in caplog.records)


def test_no_temporary_files_are_left_behind(store):
    for i in range(10):
        store.put(DEVICE, OP, f"{i % 3:016x}", Tile(i))
    store.close()
    assert [path.name for path in files_of(store)] == ["configs.sqlite3"]


def test_a_write_that_fails_leaves_the_old_entry(store, monkeypatch):
    store.put(KEY, Tile(1))
    monkeypatch.setattr("ejkernel.store.sqlite_file.PATIENCE", 0.2)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path / "configs.sqlite3")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OSError, match="locked"):
            store.put(KEY, Tile(2))
        assert store.get(KEY) == Tile(1)
        other.rollback()
    store.put(KEY, Tile(2))
    assert store.get(KEY) == Tile(2)


def test_a_config_that_cannot_be_written_is_a_type_error_and_leaves_nothing(store):
    with pytest.raises(TypeError, match="JSON"):
        store.put(KEY, object())
    assert store.get(KEY) is None
    assert not store.path.exists()


# --- disk: the process is over -------------------------------------------------------------------


def test_configs_survive_the_process(tmp_path):
    code = """
import sys
from ejkernel.ops import FwdParams, PersistentCache
cache = PersistentCache(sys.argv[1])
cache.put("cpu|test", "matmul@v1", "0123456789abcdef", FwdParams(q_blocksize=64))
"""
    output_of(run_python(code, tmp_path / "store"))
    config = PersistentCache(tmp_path / "store").get(KEY)
    assert config.q_blocksize == 64
    assert type(config).__name__ == "FwdParams"


def test_a_second_object_on_the_same_path_sees_what_the_first_wrote(store):
    other = PersistentCache(store.path)
    store.put(KEY, Tile(5))
    assert other.get(KEY) == Tile(5)
    other.clear()
    assert store.get(KEY) is None


def test_four_processes_that_write_at_once_lose_nothing(tmp_path):
    code = """
import sys
from ejkernel.ops import FwdParams, PersistentCache
cache = PersistentCache(sys.argv[1])
number = int(sys.argv[2])
for i in range(50):
    cache.put("cpu|test", f"op{number}@v1", f"{i:016x}", FwdParams(q_blocksize=100 * number + i))
    cache.put("cpu|test", "shared@v1", "0" * 16, FwdParams(q_blocksize=100 * number + i))
"""
    processes = [run_python(code, tmp_path / "store", number) for number in range(4)]
    for process in processes:
        output_of(process)
    store = PersistentCache(tmp_path / "store")
    assert len(store) == 4 * 50 + 1
    for number in range(4):
        for i in range(50):
            config = store.get("cpu|test", f"op{number}@v1", f"{i:016x}")
            assert config.q_blocksize == 100 * number + i
    assert store.get("cpu|test", "shared@v1", "0" * 16).q_blocksize % 100 == 49


# --- disk: what is there is not what we wrote ----------------------------------------------------


DAMAGES = {
    "no config": {"config": ""},
    "config cut short": {"config": '{"rows": 1, "col'},
    "config is not JSON": {"config": "hello"},
    "config is not text": {"config": b"\xff\xfe\x00\x80"},
    "config is a list": {"config": "[1, 2, 3]"},
    "config is null": {"config": "null"},
    "config is too deep": {"config": "[" * 100_000},
    "config of another class": {"config": '{"colour": "red"}'},
    "type name is not text": {"config_type": b"7"},
    "about is not JSON": {"about": "{"},
    "about is a list": {"about": "[1]"},
    "versions are a number": {"versions": "7"},
    "time is not a number": {"seconds": "fast"},
    "date is not text": {"when": b"\x00"},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_costs_one_warning_and_that_entry_only(store, damage, caplog):
    store.put(KEY, Tile(1))
    store.put(DEVICE, OP, "f" * 16, Tile(2))
    change_row(store, **damage)
    with caplog.at_level(logging.WARNING):
        assert store.get(KEY) is None
        assert store.get(KEY) is None
        assert store.get(DEVICE, OP, "f" * 16) == Tile(2)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].name.startswith("ejkernel")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_breaks_neither_listing_nor_clearing(store, damage):
    store.put(KEY, Tile(1))
    store.put(DEVICE, OP, "f" * 16, Tile(2))
    change_row(store, **damage)
    assert (DEVICE, OP, "f" * 16) in set(store.keys())
    store.clear()
    assert store.get(DEVICE, OP, "f" * 16) is None
    assert len(store) == 0


@pytest.mark.parametrize("part", ["device", "op_id", "call_key"])
@pytest.mark.parametrize("value", [7, b"\xff\xfe", "", "\\x"])
def test_an_entry_with_a_strange_key_does_not_break_the_listing(store, part, value):
    store.put(KEY, Tile(1))
    store.put(DEVICE, OP, "f" * 16, Tile(2))
    change_row(store, **{part: value})
    assert (DEVICE, OP, "f" * 16) in list(store.keys())
    assert store.get(DEVICE, OP, "f" * 16) == Tile(2)
    assert store.get(KEY) is None


def test_len_counts_what_keys_lists_also_beside_a_damaged_entry(store):
    store.put(KEY, Tile(1))
    store.put(DEVICE, OP, "f" * 16, Tile(2))
    change_row(store, config="{")
    assert len(store) == len(list(store.keys())) == 2


def test_a_damaged_entry_can_be_written_again(store):
    store.put(KEY, Tile(1))
    change_row(store, config="hello")
    assert store.get(KEY) is None
    store.put(KEY, Tile(4))
    assert store.get(KEY) == Tile(4)


def test_files_that_are_not_ours_are_ignored_and_left_alone(store):
    store.put(KEY, Tile(1))
    stranger = store.path / "README.txt"
    stranger.write_text("hello")
    assert list(store.keys()) == [KEY]
    assert len(store) == 1
    store.clear()
    assert stranger.read_text() == "hello"


# --- disk: classes -------------------------------------------------------------------------------


def test_nested_config_classes_are_rebuilt(store):
    config = NestedConfig(
        tile=Tile(8, 16),
        order=Order.COLUMNS,
        steps=(1, 2, 3),
        dtype=jnp.dtype("bfloat16"),
        backward=Tile(4),
    )
    store.put(KEY, config)
    read = PersistentCache(store.path).get(KEY)
    assert read == config
    assert type(read.tile) is Tile
    assert type(read.backward) is Tile
    assert read.order is Order.COLUMNS
    assert type(read.steps) is tuple


def test_a_config_class_of_a_function_is_rebuilt_in_the_same_process(store):
    @dataclasses.dataclass(frozen=True)
    class Local:
        size: int

    store.put(KEY, Local(3))
    assert store.get(KEY) == Local(3)


@pytest.mark.parametrize("config", [{"block": 64}, 7, "fast", [1, 2], 1.5, True])
def test_plain_data_is_read_back_as_it_was(store, config):
    store.put(KEY, config)
    assert PersistentCache(store.path).get(KEY) == config


def test_a_class_that_is_not_loaded_gives_plain_data_and_is_not_imported(
    store, tmp_path, monkeypatch
):
    module = tmp_path / "ejkernel_test_trap.py"
    module.write_text(
        "import dataclasses, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
        "@dataclasses.dataclass(frozen=True)\nclass Trap:\n    rows: int = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    store.put(KEY, Tile(1))
    change_row(store, config_type="ejkernel_test_trap:Trap", config='{"rows": 8}')
    assert store.get(KEY) == {"rows": 8}
    assert list(store.keys()) == [KEY]
    assert "ejkernel_test_trap" not in sys.modules
    assert not (tmp_path / "imported").exists()


def test_a_nested_class_that_is_not_loaded_is_not_imported(store, tmp_path, monkeypatch):
    (tmp_path / "ejkernel_test_trap2.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    store.put(KEY, Tile(1))
    inner = '{"inner": {"$type": "ejkernel_test_trap2:Trap", "rows": 8}}'
    change_row(store, config_type="builtins:dict", config=inner)
    config = store.get(KEY)
    assert "ejkernel_test_trap2" not in sys.modules
    assert config is None or config["inner"]["rows"] == 8


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "subprocess:Popen", "", ":", "a"])
def test_a_type_name_that_is_no_config_class_does_no_harm(store, name):
    store.put(KEY, Tile(1))
    harmful = {"args": f"touch {store.path}/harm"}
    change_row(store, config_type=name, config=json.dumps(harmful))
    config = store.get(KEY)
    assert config is None or config == harmful
    assert not (store.path / "harm").exists()


# --- overlays: keys ------------------------------------------------------------------------------


def overlay_keys(kernel, x):
    key = kernel.bind(x).key
    return {
        "full key": key,
        "plain tuple": tuple(key),
        "label": label(key.op_id, key.call_key),
        "label with another prefix": label(key.op_id, key.call_key, prefix="mine#"),
        "operation and version": "scale@v1",
        "operation": "scale",
    }


@pytest.mark.parametrize("form", list(overlay_keys(Scale(), jnp.ones(4))))
def test_an_overlay_accepts_every_form_of_key(kernel, x, form):
    assert kernel(x)[0] == 1
    with overlay_cache({overlay_keys(kernel, x)[form]: Factor(3.0)}):
        assert kernel(x)[0] == 3
    assert kernel(x)[0] == 1


def test_an_overlay_may_be_a_config_cache(kernel, x):
    cache = ConfigCache()
    cache.put(kernel.bind(x).key, Factor(4.0))
    with overlay_cache(cache):
        assert kernel(x)[0] == 4
    assert kernel(x)[0] == 1


def test_within_an_overlay_the_exact_call_comes_before_the_operation(kernel, x):
    entries = {"scale": Factor(2.0), "scale@v1": Factor(3.0), kernel.bind(x).key: Factor(4.0)}
    with overlay_cache(entries):
        assert kernel(x)[0] == 4
        assert kernel(jnp.ones(5))[0] == 3


def test_an_overlay_for_another_call_or_operation_is_not_used(kernel, x):
    other = kernel.bind(jnp.ones(7)).key
    with overlay_cache({other: Factor(9.0), "scal": Factor(8.0), "scale@v2": Factor(7.0)}):
        assert kernel(x)[0] == 1


@pytest.mark.parametrize("source", [None, 7, [("scale", Factor(2.0))], "scale"])
def test_an_overlay_of_something_else_is_a_type_error(source):
    with pytest.raises(TypeError, match="overlay_cache"), overlay_cache(source):
        pass


def test_an_overlay_with_a_config_of_another_class_is_a_clear_type_error(kernel, x):
    with (
        overlay_cache({"scale": Tile(1)}),
        pytest.raises(TypeError, match=r"scale@v1.*overlay.*Factor"),
    ):
        kernel(x)
    assert kernel(x)[0] == 1


# --- overlays: which wins ------------------------------------------------------------------------


def test_the_innermost_overlay_wins(kernel, x):
    with overlay_cache({"scale": Factor(2.0)}):
        with overlay_cache({"scale": Factor(3.0)}):
            assert kernel(x)[0] == 3
        assert kernel(x)[0] == 2
    assert kernel(x)[0] == 1


def test_the_innermost_overlay_wins_also_with_a_less_exact_key(kernel, x):
    with overlay_cache({kernel.bind(x).key: Factor(2.0)}), overlay_cache({"scale": Factor(3.0)}):
        assert kernel(x)[0] == 3


def test_an_overlay_without_the_call_lets_the_outer_one_answer(kernel, x):
    with overlay_cache({"scale": Factor(2.0)}), overlay_cache({"another": Factor(3.0)}):
        assert kernel(x)[0] == 2


def test_none_in_an_overlay_hides_neither_an_outer_overlay_nor_a_cache(kernel, x):
    executor = heuristic_executor()
    key = kernel.bind(x).key
    with overlay_cache({"scale": None, key: None}):
        assert executor(kernel, x)[0] == 1
        executor.selector.cache.put(key, Factor(5.0))
        assert executor.choose_config(kernel, x) == Factor(5.0)
    with overlay_cache({"scale": Factor(2.0)}), overlay_cache({"scale": None, key: None}):
        assert executor(kernel, x)[0] == 2


def test_none_in_an_overlay_does_not_hide_the_same_overlays_wider_entry(kernel, x):
    with overlay_cache({kernel.bind(x).key: None, "scale": Factor(6.0)}):
        assert kernel(x)[0] == 6


def test_none_in_a_config_cache_used_as_overlay_does_not_hide(kernel, x):
    cache = ConfigCache()
    cache.put(kernel.bind(x).key, None)
    with overlay_cache({"scale": Factor(2.0)}), overlay_cache(cache):
        assert kernel(x)[0] == 2


def test_an_overlay_is_what_the_mapping_was_on_entry(kernel, x):
    mapping = {"scale": Factor(2.0)}
    with overlay_cache(mapping):
        mapping["scale"] = Factor(3.0)
        assert kernel(x)[0] == 2
    with overlay_cache(mapping):
        assert kernel(x)[0] == 3


def test_an_overlay_writes_into_no_cache(kernel, x, tmp_path):
    selector = ConfigSelectorChain(ConfigCache(), persistent=tmp_path / "store", autotune=False)
    with overlay_cache({"scale": Factor(2.0)}):
        assert Executor(selector)(kernel, x)[0] == 2
    assert len(selector.cache) == 0
    assert not (tmp_path / "store").exists()


# --- overlays: functions that were jitted before -------------------------------------------------


def counted(function):
    """The jitted function, and a list that grows by one with each trace."""
    traces = []

    def traced(*args):
        traces.append(1)
        return function(*args)

    return jax.jit(traced), traces


def test_an_overlay_reaches_a_kernel_that_was_called_before_and_leaves_no_trace(kernel, x):
    kernel(x)
    before = kernel.traces
    with overlay_cache({"scale": Factor(2.0)}):
        assert kernel(x)[0] == 2
    inside = kernel.traces
    assert inside > before
    assert kernel(x)[0] == 1
    assert kernel.traces == inside


def test_an_overlay_reaches_the_users_own_jitted_function_and_leaves_no_trace(kernel, x):
    outer, traces = counted(lambda x: kernel(x) + 10)
    assert outer(x)[0] == 11
    with overlay_cache({"scale": Factor(2.0)}):
        assert outer(x)[0] == 12
        assert outer(x)[0] == 12
    assert len(traces) == 2
    assert outer(x)[0] == 11
    assert len(traces) == 2


def test_entering_an_equal_overlay_again_does_not_trace_again(kernel, x):
    outer, traces = counted(kernel)
    for _ in range(3):
        with overlay_cache({"scale": Factor(2.0)}):
            assert outer(x)[0] == 2
    assert len(traces) == 1


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
        lambda f: jax.jit(jax.vmap(f)),
        lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=1)[0]),
        lambda f: jax.jit(jax.checkpoint(f)),
        lambda f: jax.jit(jax.jit(jax.jit(f))),
    ],
    ids=["grad", "vmap", "scan", "remat", "nested jit"],
)
def test_an_overlay_reaches_transformed_functions_that_ran_before(kernel, x, transform):
    function = transform(kernel)
    assert jnp.ravel(function(x))[0] == 1
    with overlay_cache({"scale": Factor(2.0)}):
        assert jnp.ravel(function(x))[0] == 2
    assert jnp.ravel(function(x))[0] == 1


def test_overlays_that_were_collected_are_never_mistaken_for_new_ones(kernel, x):
    outer = jax.jit(kernel)
    for number in range(2, 8):
        with overlay_cache({"scale": Factor(float(number))}):
            assert kernel(x)[0] == number
            assert outer(x)[0] == number
        gc.collect()
        assert outer(x)[0] == 1


def test_an_exception_in_the_block_undoes_the_overlay(kernel, x):
    def broken():
        with overlay_cache({"scale": Factor(2.0)}):
            assert kernel(x)[0] == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert kernel(x)[0] == 1


def test_an_exception_while_tracing_leaves_the_overlay_active(kernel, x):
    def broken(x):
        kernel(x)
        raise ValueError("broken")

    with overlay_cache({"scale": Factor(2.0)}):
        with pytest.raises(ValueError, match="broken"):
            jax.jit(broken)(x)
        assert kernel(x)[0] == 2
    assert kernel(x)[0] == 1


def test_an_overlay_entered_while_tracing_holds_for_that_part_of_the_program(kernel, x):
    @jax.jit
    def function(x):
        with overlay_cache({"scale": Factor(2.0)}):
            inside = kernel(x)
        return inside, kernel(x)

    inside, after = function(x)
    assert (inside[0], after[0]) == (2, 1)


def test_the_same_overlay_object_can_be_used_again(kernel, x):
    overlay = overlay_cache({"scale": Factor(2.0)})
    for _ in range(2):
        with overlay:
            assert kernel(x)[0] == 2
        assert kernel(x)[0] == 1


def test_the_same_overlay_object_can_be_entered_inside_itself(kernel, x):
    overlay = overlay_cache({"scale": Factor(2.0)})
    with overlay:
        with overlay_cache({"scale": Factor(3.0)}):
            with overlay:
                assert kernel(x)[0] == 2
            assert kernel(x)[0] == 3
        assert kernel(x)[0] == 2
    assert kernel(x)[0] == 1


def test_the_same_policy_override_object_can_be_used_again(kernel, x):
    override = policy_override(allow_heuristics=False)
    for _ in range(2):
        with override, pytest.raises(RuntimeError, match="allow_heuristics"):
            kernel(x)
        assert kernel(x)[0] == 1


def test_blocks_that_are_left_in_another_order_each_take_away_their_own(kernel, x):
    first, second = overlay_cache({"scale": Factor(2.0)}), overlay_cache({"scale": Factor(3.0)})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert kernel(x)[0] == 3
    second.__exit__(None, None, None)
    assert kernel(x)[0] == 1


# --- what is active, in threads and in tasks -----------------------------------------------------

REFUSED = "refused"


def scope(kind, number, kernel, x):
    """A block of one kind and what a call gives inside it; `number` makes blocks differ."""
    config = Factor(float(number + 2))
    if kind == "overlay":
        return overlay_cache({"scale": config}), config.value
    if kind == "result":
        key = kernel.bind(x).key
        return AutotuningResult(key.device, [Entry(key.op_id, key.call_key, config)]), config.value
    if number % 2:
        return contextlib.nullcontext(), 1.0
    return policy_override(allow_heuristics=False), REFUSED


@pytest.fixture(params=["overlay", "result", "policy"])
def kind(request):
    return request.param


@pytest.fixture(params=["kernel", "outer jit"])
def read(request, kernel, x):
    """What a call gives now; the function has been jitted outside every block."""
    function = kernel if request.param == "kernel" else jax.jit(lambda x: kernel(x))

    def value():
        try:
            return float(function(x)[0])
        except RuntimeError as error:
            return REFUSED if "allow_heuristics" in str(error) else str(error)

    assert value() == 1
    return value


def test_eight_threads_each_see_their_own_block(kind, read, kernel, x):
    barrier = threading.Barrier(8)

    def work(number):
        block, wanted = scope(kind, number, kernel, x)
        seen = [read()]
        barrier.wait(60)
        with block:
            barrier.wait(60)
            inside = [read(), read()]
            barrier.wait(60)
        return [*seen, read()], inside, wanted

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for outside, inside, wanted in results:
        assert outside == [1, 1]
        assert inside == [wanted, wanted]


@pytest.mark.parametrize("read", ["outer jit"], indirect=True)
def test_a_block_is_not_in_force_in_another_thread(kind, read, kernel, x):
    block, wanted = scope(kind, 0, kernel, x)
    with block, concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result() == 1
        assert read() == wanted


def test_tasks_each_see_their_own_block(kind, read, kernel, x):
    async def task(number):
        block, wanted = scope(kind, number, kernel, x)
        outside, inside = [read()], []
        for _ in range(3):
            await asyncio.sleep(0)
            with block:
                inside += [read(), read()]
            outside.append(read())
        return outside, inside, wanted

    async def main():
        return await asyncio.gather(*[task(number) for number in range(5)])

    for outside, inside, wanted in asyncio.run(main()):
        assert outside == [1] * 4
        assert inside == [wanted] * 6
    assert read() == 1


def test_a_block_around_asyncio_run_holds_in_all_its_tasks(kind, read, kernel, x):
    outer, outer_wanted = scope(kind, 0, kernel, x)
    inner, inner_wanted = scope(kind, 2, kernel, x)

    async def plain():
        seen = [read()]
        await asyncio.sleep(0)
        return [*seen, read()]

    async def with_own():
        await asyncio.sleep(0)
        with inner:
            seen = [read()]
        return [*seen, read()]

    async def main():
        seen = [read()]
        results = await asyncio.gather(plain(), with_own(), plain())
        return [*seen, read()], results

    with outer:
        own, (first, second, third) = asyncio.run(main())
        assert read() == outer_wanted
    assert own == first == third == [outer_wanted, outer_wanted]
    assert second == [inner_wanted, outer_wanted]
    assert read() == 1


@pytest.mark.parametrize("how", ["left", "raised", "cancelled"])
@pytest.mark.parametrize("read", ["outer jit"], indirect=True)
def test_where_a_task_awaits_inside_a_block_others_are_refused(kind, read, kernel, x, how):
    block, wanted = scope(kind, 0, kernel, x)
    leave = asyncio.Event()

    async def awaiting():
        with block:
            await leave.wait()
            assert read() == wanted
            if how == "raised":
                raise ZeroDivisionError

    async def main():
        task = asyncio.create_task(awaiting())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"awaited inside a block.*asyncio.to_thread"):
            jax.jit(lambda x: kernel(x))(x)
        if how == "cancelled":
            task.cancel()
        leave.set()
        with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError):
            await task
        return read()

    assert asyncio.run(main()) == 1, "whatever became of the task, its block is left"
    assert read() == 1


@pytest.mark.parametrize("read", ["outer jit"], indirect=True)
def test_a_task_that_outlives_the_block_it_was_started_in_is_refused(kind, read, kernel, x):
    block, _ = scope(kind, 0, kernel, x)

    async def child():
        with pytest.raises(RuntimeError, match="awaited inside a block"):
            kernel(jnp.ones(77))  # nothing is compiled for this shape yet

    async def main():
        with block:
            task = asyncio.create_task(child())
        await task
        return read()

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("read", ["outer jit"], indirect=True)
def test_a_worker_thread_of_asyncio_keeps_no_block_for_later_work(kind, read, kernel, x):
    outer, _ = scope(kind, 0, kernel, x)
    inner, inner_wanted = scope(kind, 2, kernel, x)

    def work():
        with inner:
            return read()

    async def main():
        asyncio.get_running_loop().set_default_executor(pool)
        with outer:
            return await asyncio.to_thread(work)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.shutdown_of_the_loop, pool.shutdown = pool.shutdown, lambda *_, **__: None
        assert asyncio.run(main()) == inner_wanted
        assert pool.submit(read).result() == 1
        pool.shutdown = pool.shutdown_of_the_loop


@pytest.mark.parametrize("read", ["outer jit"], indirect=True)
def test_async_code_in_two_loops_of_two_threads_stays_apart(read, kernel, x):
    barrier = threading.Barrier(2)

    def thread(number):
        async def main():
            with overlay_cache({"scale": Factor(float(number + 2))}):
                barrier.wait(60)
                await asyncio.sleep(0)
                return read()

        return asyncio.run(main())

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(thread, range(2))) == [2, 3]


@pytest.mark.parametrize("read", ["outer jit"], indirect=True)
def test_the_same_result_entered_twice_is_left_once_at_a_time(kernel, x, read):
    result, wanted = scope("result", 0, kernel, x)
    with result:
        with result:
            assert read() == wanted
        assert read() == wanted
    assert read() == 1


def test_policies_of_a_block_reach_a_selector_made_by_hand(kernel, x):
    selector = ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False))
    executor = Executor(selector)
    assert executor(kernel, x)[0] == 1
    with (
        policy_override(selector, allow_heuristics=False),
        pytest.raises(RuntimeError, match="allow_heuristics"),
    ):
        executor(kernel, x)
    assert executor(kernel, x)[0] == 1
