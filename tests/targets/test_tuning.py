"""Static figures in tuning: what is refused is not measured, an estimate is never a result."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from target_kernels import Matmul, Tile

from ejkernel import targets
from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Kernel,
    PersistentCache,
    Tuner,
    device_fingerprint,
    import_bundle,
    verify_bundle,
)
from ejkernel.ops.config.outcome import Verdict
from ejkernel.ops.config.tiers.stored import reload_bundles
from ejkernel.ops.tuner.search.pruning import Pruned
from ejkernel.ops.tuner.session import tune_invocation
from ejkernel.store import Bundle
from ejkernel.targets.checking import Check, CheckResult
from ejkernel.targets.pruning import like_current_device
from ejkernel.targets.ranking import Estimate

USABLE = {entry.target.name for entry in targets.available() if entry.usable}
X = np.ones((64, 16), np.float32)


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int = 64


class RowSum(Kernel[Rows, jax.Array]):
    def __init__(self):
        super().__init__(name="row_sum_of_targets")

    def run(self, x, *, cfg):
        return jax.lax.map(lambda c: c.sum(1), x.reshape(-1, cfg.rows, x.shape[1])).reshape(-1)

    def candidate_cfgs(self, inv):
        return [Rows(1), Rows(2), Rows(4), Rows(7), Rows(8)]


@pytest.fixture(autouse=True)
def fresh():
    reload_bundles()
    yield
    reload_bundles()


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left_behind():
    yield
    targets.stop_workers()


@pytest.fixture
def row_sum():
    return RowSum()


def verdicts(outcome):
    return {trial.cfg.rows: trial.verdict for trial in outcome.trials}


def quick(**changes):
    return Tuner(iters=1, effort="quick", progress=False, **changes)


# --- the tuner's stage ---------------------------------------------------------------------------


def test_the_tuner_measures_what_the_pruner_leaves(row_sum):
    asked = []

    def pruner(kernel, inv, candidates):
        asked.append((kernel, inv.signature, list(candidates)))
        return Pruned([Rows(8), Rows(4)], [(Rows(7), "does not fit")], "a test")

    outcome = tune_invocation(quick(prune=pruner), row_sum.bind(X), row_sum)
    assert asked == [(row_sum, "float32[64,16]", [Rows(64), *row_sum.candidate_cfgs(None)])]
    assert verdicts(outcome) == {
        64: Verdict.MEASURED,  # the heuristic one is never left out
        8: Verdict.MEASURED,
        4: Verdict.MEASURED,
        7: Verdict.UNSUPPORTED,
        1: Verdict.NOT_TRIED,
        2: Verdict.NOT_TRIED,
    }
    assert [trial.cfg.rows for trial in outcome.trials][:2] == [8, 4]
    refused = next(trial for trial in outcome.trials if trial.cfg == Rows(7))
    assert refused.reason == "does not fit"
    assert outcome.notes == ("a test: 1 of 6 candidates refused unmeasured, 2 left out",)
    assert not outcome.incomplete


def test_nothing_is_pruned_without_being_asked(row_sum):
    outcome = tune_invocation(quick(), row_sum.bind(X), row_sum)
    assert set(verdicts(outcome).values()) == {Verdict.MEASURED, Verdict.FAILED}
    assert outcome.notes == ()


def test_a_pruner_that_knows_none_of_the_candidates_is_not_believed(row_sum):
    tuner = quick(prune=lambda kernel, inv, candidates: Pruned([Rows(999)]))
    outcome = tune_invocation(tuner, row_sum.bind(X), row_sum)
    assert outcome.count(Verdict.MEASURED) == 5


def test_a_pruner_that_fails_costs_the_tuning_not_the_call(row_sum):
    def pruner(kernel, inv, candidates):
        raise ZeroDivisionError("oops")

    selector = ConfigSelectorChain(cache=ConfigCache(), tuner=quick(prune=pruner))
    decision = selector.decide(row_sum.bind(X), row_sum)
    assert decision.tier == "heuristics"
    assert "prune raised ZeroDivisionError" in str(decision)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="prune=3 must be a function"):
        Tuner(prune=3)
    with pytest.raises(ValueError, match="best=0"):
        targets.StaticPruner(best=0)
    with pytest.raises(targets.TargetError, match="not known"):
        targets.StaticPruner("tpu-v1000")


def test_the_static_pruner_on_this_cpu(row_sum):
    pruner = targets.StaticPruner(best=2)
    outcome = tune_invocation(quick(prune=pruner), row_sum.bind(X), row_sum)
    found = verdicts(outcome)
    assert found[7] is Verdict.UNSUPPORTED  # 64 rows are no multiple of 7: it cannot be lowered
    assert found[64] is Verdict.MEASURED
    assert sum(verdict is Verdict.MEASURED for verdict in found.values()) <= 3
    assert "estimated for cpu" in outcome.notes[0]
    reason = next(trial.reason for trial in outcome.trials if trial.cfg == Rows(7))
    assert reason.startswith("does not compile for cpu: ")


def test_a_device_like_no_target_is_not_pruned(row_sum, monkeypatch, caplog):
    monkeypatch.setattr("ejkernel.targets.pruning.like_current_device", lambda: None)
    assert targets.StaticPruner()(row_sum, row_sum.bind(X), [Rows()]) is None
    assert "no target is like this device" in caplog.text


def test_the_current_device_is_found_among_the_targets():
    from ejkernel.ops.utils.fingerprint import StandIn, as_if_on

    assert like_current_device().name == "cpu"
    with as_if_on(StandIn("tpu", "TPU v6 lite")):
        assert like_current_device().name == "tpu-v6e"
    with as_if_on(StandIn("gpu", "NVIDIA H100 PCIe", "9.0", 114)):
        found = like_current_device()
        assert (found.name, found.gpu.cores) == ("cuda-sm90", 114)
        assert found.device_fingerprint == device_fingerprint()
    with as_if_on(StandIn("gpu", "NVIDIA T4", "7.5", 40)):
        assert like_current_device() is None


@pytest.mark.skipif("tpu-v5e" not in USABLE, reason="needs libtpu")
def test_the_tuner_skips_what_needs_more_vmem_than_there_is():
    class Narrow(Matmul):  # measured here by its run_xla, as if this machine had the TPU's limits
        def candidate_cfgs(self, inv):
            return [Tile(256, 128), Tile(1024, 512, 256)]

    kernel = Narrow("too_large_matmul")
    call = kernel.bind(np.ones((1024, 4096), np.float32), np.ones((4096, 512), np.float32))
    outcome = tune_invocation(quick(prune=targets.StaticPruner("tpu-v5e")), call, kernel)
    found = {trial.cfg: trial for trial in outcome.trials}
    assert found[Tile()].verdict is found[Tile(256, 128)].verdict is Verdict.MEASURED
    refused = found[Tile(1024, 512, 256)]
    assert refused.verdict is Verdict.UNSUPPORTED
    assert refused.reason.startswith("does not compile for tpu-v5e: RESOURCE_EXHAUSTED")
    assert "vmem" in refused.reason


# --- bundles of estimates ------------------------------------------------------------------------


@pytest.fixture
def bundle(row_sum, tmp_path, monkeypatch):
    """A bundle of estimates for this very CPU, as a run on it would find it."""
    path = tmp_path / "bundles" / "estimates.json"
    made = targets.export(row_sum.bind(X), path, target="cpu", best=2)
    assert Bundle.load(path) == made
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", str(path))
    return made


def selector(**changes):
    changes.setdefault("tuner", quick())
    return ConfigSelectorChain(cache=ConfigCache(), **changes)


def test_an_export_names_the_best_and_the_refused(row_sum, bundle):
    (entry,) = bundle
    about = entry["about"]
    assert entry["key"] == tuple(row_sum.bind(X).key)
    assert about["estimated"] is True
    assert about["target"] == "cpu"
    assert "seconds" not in about
    assert len(about["ranked"]) == 2
    seconds = [ranked["estimated_seconds"] for ranked in about["ranked"]]
    assert seconds == sorted(seconds)
    assert entry["config"] == about["ranked"][0]["config"]
    assert [refused["config"]["rows"] for refused in about["refused"]] == [7]
    assert verify_bundle(bundle) == []


def test_an_estimate_is_not_served_as_a_result(row_sum, bundle):
    decision = selector(autotune=False).decide(row_sum.bind(X), row_sum)
    assert decision.tier == "heuristics"
    assert "has an estimate for this call, and nothing measured" in str(decision)


def test_a_run_on_the_device_races_only_the_best(row_sum, bundle, tmp_path):
    store = PersistentCache(tmp_path / "store")
    decision = selector(persistent=store).decide(row_sum.bind(X), row_sum)
    (entry,) = bundle
    best = {ranked["config"]["rows"] for ranked in entry["about"]["ranked"]}
    found = verdicts(decision.about)
    measured = {rows for rows, verdict in found.items() if verdict is Verdict.MEASURED}
    assert measured == best | {64}
    assert found[7] is Verdict.UNSUPPORTED
    assert decision.tier == "autotune"
    assert f"estimated for cpu, from {tmp_path}" in decision.reason
    again = selector(persistent=store).decide(row_sum.bind(X), row_sum)
    assert (again.tier, again.cfg) == ("persistent", decision.cfg)

    everything = selector(tuner=quick(prune=False)).decide(row_sum.bind(X), row_sum)
    assert everything.about.count(Verdict.MEASURED) == 5


def test_an_estimate_in_a_store_is_not_served_and_gives_way(row_sum, bundle, tmp_path, monkeypatch):
    monkeypatch.delenv("EJKERNEL_CONFIG_PATH")
    store = PersistentCache(tmp_path / "store")
    assert len(import_bundle(store, bundle).added) == 1
    chain = selector(persistent=store, autotune=False)
    assert chain.decide(row_sum.bind(X), row_sum).tier == "heuristics"
    key = row_sum.bind(X).key
    assert chain.known_config(key.op_id, key.call_key) is None
    assert selector(persistent=store).decide(row_sum.bind(X), row_sum).tier == "autotune"
    assert "estimated" not in store.entry(key)["about"]


def test_a_measured_bundle_comes_before_an_estimated_one(row_sum, bundle, tmp_path, monkeypatch):
    (entry,) = bundle
    measured = {**entry, "config": {"rows": 4}, "about": {"seconds": 1.0}}
    Bundle([measured]).save(tmp_path / "z" / "measured.json")
    paths = f"{tmp_path / 'bundles'}:{tmp_path / 'z'}"
    monkeypatch.setenv("EJKERNEL_CONFIG_PATH", paths)
    decision = selector(autotune=False).decide(row_sum.bind(X), row_sum)
    assert (decision.tier, decision.cfg) == ("bundle", Rows(4))


def test_estimates_of_a_changed_kernel_are_not_used(row_sum, bundle, tmp_path, monkeypatch):
    (entry,) = bundle
    stale = {**entry, "about": {**entry["about"], "source": "another"}}
    Bundle([stale]).save(tmp_path / "bundles" / "estimates.json")
    reload_bundles()
    outcome = tune_invocation(quick(), row_sum.bind(X), row_sum)
    assert outcome.count(Verdict.MEASURED) == 5


def test_a_result_can_be_exported_and_is_keyed_for_its_device():
    kernel = Matmul("exported_matmul")
    shape = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    inv = dataclasses.replace(
        kernel.bind(shape, shape), metadata={"device": targets.find("tpu-v6e").device_fingerprint}
    )
    entries = (
        Check(Tile(128), True, seconds=1.0, estimate=Estimate(2.0, "schedule")),
        Check(Tile(256), True, seconds=1.0, estimate=Estimate(1.0, "memory")),
        Check(Tile(512), False, "too large", "much too large", 0.5),
    )
    result = CheckResult(targets.find("tpu-v6e"), inv, entries)
    (entry,) = targets.export([result])
    assert entry["key"][0] == "tpu|tpu-v6-lite"
    assert entry["config"]["rows"] == 256
    assert [item["bound"] for item in entry["about"]["ranked"]] == ["memory", "schedule"]
    assert entry["about"]["refused"][0]["reason"] == "too large"
    nothing = dataclasses.replace(result, entries=entries[2:])
    with pytest.raises(targets.TargetError, match=r"no config of exported_matmul.*too large"):
        targets.export(nothing)


def test_what_cannot_be_exported_is_said(row_sum):
    with pytest.raises(ValueError, match="calls is empty"):
        targets.export([], target="cpu")
    with pytest.raises(ValueError, match="best=0"):
        targets.export(row_sum.bind(X), target="cpu", best=0)
    with pytest.raises(TypeError, match="target= is needed"):
        targets.export(row_sum.bind(X))
    with pytest.raises(TypeError, match="calls holds 'row_sum'"):
        targets.export(["row_sum"], target="cpu")
    lowered = targets.check(row_sum, X, target="cpu", compile=False)
    with pytest.raises(targets.TargetError, match="only lowered"):
        targets.export(lowered)
