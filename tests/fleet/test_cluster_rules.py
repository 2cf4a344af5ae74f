"""The rules of tuning on a cluster, without one: what is sent, and what is tried again."""

from __future__ import annotations

import logging
import pickle
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from cluster_kernels import Config, Halves

from ejkernel.fleet import ClusterResult, ray_session, tune_on_cluster
from ejkernel.fleet.jobs import Job, JobResult, JobSettings, job_of, run_job
from ejkernel.ops import (
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    PersistentCache,
    Tuner,
    device_fingerprint,
)

X = jax.ShapeDtypeStruct((8,), "float32")


@pytest.fixture
def store(tmp_path):
    return PersistentCache(tmp_path / "store")


@pytest.fixture
def selector(store):
    return ConfigSelectorChain(ConfigCache(), tuner=Tuner(effort="quick"), persistent=store)


def settings_of(store, **settings):
    return JobSettings(store, AutotunePolicy(), {"effort": "quick"}, settings)


# --- what is sent ---------------------------------------------------------------------------------


def test_a_job_is_run_once_and_then_found(store, tmp_path):
    halves = Halves()
    inv = halves.bind(X)
    job = pickle.loads(pickle.dumps(job_of(inv)))
    assert job == Job("halves@v1", inv.call_key, job.specification)
    settings = pickle.loads(pickle.dumps(settings_of(store)))
    result = run_job(job, "cpu", settings)
    assert not result.refused
    assert result.device == device_fingerprint()
    assert result.reason.startswith("measured 2 of 2 candidates")
    assert result.rebuilt(inv.kernel) == store.get(inv.key)
    again = run_job(job, "cpu", settings)
    assert again.reason.startswith("stored on ")
    assert (again.config, again.seconds) == (result.config, result.seconds)
    assert len((tmp_path / "ejkernel-cache" / "tunings").read_text().splitlines()) == 1


def test_what_cannot_be_sent_says_why():
    class Inside(Halves):
        pass

    assert "Inside cannot be imported by a worker" in job_of(Inside().bind(X))
    assert "cannot be written down" in job_of(Halves().bind(lambda x: x))


def test_a_worker_refuses_what_it_cannot_do(store):
    job = job_of(Halves().bind(X))
    wrong_device = run_job(job, "gpu", settings_of(store))
    assert "JAX finds a cpu there and no gpu" in wrong_device.refused
    unknown = Job("gone@v1", "0" * 16, "{'op':'gone@v1','kernel':'no.such:Thing','args':[]}")
    assert "No module named 'no'" in run_job(unknown, "cpu", settings_of(store)).refused
    other_call = Job("halves@v1", "0" * 16, job.specification)
    assert "it is another call" in run_job(other_call, "cpu", settings_of(store)).refused
    assert len(store) == 0


def test_jax_settings_are_sent(store):
    with jax.enable_x64(True):
        inv = Halves().bind(jax.ShapeDtypeStruct((8,), "float64"))
        job = job_of(inv)
    try:
        assert "it is another call" in run_job(job, "cpu", settings_of(store)).refused
        result = run_job(job, "cpu", settings_of(store, jax_enable_x64=True))
        assert not result.refused
    finally:
        jax.config.update("jax_enable_x64", False)


# --- handing out ---------------------------------------------------------------------------------


class RayError(Exception):
    pass


class WorkerCrashedError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """A cluster that answers as it is told to: per operation size, a list of answers."""

    exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, answers, machines=({"CPU": 2.0, "node:here": 1.0},)):
        self.answers = answers
        self.machines = machines
        self.started = []
        self.most_at_once = 0
        self.options = {}

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": dict(machine)} for machine in self.machines]

    def remote(self, **_):
        def options(**options):
            self.options = options
            return types.SimpleNamespace(remote=self.start)

        return lambda function: types.SimpleNamespace(options=options)

    def start(self, job, kind, settings):
        assert kind == "cpu"
        reference = (job.call_key, len(self.started))
        self.started.append(reference)
        return reference

    def wait(self, running, timeout, num_returns=1):
        self.most_at_once = max(self.most_at_once, len(running))
        return running[:1], running[1:]

    def get(self, reference):
        answer = self.answers[reference[0]].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def ray_with(monkeypatch):
    def use(*answers, **more):
        ray = FakeRay(*answers, **more)
        monkeypatch.setitem(sys.modules, "ray", ray)
        return ray

    return use


def report_of(rows, device="cpu|there"):
    name = f"{Config.__module__}:Config"
    return JobResult(
        device=device, host="there", config={"rows": rows}, config_type=name, reason="measured"
    )


def calls(count):
    return [Halves().bind(jnp.ones(2 * (i + 1))) for i in range(count)]


def test_a_lost_worker_is_tried_again_and_the_others_are_not(selector, ray_with, caplog):
    good, lost, broken, hopeless = calls(4)
    answers = {
        good.call_key: [report_of(2)],
        lost.call_key: [WorkerCrashedError("gone"), WorkerCrashedError("gone"), report_of(1)],
        broken.call_key: [RayTaskError(ImportError("no ejkernel"))],
        hopeless.call_key: [WorkerCrashedError("again")] * 3,
    }
    ray = ray_with(answers)
    with caplog.at_level(logging.WARNING):
        result = tune_on_cluster(selector, [good, lost, broken, hopeless, good], retries=2)
    assert isinstance(result, AutotuningResult)
    assert {entry.call_key: entry.cfg for entry in result} == {
        good.call_key: Config(2),
        lost.call_key: Config(1),
    }
    reasons = {skipped.label.rpartition(":")[2]: skipped.reason for skipped in result.skipped}
    assert reasons == {
        broken.call_key: "the worker raised ImportError('no ejkernel')",
        hopeless.call_key: "its worker was lost 3 times: again",
    }
    counts = [sum(key == inv.call_key for key, _ in ray.started) for inv in calls(4)]
    assert counts == [1, 3, 1, 3]
    assert (
        sum("was lost (WorkerCrashedError); it is tried again" in m for m in caplog.messages) == 4
    )


