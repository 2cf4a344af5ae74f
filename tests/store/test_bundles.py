"""Bundles: files of tuned configs, between stores, in a search path, in an installed package."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops import (
    ConfigCache,
    ConfigKey,
    ConfigSelectorChain,
    Kernel,
    Limit,
    Limits,
    PersistentCache,
    Tuner,
    export_bundle,
    import_bundle,
    verify_bundle,
)
from ejkernel.ops.config.selection import Sources
from ejkernel.ops.config.tiers.stored import reload_bundles
from ejkernel.store import Bundle, BundleError
from ejkernel.store.bundle import Shipped

X = jnp.arange(8.0)


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 1


class Twice(Kernel[Config, jax.Array]):
    def __init__(self) -> None:
        super().__init__(name="twice")

    def run(self, x, *, cfg):
        return x * 2 + 0 * cfg.block

    def heuristic_cfg(self, inv):
        return Config(1)

    def candidate_cfgs(self, inv):
        return [Config(1), Config(2)]


def entry(block=1, call="0" * 16, device="cpu|x", **about):
    about = {"when": "2026-01-01T00:00:00+00:00", "where": "here", "seconds": 1.0, **about}
    return {
        "key": [device, "twice@v1", call],
        "config": {"block": block},
        "config_type": "tests.Config",
        "about": about,
    }


def selector(**options):
    events = []
    chain = ConfigSelectorChain(
        ConfigCache(),
        autotune=False,
        on_event=lambda event, **data: events.append((event, data.get("level"))),
        **options,
    )
    return chain, events


@pytest.fixture(autouse=True)
def fresh_bundles():
    reload_bundles()
    yield
    reload_bundles()


# --- the file ------------------------------------------------------------------------------------


def test_a_bundle_is_sorted_readable_text_that_does_not_depend_on_order(tmp_path):
    entries = [entry(call="b" * 16), entry(call="a" * 16), entry(device="cpu|a")]
    bundle = Bundle(entries)
    assert bundle.dumps() == Bundle(reversed(entries)).dumps()
    lines = bundle.dumps().splitlines()
    assert len(lines) > 30  # a field a line: a diff shows what changed
    assert [e["key"][0] for e in bundle] == ["cpu|a", "cpu|x", "cpu|x"]
    bundle.save(tmp_path / "deep" / "bundle.json")
    assert Bundle.load(tmp_path / "deep" / "bundle.json") == bundle
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["bundle.json"]


keys = st.tuples(*[st.text(max_size=5)] * 3)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(keys, plain, max_size=5))
def test_any_bundle_survives_the_way_through_text(configs):
    bundle = Bundle(
        {"key": key, "config": config, "config_type": "t", "about": {"seconds": 0.5}}
        for key, config in configs.items()
    )
    again = Bundle.loads(bundle.dumps())
    assert again == bundle
    assert again.dumps() == bundle.dumps()
    for key, config in configs.items():
        assert again.get(key)["config"] == config


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "no bundle of configs"),
        ('{"format": "something"}', "no bundle of configs"),
        ('{"format": "ejkernel-configs", "version": 99, "entries": []}', "newer ejkernel"),
        ('{"format": "ejkernel-configs", "version": "1"}', "whole number"),
        ('{"format": "ejkernel-configs", "version": 1}', "entries must be a list"),
        ('{"format": "ejkernel-configs", "version": 1, "entries": [1]}', "entry 0 must be"),
        ('{"format": "ejkernel-configs", "version": 1, "entries": [{}]}', "entry 0 lacks 'key'"),
    ],
)
def test_what_is_no_bundle_is_said_to_be_none(tmp_path, text, complaint):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(BundleError, match=complaint) as raised:
        Bundle.load(tmp_path / "bad.json")
    assert "bad.json" in str(raised.value)


def test_bytes_that_are_no_text_and_keys_that_are_there_twice(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BundleError, match="not text"):
        Bundle.load(tmp_path / "bad.json")
    with pytest.raises(BundleError, match="twice"):
        Bundle([entry(1), entry(2)])
    with pytest.raises(BundleError, match=r"\[device, op_id, call_key\]"):
        Bundle([{**entry(), "key": ["cpu"]}])


# --- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "worse", "reason"),
    [
        ({}, {"seconds": None}, "measured"),
        ({}, {"incomplete": "the budget is spent"}, "finished"),
        ({"sure": True}, {"sure": False}, "decided"),
        ({"tried": 16}, {"tried": 4}, "more candidates"),
        ({"when": "2026-02-01T00:00:00+00:00"}, {}, "newer"),
    ],
)
def test_the_better_measured_wins_whatever_the_order(better, worse, reason):
    good, bad = Bundle([entry(1, **better)]), Bundle([entry(2, **worse)])
    for one, other in ((good, bad), (bad, good)):
        merged, [conflict] = one.merge(other)
        assert [e["config"]["block"] for e in merged] == [1]
        assert reason in conflict.reason
        assert "twice@v1" in str(conflict)


def test_a_smaller_time_of_another_machine_is_no_reason():
    first, second = Bundle([entry(1, seconds=2.0)]), Bundle([entry(2, seconds=1.0)])
    merged, [conflict] = first.merge(second)
    assert [e["config"]["block"] for e in merged] == [1]
    assert "equally well" in conflict.reason


def test_the_same_config_twice_is_no_conflict_and_pruning_drops():
    merged, conflicts = Bundle([entry(1)]).merge(Bundle([entry(1)]), Bundle([entry(call="f" * 16)]))
    assert conflicts == []
    assert len(merged) == 2
    pruned = merged.prune(lambda e: e["key"][2].startswith("f"))
    assert [e["key"][2] for e in pruned] == ["0" * 16]


# --- between stores ------------------------------------------------------------------------------


def tuned_store(folder):
    store, kernel = PersistentCache(folder), Twice()
    chain = ConfigSelectorChain(ConfigCache(), tuner=Tuner(progress=False), persistent=store)
    chain.answer(kernel.bind(X), kernel, Sources.MEASURED)
    chain.answer(kernel.bind(jnp.arange(16.0)), kernel, Sources.MEASURED)
    return store, kernel


def test_a_store_goes_into_a_file_and_out_of_it(tmp_path):
    store, kernel = tuned_store(tmp_path / "one")
    bundle = export_bundle(store, tmp_path / "bundle.json", op_id="twice")
    assert len(bundle) == 2
    assert "samples_ns" not in (tmp_path / "bundle.json").read_text()
    assert all(e["about"]["tried"] == 2 for e in bundle)
    other = PersistentCache(tmp_path / "two")
    done = import_bundle(other, tmp_path / "bundle.json")
    assert (len(done.added), done.replaced, done.kept) == (2, (), ())
    for inv in (kernel.bind(X), kernel.bind(jnp.arange(16.0))):
        assert other.get(inv.key) == store.get(inv.key)
    again = import_bundle(other, bundle)
    assert (again.added, again.replaced, len(again.kept)) == ((), (), 2)
    assert export_bundle(other) == bundle
    assert len(export_bundle(store, op_id="thrice")) == 0
    assert len(export_bundle(store, device="tpu|v9")) == 0


def test_an_import_reports_conflicts_and_keeps_the_better(tmp_path):
    store = PersistentCache(tmp_path)
    key = ConfigKey("cpu|x", "twice@v1", "0" * 16)
    store.put(key, {"block": 7}, about={"seconds": 1.0, "incomplete": "Ctrl-C"})
    done = import_bundle(store, Bundle([entry(3)]))
    assert done.replaced == (key,)
    assert store.get(key) == {"block": 3}
    worse = import_bundle(store, Bundle([entry(9, incomplete="Ctrl-C")]))
    assert worse.kept == (key,)
    assert store.get(key) == {"block": 3}
    assert "finished" in str(worse)


def test_verify_finds_what_does_not_fit(tmp_path):
    store, kernel = tuned_store(tmp_path)
    bundle = export_bundle(store)
    assert verify_bundle(bundle) == []
    good, _ = bundle

    def problem(**changes):
        [found] = verify_bundle(Bundle([{**good, **changes}]))
        return str(found)

    assert "does not fit" in problem(config={"no such field": 1})
    assert "no kernel" in problem(key=("cpu", "unheard-of@v1", "0" * 16))
    assert "stale" in problem(about={**good["about"], "source": "other"})
    assert "interrupted" in problem(about={**good["about"], "incomplete": "Ctrl-C"})
    versions = {**good["about"]["versions"], "jaxlib": "0.0.1"}
    assert "suspect" in problem(about={**good["about"], "versions": versions})
    assert kernel.full_op_id in problem(config=None)


# --- the tier ------------------------------------------------------------------------------------


def test_a_bundle_in_the_search_path_is_served_after_the_store(tmp_path, monkeypatch):
    store, kernel = tuned_store(tmp_path / "store")
    inv = kernel.bind(X)
    [mine] = [e for e in export_bundle(store) if e["key"] == inv.key]
    Bundle([{**mine, "config": {"block": 2}}]).save(tmp_path / "team" / "a.json")
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(tmp_path / "team"))
    chain, events = selector()
    decision = chain.decide(inv, kernel)
    assert (decision.cfg, decision.tier) == (Config(2), "bundle")
    assert "a.json" in decision.reason
    assert events == [("cache_hit", "bundle")]
    chain.decide(inv, kernel)
    assert events[-1] == ("cache_hit", "memory")
    store.put(inv.key, Config(1))
    with_store, _ = selector(persistent=store)
    assert with_store.decide(inv, kernel).tier == "persistent"


def test_stale_entries_of_a_bundle_are_not_served_and_suspect_ones_are_marked(
    tmp_path, monkeypatch
):
    store, kernel = tuned_store(tmp_path / "store")
    inv = kernel.bind(X)
    [mine] = [e for e in export_bundle(store) if e["key"] == inv.key]
    file = tmp_path / "a.json"
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(file))
    Bundle([{**mine, "about": {**mine["about"], "source": "another"}}]).save(file)
    chain, _ = selector()
    decision = chain.decide(inv, kernel)
    assert decision.tier == "heuristics"
    assert "stale" in decision.explain()
    reload_bundles()
    versions = {**mine["about"]["versions"], "jaxlib": "0.0.1"}
    about = {**mine["about"], "versions": versions}
    Bundle([{**mine, "config": {"block": 2}, "about": about}]).save(file)
    chain, _ = selector()
    decision = chain.decide(inv, kernel)
    assert (decision.cfg, decision.tier) == (Config(2), "bundle")
    assert "suspect" in decision.reason


def test_bad_bundles_are_said_once_and_the_others_serve(tmp_path, monkeypatch, caplog):
    store, kernel = tuned_store(tmp_path / "store")
    export_bundle(store, tmp_path / "good.json")
    (tmp_path / "bad.json").write_text("{")
    missing = tmp_path / "missing.json"
    parts = [tmp_path / "bad.json", missing, tmp_path / "good.json"]
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", os.pathsep.join(map(str, parts)))
    for _ in range(2):
        chain, _ = selector()
        assert chain.decide(kernel.bind(X), kernel).tier == "bundle"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert any("bad.json" in text and "not JSON" in text for text in warnings)
    assert any("missing.json" in text for text in warnings)


def test_a_config_that_does_not_fit_the_kernel_is_not_served(tmp_path, monkeypatch, caplog):
    store, kernel = tuned_store(tmp_path / "store")
    [mine, _] = export_bundle(store)
    Bundle([{**mine, "config": {"no such field": 1}}]).save(tmp_path / "a.json")
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(tmp_path))
    chain, _ = selector()
    for x in (X, jnp.arange(16.0)):
        assert chain.decide(kernel.bind(x), kernel).tier == "heuristics"
    assert "does not fit" in caplog.text


def test_of_several_bundles_with_one_key_the_first_that_can_serve_answers(tmp_path, monkeypatch):
    store, kernel = tuned_store(tmp_path / "store")
    inv = kernel.bind(X)
    [mine] = [e for e in export_bundle(store) if e["key"] == inv.key]
    planted = {
        "class": {**mine, "config": {"no such field": 1}},
        "type": {**mine, "config": {"block": True}},
        "limit": {**mine, "config": {"block": 10**400}},
        "stale": {**mine, "about": {**mine["about"], "source": "another"}},
    }
    Bundle([{**mine, "config": {"block": 2}}]).save(tmp_path / "good.json")
    monkeypatch.setattr(Twice, "limits", {"run": Limits({"block": Limit(maximum=64)})})
    for name, bad in planted.items():
        Bundle([bad]).save(tmp_path / f"{name}.json")
        reload_bundles()
        parts = [tmp_path / f"{name}.json", tmp_path / "good.json"]
        monkeypatch.setenv("EJKERNEL_CONFIG_PATH", os.pathsep.join(map(str, parts)))
        decision = selector()[0].decide(inv, kernel)
        assert (decision.cfg, decision.tier) == (Config(2), "bundle"), name
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", os.pathsep.join(map(str, [parts[0]] * 2)))
    assert selector()[0].decide(inv, kernel).tier == "heuristics"


# --- in a wheel ----------------------------------------------------------------------------------


def test_an_installed_package_ships_bundles_without_being_imported(tmp_path):
    """A real distribution on the path, in a process of its own."""
    site = tmp_path / "site"
    package = site / "shipper" / "configs"
    package.mkdir(parents=True)
    (site / "shipper" / "__init__.py").write_text("raise SystemExit('imported')")
    info = site / "shipper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ejkernel.configs]\na = shipper.configs\nb = shipper.configs:one.json\nc = nowhere.at\n"
    )
    Bundle([entry(5)]).save(package / "one.json")
    program = """
        import sys
        from ejkernel.store.bundle import Shipped
        shipped = Shipped()
        found, source = shipped.find(("cpu|x", "twice@v1", "0" * 16))
        assert found["config"] == {"block": 5}
        assert source.origin == "entry point a = shipper.configs"
        assert len(shipped.bundles) == 2
        [problem] = shipped.problems
        assert "nowhere.at" in str(problem) and "no such package" in str(problem)
        assert "shipper" not in sys.modules
        print("fine")
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, str(site)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("fine", "")


