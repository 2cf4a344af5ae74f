"""The rules of agreement between processes, with a store in memory."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import pytest

from ejkernel.fleet import AgreementError
from ejkernel.fleet import agreement as agreement_module
from ejkernel.fleet.agreement import JobAgreement, question_of
from ejkernel.ops import AutotunePolicy, ConfigCache, Decision, Kernel
from ejkernel.ops.config.tiers.request import Request

X = jax.ShapeDtypeStruct((8,), "float32")


class Store:
    """What the coordination service gives, for one of several imagined processes."""

    def __init__(self, process, shared):
        self.process = process
        self.shared = shared

    def set_first(self, key, value):
        return self.shared.setdefault(key, value) is value

    def set(self, key, value):
        self.shared[key] = value

    def try_get(self, key):
        return self.shared.get(key)

    def get(self, key, seconds):
        return self.try_get(key)


@dataclasses.dataclass(frozen=True)
class Config:
    rows: Any = 1


class Rows(Kernel[Config, jax.Array]):
    def run(self, x, *, cfg):
        return x


def request_of(kernel, x=X, policy=None, events=None):
    inv = kernel.bind(x)

    def emit(event, **data):
        if events is not None:
            events.append((event, data))

    return Request(inv, kernel, inv.key, policy or AutotunePolicy(), emit)


def decision_of(request, cfg, **more):
    return Decision(cfg, "autotune", request.key, "measured", **more)


def test_the_second_process_reads_what_the_first_decided():
    shared, rows, events = {}, Rows(), []
    first, second = (JobAgreement(Store(process, shared)) for process in (0, 1))
    request = request_of(rows, events=events)
    trials = {"seconds": 0.5, "trials": [1, 2, 3]}
    decided = first.settle(request, 0, lambda r: decision_of(r, Config(np.int64(4)), about=trials))
    assert decided.reason == "measured"
    assert type(decided.cfg.rows) is int  # the deciding process runs with what it sent
    read = second.settle(request, 0, lambda r: pytest.fail("asked twice"))
    assert read.cfg == Config(4)
    assert (read.tier, read.reason) == ("autotune", "agreed: decided by process 0: measured")
    assert read.about == {"seconds": 0.5}
    assert events == [("agreed", {"cfg": Config(4), "tier": "autotune", "process": 0})]


def test_each_policy_generation_and_shape_is_a_question_of_its_own():
    rows = Rows()
    plain = request_of(rows)
    questions = {
        question_of(plain, 0),
        question_of(plain, 1),
        question_of(request_of(rows, policy=AutotunePolicy(validate_backward=True)), 0),
        question_of(request_of(rows, jax.ShapeDtypeStruct((9,), "float32")), 0),
        question_of(dataclasses.replace(plain, offline=True), 0),
    }
    assert len(questions) == 5
    elsewhere = plain.key._replace(device="cpu|another-model|64-threads")
    assert question_of(dataclasses.replace(plain, key=elsewhere), 0) in questions
    on_gpu = plain.key._replace(device="gpu|h100")
    assert question_of(dataclasses.replace(plain, key=on_gpu), 0) not in questions


def test_a_config_that_is_no_data_stops_every_process():
    shared, rows = {}, Rows()
    first, second = (JobAgreement(Store(process, shared)) for process in (0, 1))
    with pytest.raises(AgreementError, match=r"cannot be sent to the other processes: .*rows"):
        first.settle(request_of(rows), 0, lambda r: decision_of(r, Config(object())))
    with pytest.raises(AgreementError, match=r"process 0 failed to decide .* cannot be sent"):
        second.settle(request_of(rows), 0, lambda r: pytest.fail("decided for itself"))


def test_tuning_waits_for_nobody():
    """What a kernel under measurement calls is answered here, whoever has claimed it."""
    shared, rows = {}, Rows()
    agreement = JobAgreement(Store(0, shared))
    inner = request_of(rows, jax.ShapeDtypeStruct((99,), "float32"))
    shared[f"{question_of(inner, 0)}/claim"] = "1"

    def ask(request):
        nested = agreement.settle(inner, 0, lambda r: decision_of(r, Config(7)))
        return decision_of(request, nested.cfg)

    assert agreement.settle(request_of(rows), 0, ask).cfg == Config(7)
    assert f"{question_of(inner, 0)}/answer" not in shared


def test_agreement_can_be_turned_off(monkeypatch):
    monkeypatch.setattr(agreement_module, "connect", lambda: pytest.fail("connected"))
    monkeypatch.setenv("EJKERNEL_AGREEMENT_SECONDS", "0")
    assert agreement_module.job_agreement() is None


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan"])
def test_a_limit_that_is_no_time_is_an_error(monkeypatch, value):
    monkeypatch.setenv("EJKERNEL_AGREEMENT_SECONDS", value)
    with pytest.raises(ValueError, match=f"EJKERNEL_AGREEMENT_SECONDS='{value}' is not a time"):
        agreement_module.job_agreement()


def test_a_jax_without_the_store_is_a_clear_error(monkeypatch):
    from jax._src import distributed

    state = types.SimpleNamespace(client=object(), process_id=0, num_processes=2)
    monkeypatch.setattr(distributed, "global_state", state)
    with pytest.raises(AgreementError, match=r"no key_value_set.*EJKERNEL_AGREEMENT_SECONDS=0"):
        agreement_module.job_agreement()
    monkeypatch.setattr(distributed, "global_state", object())
    with pytest.raises(AgreementError, match=r"its key-value store is not where JAX"):
        agreement_module.job_agreement()


def test_installing_and_clearing_begin_a_new_generation():
    """Only what every process does alike counts; `put` is each one's own."""
    cache, key = ConfigCache(), request_of(Rows()).key
    cache.put(key, Config(2))
    cache.put_quietly(key, Config(3))
    assert cache.generation == 0
    cache.install({key: Config(4), ("cpu|x", "rows@v1", "0" * 16): Config(5)})
    assert (cache.generation, cache.get(key), cache.get("cpu|x", "rows@v1", "0" * 16)) == (
        1,
        Config(4),
        Config(5),
    )
    cache.clear()
    assert (cache.generation, len(cache)) == (2, 0)
