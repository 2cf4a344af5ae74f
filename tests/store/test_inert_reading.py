"""What is stored or shipped can be anything, and reading it does nothing but read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import json
import logging
import os
import socket
import sqlite3
import sys
import tracemalloc
import types
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    NearShapes,
    PersistentCache,
    Tuner,
    export_bundle,
    from_json,
    import_bundle,
    to_json,
    verify_bundle,
)
from ejkernel.ops.config.freshness import made_by
from ejkernel.ops.config.outcome import known_trials
from ejkernel.ops.config.selection import Sources
from ejkernel.ops.config.tiers.stored import reload_bundles
from ejkernel.ops.utils.serialize import declare_type, qualified_name
from ejkernel.report import NotARun, Run
from ejkernel.store import Bundle, BundleError, StoreError
from ejkernel.store.reading import DEEPEST, LARGEST, parse_json, read_regular

T = TypeVar("T")
X = jnp.arange(8.0)
built: list[str] = []


class Mode(enum.Enum):
    FAST = 1


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class Box(Generic[T]):
    content: T


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 1
    tile: Tile = Tile()
    tiles: tuple[Tile, ...] = ()
    either: Tile | int = 0
    table: dict[str, Tile] = dataclasses.field(default_factory=dict)
    boxed: Box[Tile] = Box(Tile())
    free: Any = None
    free_list: list[Any] = dataclasses.field(default_factory=list)
    bare: tuple = ()
    mode: Mode | str = Mode.FAST
    dtype: Any = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Trap(Tile):
    """Loaded, a dataclass, even a subclass of one that is declared: and never to be built."""

    def __post_init__(self):
        built.append("trap")


class Twice(Kernel[Config, jax.Array]):
    near_shapes = NearShapes()

    def __init__(self) -> None:
        super().__init__(name="inert_twice")

    def run(self, x, *, cfg):
        return x * 2 + 0 * cfg.block

    def heuristic_cfg(self, inv):
        return Config(1)

    def candidate_cfgs(self, inv):
        return [Config(1), Config(2)]


@pytest.fixture(autouse=True)
def lazy(monkeypatch):
    """A package that would import something when it is asked for an attribute."""
    module = types.ModuleType("ejkernel_test_lazy")

    def attribute(name):
        built.append(f"{name} of a lazy package")
        return Trap

    module.__getattr__ = attribute
    monkeypatch.setitem(sys.modules, "ejkernel_test_lazy", module)
    built.clear()
    yield
    reload_bundles()


# --- which classes are built ---------------------------------------------------------------------

NAMES = [
    qualified_name(Trap),
    "ejkernel_test_lazy:Trap",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in (
            "ejkernel_test_lazy:a.b",
            "subprocess:Popen",
            "jax.numpy:array",
            "builtins:object",
        )
    ),
]
PLACES = {
    "the config itself": lambda inner: inner,
    "a field": lambda inner: {"tile": inner},
    "a field of another kind": lambda inner: {"block": inner},
    "items": lambda inner: {"tiles": [{"rows": 1}, inner]},
    "a union": lambda inner: {"either": inner},
    "values": lambda inner: {"table": {"a": inner}},
    "a generic class": lambda inner: {"boxed": {"content": inner}},
    "Any": lambda inner: {"free": inner},
    "inside of Any": lambda inner: {"free": [{"deep": [inner]}]},
    "items of Any": lambda inner: {"free_list": [inner]},
    "a bare tuple": lambda inner: {"bare": [[inner]]},
    "an enum": lambda inner: {"mode": {"$enum": "FAST", **inner}},
    "a set": lambda inner: {"free": {"$set": [inner]}},
}


def document(config, kernel, config_type=None, **about):
    entry = {
        "key": list(kernel.bind(X).key),
        "config": config,
        "config_type": config_type or qualified_name(Config),
        "about": {"seconds": 1.0, **about},
    }
    return {"format": "ejkernel-configs", "version": 1, "entries": [entry]}


def chain(**options):
    policy = AutotunePolicy(allow_autotune=False)
    return ConfigSelectorChain(ConfigCache(), policy, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_only_what_a_kernel_declares_is_built(place, name, tmp_path, monkeypatch, caplog):
    config = place({"$type": name, "rows": 1})
    kernel = Twice()
    # as text
    with pytest.raises((TypeError, ValueError)):
        from_json(json.dumps(config), Config)
    with contextlib.suppress(TypeError):  # no set can hold it
        assert from_json(json.dumps(config)) is not None
    # in a bundle
    file = tmp_path / "bundle.json"
    file.write_text(json.dumps(document(config, kernel, name)))
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(file))
    assert chain().decide(kernel.bind(X), kernel).tier == "heuristics"
    assert len(verify_bundle(file)) == 1
    # in a store
    monkeypatch.delenv("EJKERNEL_CONFIG_PATH")
    store = PersistentCache(tmp_path / "store")
    import_bundle(store, file)
    assert chain(persistent=store).decide(kernel.bind(X), kernel).tier == "heuristics"
    store.get(kernel.bind(X).key)
    assert chain(persistent=store).known_config("inert_twice@v1", kernel.bind(X).call_key) is None
    # in a result, of a kernel that is here and of one that is not
    for op_id in ("inert_twice@v1", "unheard@v1"):
        listed = [{"op_id": op_id, "call_key": "0", "config": config, "config_type": name}]
        text = json.dumps({"ejkernel_result": 1, "device": "cpu", "entries": listed})
        with pytest.raises(ValueError, match="AutotuningResult"):
            AutotuningResult.loads(text)
    assert built == []
    assert "Traceback" not in caplog.text


def test_what_is_declared_comes_back():
    config = Config(
        tiles=(Tile(2), Tile(3)),
        either=Tile(4),
        table={"a": Tile(5)},
        boxed=Box(Tile(6)),
        free=(1, {"a": 2.5}),
        mode="FAST",
    )
    back = from_json(to_json(config), Config)
    assert dataclasses.replace(back, free=None) == dataclasses.replace(config, free=None)
    assert back.free == [1, {"a": 2.5}]


@pytest.mark.parametrize(
    "stored",
    [
        *({"samples_ns": [5, ns]} for ns in (0, -5, 10**400, "5", None, True, [])),
        *({"samples_ns": [float(ns)]} for ns in ("inf", "nan", "1e300", "1e-300")),
        *({"seconds": seconds} for seconds in (-1.0, float("nan"), float("inf"), 1e300, 1e-320)),
    ],
    ids=lambda stored: repr(stored)[:30],
)
def test_a_stored_time_that_no_clock_has_said_is_measured_again(stored, tmp_path):
    class Twice(Kernel[Tile, jax.Array]):
        def run(self, x, *, cfg):
            return x * 2 + cfg.rows * 0

        def candidate_cfgs(self, inv):
            return [Tile(1), Tile(2)]

    kernel = Twice("inert_times")
    inv = kernel.bind(X)
    trials = [
        {"config": {"rows": rows}, "verdict": "measured", "seconds": 1e-6, "samples_ns": [1000] * 5}
        for rows in (1, 2)
    ]
    about = {**made_by(inv, kernel), "measured": "forward", "incomplete": "it was stopped"}
    store = PersistentCache(tmp_path)
    about = {**about, "trials": [{**trials[0], **stored}, trials[1]]}
    store.put_plain(inv.key, {"rows": 1}, qualified_name(Tile), about=about)
    assert len(known_trials([Tile(1), Tile(2)], store.trials(inv.key))) == 1
    selector = ConfigSelectorChain(ConfigCache(), persistent=store, tuner=Tuner(1, 2))
    assert selector.answer(inv, kernel, Sources.MEASURED).cfg in (Tile(1), Tile(2))


def test_a_ranking_that_repeats_itself_and_has_hostile_names(tmp_path, monkeypatch):
    class Twice(Kernel[Tile, jax.Array]):
        def run(self, x, *, cfg):
            return x * 2 + cfg.rows * 0

        def candidate_cfgs(self, inv):
            return [Tile(1), Tile(2), Tile(3)]

    kernel = Twice("inert_ranking")
    inv = kernel.bind(X)
    about = {
        "estimated": True,
        "target": "\x1b[31m\n",
        "ranked": [{"config": {"rows": 2}}] * 50,
        "refused": [{"config": {"rows": 3}, "reason": "\x1b[31m"}],
    }
    entry = {"key": inv.key, "config": {"rows": 2}, "config_type": "", "about": about}
    Bundle([entry]).save(tmp_path / "ranked.json")
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(tmp_path / "ranked.json"))
    reload_bundles()
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(1, 2))
    outcome = selector.answer(inv, kernel, Sources.MEASURED).about
    assert sorted(trial.cfg.rows for trial in outcome.trials) == [1, 2, 3]
    assert str(outcome).replace("\n", "").isprintable()
    assert "estimated for \\x1b[31m ," in outcome.summary()


def test_the_reason_of_a_stored_failure_is_shown_and_not_obeyed():
    record = {"config": {"rows": 1}, "verdict": "failed", "reason": "two\nlines\x1b[31m\u202e"}
    (trial,) = known_trials([Tile(1)], [record]).values()
    assert trial.reason == "two\nlines\\x1b[31m\\u202e"


@pytest.mark.parametrize("error", [KeyError("rows"), ZeroDivisionError(), AssertionError("no")])
def test_a_class_may_refuse_its_fields_in_any_way(error):
    @dataclasses.dataclass(frozen=True)
    class Picky:
        rows: int = 1

        def __post_init__(self):
            if self.rows != 1:
                raise error

    class Rows(Kernel[Picky, jax.Array]):
        def run(self, x, *, cfg):
            return x

    kernel = Rows("inert_picky")
    entry = {"op_id": kernel.full_op_id, "call_key": "0" * 16, "config_type": ""}
    text = {"ejkernel_result": 1, "device": "d", "entries": [{**entry, "config": {"rows": 2}}]}
    with pytest.raises(ValueError, match=r"entries\[0\]: \S"):
        AutotuningResult.loads(json.dumps(text))


def test_a_kernel_without_a_declared_class_builds_that_of_its_candidates(tmp_path):
    class Plain(Kernel):
        def __init__(self):
            super().__init__(name="inert_plain")

        def run(self, x, *, cfg):
            return x * cfg.rows

        def candidate_cfgs(self, inv):
            return [Tile(1), Tile(2)]

        def heuristic_cfg(self, inv):
            return Tile(1)

    kernel = Plain()
    assert kernel.config_type is None
    key = kernel.bind(X).key
    store = PersistentCache(tmp_path)
    declare_type(Config)  # of another kernel
    for config, name, tier in (
        ({"rows": 2}, qualified_name(Tile), "persistent"),
        ({"rows": 2}, qualified_name(Trap), "heuristics"),
        ({"rows": 2}, qualified_name(dict), "heuristics"),
        (2, qualified_name(int), "heuristics"),
        ({}, qualified_name(Config), "heuristics"),
        (None, qualified_name(type(None)), "heuristics"),
    ):
        store.put_plain(key, config, name, about={})
        decision = chain(persistent=store).decide(kernel.bind(X), kernel)
        assert decision.tier == tier
        assert type(decision.cfg) is Tile
    assert built == []


@pytest.mark.parametrize(
    "name", ["", "object", "O", "V9", "i4,i4", "float32,", "int32[4]", "array", "ones", 7, None, []]
)
@pytest.mark.parametrize("kind", ["dtype", "numpy", "jax", "other", 3])
def test_a_dtype_is_one_by_its_own_name_or_an_error(name, kind):
    with pytest.raises((TypeError, ValueError)):
        from_json(json.dumps({"dtype": {"$dtype": name, "kind": kind}}), Config)


# --- wrong types at every place ------------------------------------------------------------------

WRONG = [None, True, -3, 10**400, "\ud800\x1b[31m", [[]], {"$type": "a:b"}]


def whole(kernel):
    about = {
        "when": "2026-01-01",
        "where": "here",
        "seconds": 0.5,
        "heuristic_seconds": 1.0,
        "signature": "float32[8]",
        "measured": "forward",
        "incomplete": "",
        "versions": {"jax": "0"},
        "call": {"args": [["float32[9]"]], "kwargs": {}, "structure": "x"},
        "notes": ["n"],
        "sure": True,
        "took": 3.0,
        "tried": 4,
        "clock": "wall",
        "heuristics": {"block": 1},
        "trials": [{"config": {"block": 1}, "verdict": "measured"}],
        "ranked": [{"config": {"block": 2}, "score": 1.0}],
        "refused": [{"config": {"block": 3}, "reason": "no"}],
        "target": "v5e",
        "estimated": False,
    }
    near = {**document({"block": 2}, kernel, **about)["entries"][0]}
    near["key"] = [near["key"][0], near["key"][1], "f" * 16]
    found = document({"block": 2, "tile": {"rows": 3}}, kernel, **about)
    return {**found, "entries": [*found["entries"], near]}


def places_in(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places_in(value[key], (*path, key))


def changed(value, path, new):
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = changed(value[path[0]], path[1:], new)
    return value


@pytest.mark.parametrize("some", [7, pytest.param(1, marks=pytest.mark.long)])
def test_wrong_types_at_every_place_of_a_bundle(some, tmp_path, monkeypatch, caplog):
    """Each is refused with a `BundleError`, or is a bundle that does nobody harm."""
    kernel = Twice()
    original = whole(kernel)
    inv = kernel.bind(X)
    file = tmp_path / "bundle.json"
    refused = used = longest = 0
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(file))
    cases = [(path, wrong) for path in places_in(original) for wrong in WRONG]
    for path, wrong in cases[:: some + (some > 1)]:  # seven wrong values: not always the same
        text = json.dumps(changed(original, path, wrong))
        file.write_text(text)
        reload_bundles()
        decision = chain().decide(inv, kernel)
        assert decision.tier in ("heuristics", "bundle", "near"), (path, wrong)
        assert kernel.check_config(decision.cfg)
        assert decision.explain()
        try:
            bundle = Bundle.loads(text)
        except BundleError as error:
            refused += 1
            longest = max(longest, len(str(error)))
            continue
        used += 1
        merged, conflicts = bundle.merge(Bundle([document({"block": 7}, kernel)["entries"][0]]))
        assert all(str(conflict) for conflict in conflicts)
        assert Bundle.loads(merged.dumps()) == merged
        verify_bundle(bundle)
    assert min(refused, used) > 150 // some
    assert longest < 2000
    assert "Traceback" not in caplog.text


def test_wrong_types_at_every_place_of_a_record(tmp_path):
    run = Run("title", "cpu", "2026", operations=())
    plain = json.loads(run.dumps())
    plain["operations"] = [
        {
            "op_id": "m@v1",
            "call_key": "0",
            "signature": "s",
            "config": {"block": 1},
            "gain": {"times": 1.0, "low": 0.5, "high": 2.0},
            "candidates": [{"config": 1, "verdict": "measured", "seconds": 1.0, "samples": [1.0]}],
        }
    ]
    for path in places_in(plain):
        for wrong in WRONG:
            text = json.dumps(changed(plain, path, wrong))
            with contextlib.suppress(NotARun):
                assert Run.loads(text).dumps()


# --- files that are none -------------------------------------------------------------------------


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path)[-100:] if len(str(path)) < 100 else os.path.relpath(path))


def sparse(path):
    with open(path, "wb") as stream:
        stream.truncate(3 * 2**30)


def text(content):
    def write(path):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


REST = {"config": {}, "config_type": "", "about": {}}
START = '{"format": "ejkernel-configs", "version": 1, "entries": '
FILES = {
    "a pipe": (fifo, "a pipe"),
    "a device": (device, "a device"),
    "a socket": (listening, "a socket"),
    "a folder in place of a file": (lambda path: path.mkdir(), ""),
    "gigabytes": (sparse, "more than"),
    "a link that leads to itself": (lambda path: path.symlink_to(path), ""),
    "brackets": (text("[" * 100_000), "deep"),
    "objects": (text('{"a":' * 100_000), "deep"),
    "matching brackets": (text("[" * 100_000 + "]" * 100_000), "deep"),
    "brackets in an entry": (text(START + "[" * 60 + "]" * 60 + "}"), "deep"),
    "cut off": (text(START + "[{"), "not JSON"),
    "a huge number": (text(START + "9" * 10_000 + "}"), "not JSON"),
    "a number of no size": (text(START + '[{"key": NaN}]}'), "NaN"),
    "a name twice": (text(START + '[], "entries": []}'), "twice"),
    "no text": (text(b"\xff\xfe\x00\x80"), "no text"),
    "UTF-16": (text("{}".encode("utf-16")), "no text"),
    "zero bytes": (text(b"\0" * 100), "not JSON"),
    "nothing": (text(""), "not JSON"),
    "a list": (text("[1]"), "format"),
    "a key without end": (
        text(START + json.dumps([{"key": ["d", "o", "k" * 3000], **REST}]) + "}"),
        "too long",
    ),
}


@pytest.fixture(params=FILES)
def hostile(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    make, words = FILES[request.param]
    path = tmp_path / "hostile.json"
    make(path)
    return path, words


def test_a_bad_file_on_the_search_path_costs_one_warning(hostile, tmp_path, monkeypatch, caplog):
    path, words = hostile
    kernel = Twice()
    good = tmp_path / "good.json"
    good.write_text(json.dumps(document({"block": 2}, kernel)))
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", os.pathsep.join([str(path), str(good)]))
    executor = Executor(chain())
    with caplog.at_level(logging.WARNING):
        assert [float(executor(kernel, jnp.ones(n))[0]) for n in (1, 2)] == [2.0, 2.0]
        assert chain().decide(kernel.bind(X), kernel).tier == "bundle"
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(path) in message
    assert words in message
    assert len(message) < 500


COMMANDS = [
    ("configs", "list", "--store", "{}"),
    ("configs", "show", "abc", "--store", "{}"),
    ("configs", "verify", "--store", "{}"),
    ("configs", "prune", "--all", "--yes", "--store", "{}"),
    ("configs", "diff", "{}", "{}"),
    ("configs", "import", "{}"),
    ("configs", "merge", "{}", "{}", "--output", "merged.json"),
    ("report", "{}", "--output", "page.html"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_a_bad_file_ends_a_command_in_one_message(hostile, command, capsys):
    from ejkernel.cli import run

    path, _ = hostile
    code = run([argument.format(path) for argument in command])
    said = capsys.readouterr()
    assert code in (2, 3, 4), said
    assert said.out == ""
    assert str(path.name) in said.err or "Too many levels" in said.err
    assert "Traceback" not in said.err
    assert len(said.err.strip().splitlines()) <= 4
    assert len(said.err) < 1500


def test_doctor_names_a_bad_bundle(tmp_path, monkeypatch, capsys):
    from ejkernel.cli import run

    fifo(tmp_path / "hostile.json")
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(tmp_path / "hostile.json"))
    assert run(["doctor", "--json"]) == 1
    [found] = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["area"] == "bundles"]
    assert found["status"] == "error"
    assert "a pipe" in found["text"]


def test_json_of_any_depth_is_a_value_or_a_value_error():
    for depth in (1, DEEPEST, DEEPEST + 1, 1000, 300_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            for full in (opening * depth + "1" + closing * depth, opening * depth, closing * depth):
                if depth <= DEEPEST and full.count("1"):
                    parse_json(full)
                else:
                    with pytest.raises(ValueError):
                        parse_json(full)
    assert parse_json('"' + "[" * 1000 + '"') == "[" * 1000
    assert parse_json('["\\\\", "\\"[[", "]"]') == ["\\", '"[[', "]"]


def test_a_stack_that_is_nearly_full_is_no_reason_to_fail():
    def descend(levels):
        if levels:
            return descend(levels - 1)
        with pytest.raises(BundleError):
            Bundle.loads("[" * 40 + "]" * 40)
        return True

    limit = sys.getrecursionlimit()
    for left in (80, 60, 45):
        with contextlib.suppress(RecursionError):  # there was no room for pytest's own calls
            assert descend(limit - len(_frames()) - left)


def _frames():
    frame, found = sys._getframe(), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def test_a_file_that_grows_while_it_is_read_is_cut_off(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 100)
    assert read_regular(tmp_path / "f", limit=100) == b"x" * 100
    with pytest.raises(ValueError, match="more than"):
        read_regular(tmp_path / "f", limit=99)
    with pytest.raises(ValueError, match="more than"):  # it says that it has no bytes at all
        read_regular("/proc/self/status", limit=10)
    assert LARGEST == 64 * 2**20


def test_numbers_that_json_lacks_are_not_written(tmp_path):
    entry = document({"block": 1}, Twice(), mine=[float("nan"), np.inf])["entries"][0]
    Bundle([entry]).save(tmp_path / "b.json")
    [back] = Bundle.load(tmp_path / "b.json")
    assert back["about"]["mine"] == [None, None]


@pytest.mark.parametrize(
    "planted",
    ['{"a": NaN}', "Infinity", '{"a": 1e999}', '{"a":' + "[" * 48 + "]" * 48 + "}"],
    ids=["nan", "infinity", "1e999", "deep"],
)
def test_a_planted_config_does_not_spoil_the_bundle_that_is_made_of_a_store(tmp_path, planted):
    store = PersistentCache(tmp_path)
    for call in "ab":
        store.put("cpu|x", "m@v1", call * 16, {"block": 1})
    with sqlite3.connect(tmp_path / "configs.sqlite3") as connection:
        connection.execute("UPDATE ejkernel_entries SET config = ? WHERE id = 1", (planted,))
    connection.close()
    [entry] = Bundle.loads(export_bundle(store).dumps())
    assert entry["key"] == ("cpu|x", "m@v1", "b" * 16)


def test_what_could_not_be_read_again_is_not_acknowledged(tmp_path):
    nested = 1
    for _ in range(48):
        nested = [nested]
    store = PersistentCache(tmp_path)
    with pytest.raises(StoreError, match="deep"):
        store.put("key", nested)
    with pytest.raises(StoreError, match="cannot be stored"):
        store.put_plain("key", float("nan"), "float", about={})
    assert len(store) == 0
    store.put("key", float("nan"))
    assert np.isnan(store.get("key"))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: repr(wrong)[:20])
def test_wrong_types_in_a_store_do_no_harm(tmp_path, wrong, capsys):
    from ejkernel.cli import run

    kernel = Twice()
    names = list(whole(kernel)["entries"][0]["about"])
    store = PersistentCache(tmp_path)
    for call_key in (kernel.bind(X).call_key, "f" * 16):
        key = (kernel.bind(X).key.device, "inert_twice@v1", call_key)
        about = {name: wrong for name in names if name != "trials"}
        store.put_plain(key, {"block": 2}, qualified_name(Config), about=about)
    decision = chain(persistent=store).decide(kernel.bind(X), kernel)
    assert decision.tier in ("persistent", "heuristics")
    assert decision.explain()
    near = chain(persistent=store).decide(kernel.bind(jnp.arange(9.0)), kernel)
    assert near.tier in ("heuristics", "near")
    bundle = export_bundle(store)
    assert Bundle.loads(bundle.dumps()) == bundle
    import_bundle(store, bundle)
    assert Run.of_store(store).dumps()
    store.close()
    for command in (["list"], ["show", "f" * 16], ["explain", "f" * 16], ["verify"]):
        assert run(["configs", *command, "--store", str(tmp_path)]) in (0, 1)
        assert "bug of ejkernel" not in capsys.readouterr().err


@pytest.mark.parametrize("make", [fifo, device, listening, lambda path: path.mkdir()])
def test_something_else_in_the_place_of_a_store(make, tmp_path, monkeypatch, caplog, capsys):
    from ejkernel.cli import run

    monkeypatch.chdir(tmp_path)
    make(tmp_path / "configs.sqlite3")
    store = PersistentCache(tmp_path)
    assert store.get("key") is None
    assert len(store) == 0
    with pytest.raises(OSError, match="not a regular file"):
        store.put("key", 1)
    assert len(caplog.records) == 1
    assert run(["doctor", "--store", str(tmp_path)]) == 1
    assert run(["configs", "list", "--store", str(tmp_path)]) == 4
    assert "not a regular file" in capsys.readouterr().err


def test_more_objects_than_any_bundle_has_are_refused_before_they_are_made():
    text = "[" + "{}," * 3_000_000 + "{}]"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="3,000,002 objects and lists; 2,000,000 is most"):
            parse_json(text)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(text)
    finally:
        tracemalloc.stop()
