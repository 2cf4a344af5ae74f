"""The most that a machine can do: measured once, stored, and what shares of it are shown."""

from __future__ import annotations

import dataclasses
import json
import logging
import time

import jax
import jax.numpy as jnp
import pytest
from sample_runs import attention, plain_run

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Kernel,
    PersistentCache,
    Tuner,
    Work,
    autotune_lowered,
    device_fingerprint,
)
from ejkernel.report import CountedWork, Roofline, Run, render, roofline
from ejkernel.report.formatting import rate, share_of_peak

HERE = "cpu|x|2-threads"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, on a machine that is not busy."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(roofline, "_measured", {})
    monkeypatch.setattr(roofline, "_is_busy", lambda: False)
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """What is measured, instead of measuring it."""
    seen = []

    def flops(dtype):
        seen.append(dtype)
        return 1e11

    def memory():
        seen.append("memory")
        return 1e10

    monkeypatch.setattr(roofline, "flops_per_second", flops)
    monkeypatch.setattr(roofline, "bytes_per_second", memory)
    return seen


def test_it_is_measured_once_and_stored(cache, measured, monkeypatch):
    first = roofline.roofline_of(device_fingerprint(), ["float32"])
    assert measured == ["float32", "memory"]
    monkeypatch.setattr(roofline, "_measured", {})  # another process
    assert roofline.roofline_of(device_fingerprint(), ["float32"]) == first
    assert measured == ["float32", "memory"]
    second = roofline.roofline_of(device_fingerprint(), ["bfloat16", "int8", ""])
    assert measured == ["float32", "memory", "bfloat16"]
    assert set(second.flops) == {"float32", "bfloat16"}
    (file,) = (cache / "rooflines").iterdir()
    assert json.loads(file.read_text())["device"] == device_fingerprint()


def test_another_machine_is_never_measured_here(cache, measured):
    assert roofline.roofline_of("tpu|v5e", ["float32"]) is None
    assert measured == []
    roofline._store(Roofline("tpu|v5e", {"float32": 1e14}, 1e12))
    assert roofline.roofline_of("tpu|v5e", ["float32", "bfloat16"]).bytes == 1e12
    assert measured == []


def test_a_busy_machine_is_measured_again_another_time(cache, measured, monkeypatch):
    monkeypatch.setattr(roofline, "_is_busy", lambda: True)
    assert roofline.roofline_of(device_fingerprint()) is not None
    assert roofline.roofline_of(device_fingerprint()) is not None  # within the process it stays
    assert measured == ["float32", "memory"]
    assert not (cache / "rooflines").exists()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"ejkernel_roofline": 1}', '{"ejkernel_roofline": 9}', "\0"]
)
def test_a_damaged_file_is_measured_again(cache, measured, text):
    (cache / "rooflines").mkdir(mode=0o700)
    (cache / "rooflines" / roofline._file_name(device_fingerprint())).write_text(text)
    assert roofline.roofline_of(device_fingerprint()).bytes == 1e10


def test_without_a_folder_it_is_measured_and_said(cache, measured, caplog):
    (cache / "rooflines").write_text("a file in its place")
    with caplog.at_level(logging.INFO, "ejkernel"):
        assert roofline.roofline_of(device_fingerprint()) is not None
    assert "is not stored" in caplog.text


def test_a_device_without_room_has_no_peak(cache, monkeypatch, caplog):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 256 MB")

    monkeypatch.setattr(roofline, "bytes_per_second", full)
    monkeypatch.setattr(roofline, "flops_per_second", lambda dtype: 1e11)
    with caplog.at_level(logging.INFO, "ejkernel"):
        assert roofline.roofline_of(device_fingerprint()) is None
    assert "RESOURCE_EXHAUSTED" in caplog.text


def test_measuring_is_quick_and_possible(monkeypatch):
    began = time.process_time()
    assert 1e8 < roofline.flops_per_second("float32") < 1e16
    assert 1e8 < roofline.bytes_per_second() < 1e14
    assert time.process_time() - began < 8  # of all threads; by the clock under two seconds
    assert roofline.flops_per_second("float64") is None  # not without jax_enable_x64


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int = 16