def test_a_store_that_is_not_shared_is_noticed(selector, ray_with, caplog):
    (inv,) = calls(1)
    ray_with({inv.call_key: [report_of(2)]})
    with caplog.at_level(logging.WARNING):
        tune_on_cluster(selector, [inv])
    assert any("file system that all machines share" in message for message in caplog.messages)


def test_workers_limit_what_runs_at_once(selector, ray_with):
    ray = ray_with({inv.call_key: [report_of(1)] for inv in calls(5)})
    assert len(tune_on_cluster(selector, calls(5), workers=2)) == 5
    assert ray.most_at_once == 2


def test_several_kinds_of_device_are_results_of_their_own(selector, ray_with):
    (inv,) = calls(1)
    ray = ray_with({inv.call_key: [report_of(1, "cpu|small"), report_of(2, device_fingerprint())]})
    result = tune_on_cluster(selector, [inv], resources=[{"CPU": 1}, {"CPU": 2}])
    assert len(ray.started) == 2
    assert isinstance(result, ClusterResult)
    assert (result.device, [entry.cfg for entry in result]) == (device_fingerprint(), [Config(2)])
    (other,) = result.others
    assert (other.device, [entry.cfg for entry in other]) == ("cpu|small", [Config(1)])
    assert "cpu|small" in str(result)


def test_a_config_that_does_not_fit_here_is_skipped(selector, ray_with):
    (inv,) = calls(1)
    ray_with({inv.call_key: [JobResult(device="cpu|x", host="there", config={"columns": 1})]})
    (skipped,) = tune_on_cluster(selector, [inv]).skipped
    assert "there tuned it, but its config cannot be used here" in skipped.reason


# --- resources -----------------------------------------------------------------------------------


def test_by_default_one_task_takes_all_that_two_would_share():
    two_sizes = FakeRay({}, [{"CPU": 8.0, "memory": 1.0}, {"CPU": 64.0}])
    assert ray_session.default_resources(two_sizes, "cpu") == {"CPU": 64.0}
    gpus = FakeRay({}, [{"CPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}])
    assert ray_session.default_resources(gpus, "gpu") == {"GPU": 1, "CPU": 8.0}
    assert ray_session.default_resources(FakeRay({}, [{"TPU": 4.0}]), "tpu") == {"TPU": 4.0}
    with pytest.raises(ValueError, match=r"no machine .* has a TPU"):
        ray_session.default_resources(gpus, "tpu")


def test_resources_become_options_and_a_kind_of_device():
    taken = {"GPU": 1, "CPU": 4, "accelerator_type:H100": 0.001, "memory": 10}
    assert ray_session.task_options(taken) == {
        "num_cpus": 4,
        "num_gpus": 1,
        "resources": {"accelerator_type:H100": 0.001},
        "memory": 10,
    }
    assert [ray_session.device_kind_of(one) for one in (taken, {"TPU": 4}, {"CPU": 1})] == [
        "gpu",
        "tpu",
        "cpu",
    ]


def test_resources_that_nobody_has(caplog):
    ray = FakeRay({}, [{"CPU": 2.0}, {"GPU": 1.0}])
    with pytest.raises(ValueError, match=r"no machine of the Ray cluster has .*'CPU': 2, 'GPU': 1"):
        ray_session.check_resources(ray, {"CPU": 2, "GPU": 1}, started=True)
    ray_session.check_resources(ray, {"CPU": 4}, started=False)  # one may join
    assert "waiting for one to join" in caplog.text
    ray_session.check_resources(ray, {"CPU": 2}, started=True)


# --- arguments -----------------------------------------------------------------------------------


def test_ray_is_not_needed_where_nothing_is_to_be_tuned(selector, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert len(tune_on_cluster(selector, [])) == 0
    with pytest.raises(ImportError, match=r"pip install '\.\[ray\]'"):
        tune_on_cluster(selector, calls(1))


def test_a_second_cluster_is_refused(selector, ray_with):
    ray_with({})
    with pytest.raises(ValueError, match="address='auto' was given, but this process is connected"):
        tune_on_cluster(selector, calls(1), address="auto")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"workers": 0}, ValueError, "workers=0 must be a whole number >= 1"),
        ({"retries": -1}, ValueError, "retries=-1 must be a whole number >= 0"),
        ({"what": 7}, TypeError, "a lowered computation, its text, invocations or None, got 7"),
        ({"what": [7]}, TypeError, "expected an Invocation, got 7"),
        ({"resources": "CPU"}, TypeError, "resources must be a mapping"),
        ({"resources": {}}, TypeError, "resources must be a mapping"),
        ({"resources": []}, TypeError, "resources must be a mapping"),
    ],
)
def test_wrong_arguments_are_named(selector, ray_with, arguments, error, message):
    ray_with({})
    with pytest.raises(error, match=message):
        tune_on_cluster(selector, **{"what": calls(1), **arguments})


def test_a_selector_that_cannot_be_used_is_named():
    with pytest.raises(TypeError, match=r"takes \(selector, what\)"):
        tune_on_cluster("model")
    with pytest.raises(ValueError, match="keeps nothing on disk"):
        tune_on_cluster(ConfigSelectorChain(ConfigCache()))

    class Own(Tuner):
        pass

    with pytest.raises(TypeError, match="cannot be sent to workers"):
        tune_on_cluster(ConfigSelectorChain(ConfigCache(), tuner=Own(), persistent="store"))
