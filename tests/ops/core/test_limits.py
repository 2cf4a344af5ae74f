"""Configs are checked where they enter: fields by type, and values by what a kernel declares."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Kernel,
    Limit,
    Limits,
    PersistentCache,
    Supports,
    Tuner,
    autotune,
    overlay_cache,
    policy_override,
    set_default_executor,
    verify_bundle,
)
from ejkernel.ops.config.selection import Sources
from ejkernel.ops.config.tiers.request import _said
from ejkernel.ops.config.tiers.stored import reload_bundles
from ejkernel.ops.core.requirements import field_reasons
from ejkernel.store.bundle import Bundle


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 8
    share: float = 0.5


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 4
    inner: Inner = dataclasses.field(default_factory=Inner)
    splits: int | None = None


def divides(cfg, inv):
    rows = inv.args[0].shape[0]
    return f"block={cfg.block} does not divide {rows} rows" if rows % cfg.block else None


class Sums(Kernel[Config, jax.Array]):
    """The sum of all numbers, block by block: no block, no sum."""

    limits = {  # noqa: RUF012
        "xla": Limits(
            {
                "block": Limit(minimum=1, maximum=64, power_of_two=True),
                "inner.size": Limit(minimum=8, multiple_of=8),
                "splits": Limit(one_of=(1, 2)),
            },
            rules=(divides,),
        )
    }

    def __init__(self):
        super().__init__("sums")

    def heuristic_cfg(self, inv):
        return Config()

    def candidate_cfgs(self, inv):
        return [Config(2), Config(3), Config(8)]

    def run_xla(self, x, *, cfg, scale=1.0):
        return jnp.sum(jnp.sum(x.reshape(-1, cfg.block), axis=1)) * scale


X = jnp.arange(8.0)

BAD = {
    "block": [-1, 0, 3, 5, 128, 2**31, 2**63, True, 4.0, "4", None, np.float32(4), jnp.int32],
    "inner": [
        None,
        {"size": 8},
        Config(),
        Inner(0),
        Inner(12),
        Inner("8"),
        Inner(True),
        Inner(8, "x"),
    ],
    "splits": [0, 3, -1, True, 2.0, "1"],
}
CASES = [(name, value) for name, values in BAD.items() for value in values]
FEW = [("block", -1), ("block", 4.0), ("inner", Config()), ("splits", 3)]


@pytest.fixture(autouse=True)
def silent():
    _said.clear()
    reload_bundles()
    yield
    reload_bundles()


@pytest.fixture
def kernel():
    return Sums()


def quiet(**more):
    return Executor(ConfigSelectorChain(ConfigCache(), autotune=False, **more))


def wrong(name, value):
    return dataclasses.replace(Config(), **{name: value})


@pytest.mark.parametrize(
    ("through", "name", "value"),
    [
        *(("kernel", *case) for case in CASES),
        *((other, *case) for other in ("executor", "chooser", "jit", "compile") for case in FEW),
    ],
    ids=str,
)
def test_a_config_that_is_written_and_does_not_fit_is_refused_by_name(kernel, name, value, through):
    cfg = wrong(name, value)

    class Chooser:
        def choose(self, inv, kernel):
            return cfg

    calls = {
        "kernel": lambda: kernel(X, cfg=cfg),
        "executor": lambda: quiet()(kernel, X, cfg=cfg),
        "chooser": lambda: Executor(Chooser())(kernel, X),
        "jit": lambda: jax.jit(lambda x: kernel(x, cfg=cfg))(X),
        "compile": lambda: quiet().compile(kernel, X, cfg=cfg),
    }
    with pytest.raises((TypeError, ValueError)) as error:
        calls[through]()
    message = str(error.value)
    assert "sums@v1" in message
    assert name in message
    assert "must be" in message
    assert "leave the config out" in message


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_an_overlay_that_does_not_fit_is_skipped_with_its_reason(kernel, name, value, caplog):
    executor = quiet()
    with overlay_cache({"sums": Config(8)}), overlay_cache({"sums": wrong(name, value)}):
        assert executor.decide(kernel, X).cfg == Config(8)  # the next one outwards
    with overlay_cache({"sums": wrong(name, value)}), caplog.at_level(logging.WARNING):
        for _ in range(3):
            decision = executor.decide(kernel, X)
        assert executor(kernel, X) == 28
    assert decision.tier == "heuristics"
    assert name in decision.explain()
    said = [r for r in caplog.records if "is not used" in r.getMessage()]
    assert len({r.getMessage() for r in said}) == len(said) <= 1


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_memory_and_results_that_do_not_fit_are_skipped(kernel, name, value):
    cache = ConfigCache()
    cache.put(kernel.bind(X).key, wrong(name, value))
    decision = Executor(ConfigSelectorChain(cache, autotune=False)).decide(kernel, X)
    assert decision.tier == "heuristics"
    assert name in decision.explain()
    key = kernel.bind(X).key
    result = AutotuningResult(key.device, [Entry(key.op_id, key.call_key, wrong(name, value))])
    with result:
        assert kernel(X) == 28


STORED = [
    ({"block": value}, "block")
    for value in (-1, 0, 3, 2**31, 2**63, True, 4.0, 1e9, "4", None, [4], {"a": 1})
] + [
    ({"block": 4, "inner": value}, "inner")
    for value in (None, 3, {"size": 0}, {"size": "8"}, {"size": 8, "share": "x"}, {"none": 1})
]


@pytest.mark.parametrize(("plain", "name"), STORED, ids=str)
@pytest.mark.parametrize("where", ["store", "bundle"])
def test_what_is_stored_or_shipped_and_does_not_fit_is_skipped(
    kernel, plain, name, where, tmp_path, monkeypatch, caplog
):
    key = kernel.bind(X).key
    store = PersistentCache(tmp_path / "store")
    kind = f"{Config.__module__}:{Config.__qualname__}"
    if where == "store":
        store.put_plain(key, plain, kind, about={})
    else:
        entry = {"key": list(key), "config": plain, "config_type": kind, "about": {}}
        Bundle([entry]).save(tmp_path / "bundle.json")
        monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(tmp_path / "bundle.json"))
    executor = quiet(persistent=store)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            decision = executor.decide(kernel, X)
    assert decision.tier == "heuristics"
    assert name in decision.explain(), decision.explain()
    assert [name in r.getMessage() for r in caplog.records] == [True]
    assert executor(kernel, X) == 28


def test_verifying_a_bundle_names_what_no_call_could_use(kernel):
    key = kernel.bind(X).key
    kind = f"{Config.__module__}:{Config.__qualname__}"

    def problems(plain):
        entry = {"key": list(key), "config": plain, "config_type": kind, "about": {}}
        return [problem.reason for problem in verify_bundle(Bundle([entry]))]

    (reason,) = problems({"block": -2})
    assert "block=-2 must be a power of two from 1 to 64, for xla" in reason
    assert not any("must be" in reason for reason in problems({"block": 2}))


def test_a_config_of_another_call_is_skipped_by_the_rule_that_sees_the_call(kernel):
    with overlay_cache({"sums": Config(8)}):
        assert quiet().decide(kernel, X).cfg == Config(8)
        decision = quiet().decide(kernel, jnp.ones(12))
    assert decision.cfg == Config(4)
    assert "block=8 does not divide 12 rows" in decision.explain()
    with pytest.raises(ValueError, match=r"sums@v1.*block=8 does not divide 12 rows"):
        kernel(jnp.ones(12), cfg=Config(8))


def test_a_config_that_fits_none_of_many_calls_is_one_warning(kernel, caplog):
    executor = quiet()
    with overlay_cache({"sums": Config(8)}), caplog.at_level(logging.WARNING):
        for rows in range(12, 60, 8):
            assert executor.decide(kernel, jnp.ones(rows)).tier == "heuristics"
    assert sum("is not used" in record.getMessage() for record in caplog.records) == 1


def test_a_candidate_that_does_not_fit_is_recorded_and_never_built(kernel, monkeypatch):
    built = []
    run = Sums.run_xla

    def spy(self, x, *, cfg, scale=1.0):
        built.append(cfg.block)
        return run(self, x, cfg=cfg, scale=scale)

    monkeypatch.setattr(Sums, "run_xla", spy)
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=1))
    found = selector.answer(kernel.bind(X), kernel, Sources.MEASURED)
    trials = {trial.cfg: trial for trial in found.about.trials}
    assert trials[Config(3)].verdict.name == "UNSUPPORTED"
    assert "block=3 must be a power of two from 1 to 64" in trials[Config(3)].reason
    assert 3 not in built
    assert autotune(kernel, X, configs=[Config(5), Config(8)]) != Config(5)
    with pytest.raises(TypeError, match=r"block='8'"):
        autotune(kernel, X, configs=[Config("8")])


def test_a_tuner_of_the_users_own_sees_only_what_fits_and_is_checked(kernel):
    seen = []

    class Mine(Tuner):
        def autotune(self, make_fn, args, kwargs, candidates):
            seen.extend(candidates)
            return Config(5)

    chain = ConfigSelectorChain(ConfigCache(), tuner=Mine())
    decision = chain.decide(kernel.bind(X), kernel)
    assert Config(3) not in seen
    assert Config(2) in seen
    assert decision.tier == "heuristics"
    assert "block=5" in decision.explain()


def test_a_stored_measurement_of_what_no_longer_fits_does_not_win(kernel, tmp_path, monkeypatch):
    store = PersistentCache(tmp_path / "store")
    chain = ConfigSelectorChain(ConfigCache(), persistent=store, tuner=Tuner(iters=1))
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "limits", {})
        chain.decide(kernel.bind(X), kernel)
    key = kernel.bind(X).key
    best = store.entry(key)["config"]["block"]
    stricter = Limits({"block": Limit(one_of=tuple({2, 4, 8} - {best}))})
    monkeypatch.setattr(Sums, "limits", {"xla": stricter})
    if best == 4:  # a heuristic must fit
        monkeypatch.setattr(Sums, "heuristic_cfg", lambda self, inv: Config(8))
    fresh = ConfigSelectorChain(ConfigCache(), persistent=store, tuner=Tuner(iters=1))
    decision = fresh.decide(kernel.bind(X), kernel)
    assert decision.tier == "autotune"
    assert decision.cfg.block != best


def test_a_heuristic_that_does_not_fit_is_the_authors_mistake(kernel, monkeypatch):
    monkeypatch.setattr(Sums, "heuristic_cfg", lambda self, inv: Config(3))
    with pytest.raises(ValueError, match=r"sums@v1: heuristic_cfg returned.*block=3 must be"):
        kernel(X)


def test_limits_are_those_of_the_implementation_that_serves():
    class Two(Sums):
        supports = {"cpu": Supports(without=("scale",))}  # noqa: RUF012
        limits = {**Sums.limits, "cpu": Limits({"block": Limit(one_of=(4, 8))})}  # noqa: RUF012

        def run_cpu(self, x, *, cfg):
            return jnp.sum(jnp.sum(x.reshape(-1, cfg.block), axis=1))

    two = Two()
    with pytest.raises(ValueError, match=r"block=2 must be one of 4, 8, for cpu"):
        two(X, cfg=Config(2))
    assert two(X, cfg=Config(2), scale=1.0) == 28
    assert two(X, cfg=Config(2), implementation="xla") == 28


@dataclasses.dataclass(frozen=True)
class Choice:
    block: int = 4
    implementation: str | None = None


class Chosen(Kernel[Choice, jax.Array]):
    tune_implementations = True

    def run_xla(self, x, *, cfg):
        return jnp.sum(x)

    def run_triton(self, x, *, cfg):
        raise AssertionError("this is no GPU")


@pytest.mark.parametrize("name", ["triton", "no such one", "", 3, "reference"])
def test_an_overlay_that_names_what_cannot_serve_here_is_skipped(name):
    kernel = Chosen("chosen")
    with overlay_cache({"chosen": Choice(implementation=name)}):
        assert kernel(X) == 28
        assert "implementation" in quiet().explain(kernel, X)


def test_a_field_that_is_not_set_is_not_checked():
    @dataclasses.dataclass
    class Late:
        block: int = 1
        made: int = dataclasses.field(init=False)

    assert field_reasons(Late()) == []
    assert field_reasons(Late(block="1")) != []


def test_a_warm_call_checks_nothing(kernel, monkeypatch):
    kernel(X, cfg=Config(8))
    kernel(X)

    def fail(*args, **kwargs):
        raise AssertionError("checked in a warm call")

    monkeypatch.setattr(Kernel, "check_config", fail)
    monkeypatch.setattr(Limits, "reasons_against", fail)
    kernel(X, cfg=Config(8))
    kernel(X)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"pallas": Limits()}, r"limits names pallas, but it has xla"),
        ({"xla": Limits({"blok": Limit(minimum=1)})}, r"limits\['xla'\] names blok, which Config"),
        ({"xla": Limits({"inner.sice": Limit(minimum=1)})}, r"names inner.sice"),
    ],
)
def test_limits_that_can_never_hold_are_refused_when_the_kernel_is_made(limits, message):
    with pytest.raises(TypeError, match=message):
        type("Mistaken", (Sums,), {"limits": limits})()


def test_a_strict_policy_names_the_reason(kernel):
    cache = ConfigCache()
    cache.put(kernel.bind(X).key, Config(3))
    set_default_executor(Executor(ConfigSelectorChain(cache)))
    with policy_override(strict=True), pytest.raises(RuntimeError, match="block=3 must be"):
        kernel(X)


# --- types of fields, for everybody's dataclasses ------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Everything:
    number: int = 1
    share: float = 1.0
    flag: bool = False
    name: str = "a"
    maybe: int | None = None
    sloppy: int = None  # type: ignore[assignment]
    sloppier: Colour = "RED"  # type: ignore[assignment]
    either: int | str = 1
    some: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    kind: Literal["a", "b", 3] = "a"
    colour: Colour = Colour.RED
    dtype: np.dtype = jnp.float32
    anything: Any = None
    nested: Inner | None = None
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    unknown: NotThere = None  # type: ignore[name-defined] # noqa: F821


def test_numbers_of_numpy_are_numbers_of_python_when_a_kernel_runs(kernel):
    """A NumPy integer of 8 bits wraps, and none of them has `bit_length` on every version."""
    seen = []

    class Watching(Sums):
        def run_xla(self, x, *, cfg, scale=1.0):
            seen.append((type(cfg.block), type(cfg.inner.size), type(cfg.inner.share)))
            return super().run_xla(x, cfg=cfg, scale=scale)

    watching = Watching()
    cfg = Config(np.int8(4), Inner(np.uint8(8), np.float32(0.5)))
    assert watching(X, cfg=cfg) == 28
    with overlay_cache({"sums": cfg}):
        assert watching(X[:4]) == 6
    assert seen == [(int, int, float)] * 2
    assert type(cfg.block) is np.int8  # the caller's own stays as it is


def test_a_number_of_numpy_that_the_annotation_asks_for_stays_one():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Scale:
        factor: np.float32 = np.float32(2)  # noqa: RUF009
        sizes: tuple[int, ...] = (np.int8(1),)

    class Scaled(Kernel[Scale, jax.Array]):
        def run(self, x, *, cfg):
            seen.append((type(cfg.factor), type(cfg.sizes[0])))
            return x * cfg.factor

    kernel = Scaled("scaled")
    assert kernel(X)[1] == 2
    assert kernel(X, cfg=Scale(np.float32(3)))[1] == 3
    assert seen == [(np.float32, int)] * 2


def test_an_integer_that_no_float_holds_is_refused_as_any_other(kernel, caplog):
    for value in (10**400, -(10**400), 10**5000):  # the last one not even as text
        with pytest.raises(ValueError, match=r"sums@v1: .* block=\S.* must be a power of two"):
            kernel(X, cfg=Config(block=value))
    with overlay_cache({"sums": Config(block=10**400)}):
        assert kernel(X) == 28
    assert "must be a power of two" in caplog.text


@pytest.mark.parametrize(
    "value",
    [np.uint8(255), np.int8(1), float("inf"), float("-inf"), float("nan"), 10**400 + 1],
    ids=["uint8", "int8", "inf", "-inf", "nan", "e400"],
)
def test_a_number_of_any_size_is_within_limits_or_not(value):
    assert not Limit(minimum=0, multiple_of=512).allows(value)
    assert not Limit(multiple_of=7, power_of_two=True).allows(value)
    assert not Limit(power_of_two=True, minimum=2).allows(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 2**70),
        ("number", np.int64(3)),
        ("share", 3),
        ("share", float("inf")),
        ("share", np.float32(2)),
        ("flag", True),
        ("flag", np.True_),
        ("maybe", None),
        ("maybe", 3),
        ("sloppy", None),
        ("sloppier", Colour.RED),
        ("either", "b"),
        ("some", (1, 2, 3)),
        ("pair", (2, "b")),
        ("kind", 3),
        ("dtype", jnp.bfloat16),
        ("dtype", np.float32),
        ("anything", Ellipsis),
        ("nested", Inner()),
        ("nested", None),
        ("table", {"a": 1}),
        ("unknown", 3),
    ],
    ids=str,
)
def test_a_field_takes_what_its_annotation_says(name, value):
    assert field_reasons(dataclasses.replace(Everything(), **{name: value})) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("number", v)
            for v in (True, np.True_, 1.0, 1e9, "1", None, (1,), np.float32(1), jnp.int32)
        ),
        *(("share", v) for v in (True, "1", None, 1j)),
        *(("flag", v) for v in (1, 0, None, "yes")),
        *(("name", v) for v in (1, None, b"a")),
        *(("maybe", v) for v in (1.5, "1", False)),
        *(("sloppy", v) for v in (1.5, "1")),
        ("sloppier", "BLUE"),
        *(("either", v) for v in (None, 1.5, True)),
        *(("some", v) for v in ([1], (1, "2"), (1, True), 3, None)),
        *(("pair", v) for v in ((1,), (1, 2), ("a", 1), (1, "a", 2))),
        *(("kind", v) for v in ("c", 3.0, None)),
        *(("colour", v) for v in (1, "RED", None)),
        *(("dtype", v) for v in ("float32", 3, None)),
        *(("nested", v) for v in (Inner("a"), Inner(1, "b"), Everything(), {"size": 1}, 3)),
        *(("table", v) for v in ({"a": "b"}, [1], None)),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_named(name, value):
    reasons = field_reasons(dataclasses.replace(Everything(), **{name: value}))
    assert reasons
    assert reasons[0].startswith(name)
    assert "must be" in reasons[0]


def test_the_checks_of_reading_and_of_writing_agree():
    from ejkernel.ops import from_json, to_json

    cfg = Everything(sloppy=1, sloppier=Colour.RED, nested=Inner(), table={"a": 1}, some=(1,))
    assert field_reasons(from_json(to_json(cfg), Everything)) == []
    text = json.dumps({**json.loads(to_json(cfg)), "number": 1.5})
    with pytest.raises(TypeError, match="number"):
        from_json(text, Everything)