class CountedRows(Kernel[Rows, jax.Array]):
    def run(self, x, *, cfg):
        return jax.lax.map(lambda c: c.sum(1), x.reshape(-1, cfg.rows, x.shape[1])).reshape(-1)

    def candidate_cfgs(self, inv):
        return [Rows(8), Rows(16)]

    def work(self, inv):
        return Work(flops=inv.args[0].size, bytes=4.0 * inv.args[0].size)


class UncountedRows(CountedRows):
    def work(self, inv):
        return None


def tuned(kernel, folder):
    store = PersistentCache(folder)
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(effort="quick"), persistent=store)
    return autotune_lowered(selector, jax.jit(kernel).lower(jnp.ones((64, 16)))), store


def test_a_record_has_work_and_peak_and_so_has_one_of_the_store(cache, measured):
    result, store = tuned(CountedRows(), cache / "store")
    run = Run.of(result, store=store)
    assert run.operations[0].work == CountedWork(1024.0, 4096.0, "float32")
    assert run.roofline.bytes == 1e10
    assert [c.order for c in run.operations[0].candidates] == [1, 2]
    from_store = Run.of_store(store)
    assert from_store.operations[0].work == run.operations[0].work
    assert sorted(c.order for c in from_store.operations[0].candidates) == [1, 2]
    assert from_store.roofline == run.roofline
    assert "FLOP/s" in render(from_store)
    assert Run.loads(run.dumps()) == run


def test_nothing_is_measured_for_operations_that_do_not_count(cache, measured):
    result, store = tuned(UncountedRows(), cache / "store")
    assert Run.of(result, store=store).roofline is None
    assert measured == []


@pytest.mark.parametrize(
    "stored", [None, 7, {}, {"flops": "many"}, {"flops": -1}, {"flops": 1e300}, {"dtype": [1]}]
)
def test_any_stored_work_is_read(stored):
    from ejkernel.report.collect import _work

    found = _work(stored)
    assert found is None or found.flops is None


def test_shares_of_the_peak():
    machine = Roofline(HERE, {"float32": 1e11, "bfloat16": 2e10}, 1e10)
    assert machine.least_seconds(CountedWork(1e9, 1e9, "float32")) == (0.1, "memory")
    assert machine.peak("bfloat16") == 1e11  # computed as float32
    assert machine.peak("float64") is None
    assert machine.least_seconds(CountedWork(1e9, 1e9, "float64")) is None
    assert machine.least_seconds(CountedWork()) is None
    norm = CountedWork(bytes=1e8)
    assert share_of_peak(machine, norm, 0.02) == "50 % of this machine’s peak, limited by memory"
    assert "stays in the caches" in share_of_peak(machine, norm, 0.005)
    product = CountedWork(flops=1e9, dtype="float32")
    assert share_of_peak(machine, product, 0.005).endswith(
        "; more than plain matrix products reach"
    )
    assert share_of_peak(machine, norm, 100.0).startswith("under 1 %")
    assert share_of_peak(None, norm, 0.02) == share_of_peak(machine, norm, None) == ""
    assert rate(norm, 0.02) == "5.00 GB/s"
    assert rate(None, 0.02) == rate(norm, None) == rate(norm, 0.0) == rate(CountedWork(), 1.0) == ""


def test_figures_that_no_machine_has_are_refused():
    for bad in (0.0, -1.0, float("inf"), float("nan"), 1e31):
        with pytest.raises(ValueError, match="per second"):
            Roofline(HERE, {"float32": 1e11}, bad)
    with pytest.raises(ValueError, match="no count"):
        CountedWork(flops=-1.0)


def test_pages_show_rates_next_to_times():
    page = render(plain_run())
    assert "209 GFLOP/s" in page
    assert "80 % of this machine’s peak, limited by compute" in page
    assert "260 GFLOP/s (float32), 34.0 GB/s to and from memory" in page
    text = render(plain_run(), "md")
    assert "209 GFLOP/s" in text
    assert "80 %" in text
    bare = dataclasses.replace(
        plain_run(), operations=(dataclasses.replace(attention(), work=None),), roofline=None
    )
    assert "FLOP/s" not in render(bare)
    assert "FLOP/s" not in render(bare, "md")
