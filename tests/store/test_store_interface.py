"""What every store does, whichever database it lives in."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import pickle
import tempfile
import threading

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ejkernel.ops import ConfigCache, ConfigSelectorChain, PersistentCache, overlay_cache

DEVICE, OP, CALL = "cpu|test", "stored@v1", "0123456789abcdef"
KEY = (DEVICE, OP, CALL)


class Order(enum.Enum):
    ROWS = "rows"
    COLUMNS = "columns"


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    columns: int = 128


@dataclasses.dataclass(frozen=True)
class Nested:
    tile: Tile
    order: Order = Order.ROWS
    steps: tuple[int, ...] = ()
    dtype: object = None
    backward: Tile | None = None


def trial(rows, verdict="measured", seconds=1.0, **more):
    return {"config": {"rows": rows}, "verdict": verdict, "seconds": seconds, **more}


def origin(source="s1", measured="forward", jaxlib="1", **more):
    return {"source": source, "measured": measured, "versions": {"jaxlib": jaxlib}, **more}


def times(cache, key=KEY):
    return {t["config"]["rows"]: t["seconds"] for t in cache.trials(key)}


# --- entries -------------------------------------------------------------------------------------


def test_an_empty_store_has_nothing(cache):
    assert cache.get(KEY) is None
    assert cache.entry(KEY) is None
    assert cache.trials(KEY) == []
    assert KEY not in cache
    assert (len(cache), cache.keys(), list(cache)) == (0, [], [])
    cache.clear()


def test_both_forms_of_put_and_get(cache):
    cache.put(DEVICE, OP, CALL, Tile(8))
    assert cache.get(KEY) == Tile(8)
    cache.put(KEY, Tile(9))
    assert cache.get(DEVICE, OP, CALL) == Tile(9)
    assert KEY in cache
    assert (len(cache), cache.keys()) == (1, [KEY])
    assert cache.keys()[0].op_id == OP


def test_another_object_sees_it_and_clearing_removes_it(cache, place):
    cache.put(KEY, Nested(Tile(1), Order.COLUMNS, (1, 2), jnp.dtype("bfloat16"), Tile(2)))
    other = PersistentCache(place)
    assert other.get(KEY) == cache.get(KEY)
    assert type(other.get(KEY).tile) is Tile
    other.clear()
    assert cache.get(KEY) is None
    assert cache.trials(KEY) == []
    cache.put(KEY, Tile(3))
    assert other.get(KEY) == Tile(3)
    other.close()


def test_an_entry_keeps_everything_that_was_said_about_it(cache):
    about = {
        "signature": "float32[8,8]",
        "call": {"args": [["float32[8,8]"]], "kwargs": {"causal": "True"}},
        "measured": "forward",
        "seconds": 0.25,
        "heuristic_seconds": None,
        "incomplete": "",
        "source": "abc",
        "versions": {"jax": "1", "jaxlib": "2", "backend": "cpu", "python": "3"},
        "notes": ["odd \x00 \ud800 ☃"],
        "sure": True,
    }
    cache.put(KEY, Tile(1), about=about)
    entry = cache.entry(KEY)
    assert (entry["key"], entry["config"]) == (KEY, {"rows": 1, "columns": 128})
    assert entry["config_type"].endswith(":Tile")
    when, where = entry["about"].pop("when"), entry["about"].pop("where")
    assert entry["about"] == about
    assert when.endswith("+00:00")
    assert where


def test_when_and_where_may_be_given(cache):
    cache.put(KEY, Tile(1), about={"when": "2020-02-02T00:00:00+00:00", "where": "here"})
    about = cache.entry(KEY)["about"]
    assert (about["when"], about["where"]) == ("2020-02-02T00:00:00+00:00", "here")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.5, 10**400, True, "fast", [1]])
def test_numbers_that_a_column_cannot_hold_are_kept_too(cache, value):
    cache.put(KEY, Tile(1), about={"seconds": value})
    assert repr(cache.entry(KEY)["about"]["seconds"]) == repr(value)


@pytest.mark.parametrize(
    "key",
    [
        "text key",
        "",
        "nul \x00 in it",
        "half a pair \ud800",
        "back\\slash \\x00 \\u1234 \\\\",
        "\\key",
        ("", "", ""),
        ("\\key", "", "text key"),
        ("gpu|a b/c", "öp@v1", "☃" * 16),
    ],
)
def test_any_text_can_be_a_key(cache, key):
    cache.put(key, Tile(5))
    cache.put("another", Tile(6))
    assert cache.get(key) == Tile(5)
    assert key in cache
    assert set(cache.keys()) == {key, "another"}


def test_a_text_key_is_not_the_tuple_of_its_columns(cache):
    cache.put("abc", Tile(1))
    cache.put(("\\key", "", "abc"), Tile(2))
    assert (cache.get("abc"), cache.get(("\\key", "", "abc"))) == (Tile(1), Tile(2))


@pytest.mark.parametrize("key", [7, None, ("a", "b"), (1, 2, 3), ["a", "b", "c"]])
def test_other_keys_are_a_type_error(cache, key):
    with pytest.raises(TypeError, match="keys are"):
        cache.put(key, Tile(1))
    with pytest.raises(TypeError, match="keys are"):
        cache.get(key)
    assert len(cache) == 0


def test_a_key_that_is_too_long_is_refused_and_never_there(cache):
    with pytest.raises(ValueError, match="too long; 2000 bytes"):
        cache.put("x" * 2001, Tile(1))
    assert cache.get("x" * 2001) is None
    assert cache.trials("x" * 2001) == []
    cache.put("x" * 1990, Tile(1))
    assert cache.get("x" * 1990) == Tile(1)


def test_what_is_no_data_is_a_type_error_and_leaves_nothing(cache):
    for config, about in ((object(), {}), (Tile(1), {"odd": object()}), (Tile(1), {"trials": [3]})):
        with pytest.raises(TypeError):
            cache.put(KEY, config, about=about)
    assert cache.get(KEY) is None


def test_a_large_entry_comes_back_whole(cache):
    config = {"table": ["x" * 1000] * 1000}
    cache.put(KEY, config)
    assert cache.get(KEY) == config


def test_related_entries_are_found_by_columns(cache):
    for op_id, call_key in (("matmul@v1", "a"), ("matmul@v2", "a"), ("matmu_l@v1", "b")):
        cache.put(DEVICE, op_id, call_key, Tile(1))
    cache.put("other", "matmul@v1", "a", Tile(2))

    def keys(**columns):
        return {tuple(entry["key"]) for entry in cache.related(**columns)}

    assert keys(op_id="matmul@v1") == {(DEVICE, "matmul@v1", "a"), ("other", "matmul@v1", "a")}
    assert keys(op_id="matmul@v1", device="other") == {("other", "matmul@v1", "a")}
    assert keys(op_id="matmul@v*", device=DEVICE) == {
        (DEVICE, "matmul@v1", "a"),
        (DEVICE, "matmul@v2", "a"),
    }
    assert len(cache.related(limit=1)) == 1


def test_a_pickled_cache_opens_the_same_store(cache):
    cache.put(KEY, Tile(4))
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.get(KEY) == Tile(4)
    assert copy.path == cache.path
    copy.close()


def test_a_closed_cache_opens_again(cache):
    cache.put(KEY, Tile(4))
    cache.close()
    assert cache.get(KEY) == Tile(4)
    cache.close()
    cache.close()
    cache.put(KEY, Tile(5))
    assert cache.get(KEY) == Tile(5)


def test_many_threads_use_one_cache(cache):
    errors = []

    def work(number):
        try:
            for i in range(10):
                cache.put(DEVICE, OP, f"{number}-{i}", Tile(number, i))
                assert cache.get(DEVICE, OP, f"{number}-{i}") == Tile(number, i)
        except Exception as error:  # noqa: BLE001  shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(cache) == 120


# --- trials --------------------------------------------------------------------------------------


def test_trials_come_back_in_order_with_everything(cache):
    given = [
        trial(1, samples_ns=[10, 20], reason=""),
        trial(2, "wrong", None, samples_ns=[], reason="differs \x00 by 3"),
        trial(3, "failed", None, samples_ns=[], reason="", error_kind="oom"),
    ]
    cache.put(KEY, Tile(1), about={**origin(), "trials": given})
    found = cache.trials(KEY)
    assert [t.pop("when") for t in found] == [cache.entry(KEY)["about"]["when"]] * 3
    given[1]["reason"] = "differs \\x00 by 3"
    assert found == given
    assert "trials" not in cache.entry(KEY)["about"]


def test_a_new_candidate_adds_a_row_and_leaves_the_others(cache):
    cache.put(KEY, Tile(1), about=origin(trials=[trial(1), trial(2)], when="2020-01-01"))
    cache.put(KEY, Tile(3), about=origin(trials=[trial(3, seconds=0.5)], when="2021-01-01"))
    assert times(cache) == {1: 1.0, 2: 1.0, 3: 0.5}
    assert [t["when"] for t in cache.trials(KEY)] == ["2020-01-01", "2020-01-01", "2021-01-01"]
    assert cache.get(KEY) == Tile(3)


def test_a_trial_that_says_the_same_is_not_written_again(cache):
    cache.put(KEY, Tile(1), about=origin(trials=[trial(1)], when="2020-01-01"))
    cache.put(KEY, Tile(1), about=origin(trials=[trial(1)], when="2021-01-01"))
    assert [t["when"] for t in cache.trials(KEY)] == ["2020-01-01"]
    cache.put(KEY, Tile(1), about=origin(trials=[trial(1, seconds=2.0)], when="2022-01-01"))
    assert [(t["when"], t["seconds"]) for t in cache.trials(KEY)] == [("2022-01-01", 2.0)]


@pytest.mark.parametrize("change", [{"source": "s2"}, {"measured": "both"}, {"jaxlib": "2"}])
def test_trials_of_another_origin_are_replaced(cache, change):
    cache.put(KEY, Tile(1), about=origin(trials=[trial(1), trial(2)]))
    cache.put(KEY, Tile(3), about=origin(**change, trials=[trial(2, seconds=7.0)]))
    assert times(cache) == {2: 7.0}


def test_other_versions_than_those_of_compilers_keep_trials(cache):
    for python in ("3.11", "3.12"):
        about = origin(trials=[trial(python)])
        about["versions"] = {"jaxlib": "1", "python": python}
        cache.put(KEY, Tile(1), about=about)
    assert set(times(cache)) == {"3.11", "3.12"}


def test_not_tried_takes_the_place_of_nothing(cache):
    cache.put(KEY, Tile(1), about=origin(trials=[trial(1), trial(2, "not tried", None)]))
    again = [trial(1, "not tried", None), trial(2), trial(3, "not tried", None)]
    cache.put(KEY, Tile(1), about=origin(trials=again))
    verdicts = {t["config"]["rows"]: t["verdict"] for t in cache.trials(KEY)}
    assert verdicts == {1: "measured", 2: "measured", 3: "not tried"}


def test_trials_belong_to_their_key(cache):
    cache.put(KEY, Tile(1), about=origin(trials=[trial(1)]))
    cache.put("other", Tile(1), about=origin(trials=[trial(2)]))
    assert (times(cache), times(cache, "other")) == ({1: 1.0}, {2: 1.0})
    cache.put(KEY, Tile(2))  # by hand: what was measured says nothing about it
    assert (times(cache), times(cache, "other")) == ({}, {2: 1.0})


# --- any sequence of operations is that of a dict ------------------------------------------------

FULL_KEYS = [
    (DEVICE, OP, CALL),
    (DEVICE, OP, "f" * 16),
    (DEVICE, "other/op@v2", CALL),
    ("gpu|a b/c", OP, CALL),
]
KEYS = st.sampled_from([*FULL_KEYS, "text key", "text/../key"])
CONFIGS = st.one_of(
    st.builds(Tile, st.integers(), st.integers()),
    st.builds(
        Nested,
        tile=st.builds(Tile, st.integers()),
        order=st.sampled_from(Order),
        steps=st.lists(st.integers(), max_size=3).map(tuple),
        dtype=st.sampled_from([None, jnp.dtype("float32"), jnp.dtype("int8")]),
        backward=st.none() | st.builds(Tile, st.integers()),
    ),
    st.floats(allow_nan=False),
    st.text(),
)


class StoreIsADict(RuleBasedStateMachine):
    """`put`, `get`, overlays, `clear` and reopening, versus a dictionary and a list of them."""

    place: str | None = None

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.open()
        self.store.clear()
        self.model = {}
        self.overlays = []
        self.blocks = []

    def open(self):
        self.store = PersistentCache(self.place or f"{self.folder.name}/store")
        self.selector = ConfigSelectorChain(ConfigCache(), persistent=self.store)

    @rule(key=KEYS, config=CONFIGS)
    def put(self, key, config):
        self.store.put(key, config)
        self.model[key] = config

    @rule(key=KEYS)
    def get(self, key):
        assert self.store.get(key) == self.model.get(key)
        assert (key in self.store) == (key in self.model)

    @rule(entries=st.dictionaries(st.sampled_from(FULL_KEYS), CONFIGS | st.none(), max_size=2))
    def lay_over(self, entries):
        block = contextlib.ExitStack()
        block.enter_context(overlay_cache(entries))
        self.blocks.append(block)
        self.overlays.append(entries)

    @precondition(lambda self: self.blocks)
    @rule()
    def take_off(self):
        self.blocks.pop().close()
        self.overlays.pop()

    @precondition(lambda self: self.model)
    @rule()
    def clear(self):
        self.store.clear()
        self.model.clear()

    @rule()
    def reopen(self):
        self.store.close()
        self.open()

    @invariant()
    def agrees(self):
        assert set(self.store.keys()) == set(self.model)
        assert len(self.store) == len(self.model)
        for key in FULL_KEYS:
            device, op_id, call_key = key
            layers = [overlay.get(key) for overlay in reversed(self.overlays)]
            expected = next((cfg for cfg in layers if cfg is not None), self.model.get(key))
            assert self.selector.known_config(op_id, call_key, device) == expected

    def teardown(self):
        while self.blocks:
            self.blocks.pop().close()
        self.store.close()
        self.folder.cleanup()


SETTINGS = {
    "stateful_step_count": 12,
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(hypothesis.HealthCheck),
}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_any_sequence_of_operations_is_that_of_a_dictionary(kind, request):
    class Machine(StoreIsADict):
        if kind == "postgresql":
            place = request.getfixturevalue("server").new_url()

    examples = 40 if kind == "sqlite" else 8
    hypothesis.stateful.run_state_machine_as_test(
        Machine, settings=hypothesis.settings(max_examples=examples, **SETTINGS)
    )


def test_an_entry_is_removed_with_its_trials_and_no_other(cache):
    trials = [{"config": 1, "verdict": "measured", "seconds": 1.0}]
    other = (DEVICE, OP, "f" * 16)
    for key in (KEY, other):
        cache.put(*key, {"block": 1}, about={"trials": trials})
    assert cache.remove(KEY) is True
    assert cache.remove(KEY) is False
    assert cache.keys() == [other]
    assert cache.trials(KEY) == []
    assert len(cache.trials(other)) == 1
    cache.put(*KEY, {"block": 2})
    assert cache.trials(KEY) == []  # an old number is not given to a new entry's trials


def test_nothing_is_made_to_remove_something_or_to_be_checked(place):
    cache = PersistentCache(place)
    assert cache.remove(KEY) is False
    cache.check()
    assert len(cache) == 0
    if not isinstance(place, str):
        assert not place.exists()
    cache.check(write=True)
    if not isinstance(place, str):
        assert (place / "configs.sqlite3").exists()
    cache.close()