@pytest.mark.parametrize("damage", [b"[ejkernel.configs]\nno value\n", b"[a]\nb = \xff\xfe\n"])
def test_a_damaged_package_costs_one_warning_and_the_others_serve(tmp_path, monkeypatch, damage):
    for name, points in (
        ("broken", damage),
        ("shipper", b"[ejkernel.configs]\na = shipper\nb = odd\n"),
    ):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_bytes(points)
    (tmp_path / "shipper").mkdir()
    Bundle([entry(5)]).save(tmp_path / "shipper" / "one.json")

    class Odd:
        def find_spec(self, name, path=None, target=None):
            if name == "odd":
                raise RuntimeError("whoever looks for modules may fail")

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [Odd(), *sys.meta_path])
    shipped = Shipped()
    assert shipped.find(("cpu|x", "twice@v1", "0" * 16))[0]["config"] == {"block": 5}
    problems = sorted(map(str, shipped.problems))
    assert len(problems) == 2
    assert "b = odd" in problems[0]
    assert "broken-1.0.dist-info: its entry points cannot be read" in problems[1]


def test_earlier_sources_answer_first(tmp_path):
    Bundle([entry(1)]).save(tmp_path / "a.json")
    Bundle([entry(2)]).save(tmp_path / "b.json")
    found = Shipped(os.pathsep.join([str(tmp_path / "b.json"), str(tmp_path)]), packages=False)
    assert found.find(("cpu|x", "twice@v1", "0" * 16))[0]["config"] == {"block": 2}
    assert json.loads((tmp_path / "a.json").read_text())["version"] == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no *.json" in str(Shipped(str(empty), packages=False).problems[0])


def test_a_pipe_or_a_device_is_written_to_and_not_replaced(tmp_path):
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        Bundle().save(pipe)
        assert Bundle.loads(os.read(reader, 10_000)) == Bundle()
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.lstat(pipe).st_mode)
    Bundle().save(link)
    assert link.is_symlink()
    assert Bundle.load(file) == Bundle()
