"""A real Ray cluster on this machine: twenty operations, two workers, one of them killed."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from cluster_kernels import Halves
from jobs import ROOT

from ejkernel.ops import PersistentCache

HERE = pathlib.Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="RAY IS NOT INSTALLED: tuning on a cluster is not tested (pip install '.[ray]')",
    ),
]


def tunings(text):
    """The size and the process of each tuning that was begun."""
    return [tuple(map(int, line.split())) for line in text.splitlines()]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the driver reports; meanwhile the fifth tuning's worker is killed."""
    folder = tmp_path_factory.mktemp("cluster")
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "EJKERNEL_CACHE_DIR": str(folder / "cache"),
        "RAY_ADDRESS": "",
    }
    log = folder / "cache" / "tunings"
    killed = None
    with open(folder / "output.txt", "w") as output:
        driver = subprocess.Popen(
            [sys.executable, str(HERE / "cluster_driver.py"), str(folder)],
            env=settings,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 240
            while driver.poll() is None:
                assert time.monotonic() < deadline, (folder / "output.txt").read_text()
                begun = tunings(log.read_text()) if log.exists() else []
                if killed is None and len(begun) >= 5:
                    killed = begun[-1]
                    os.kill(killed[1], signal.SIGKILL)
                time.sleep(0.02)
        finally:
            driver.kill()
            driver.wait()
    text = (folder / "output.txt").read_text()
    assert driver.returncode == 0, text
    return {
        **json.loads((folder / "report.json").read_text()),
        "killed": killed,
        "output": text,
        "store": PersistentCache(folder / "store"),
    }


def test_all_twenty_are_in_the_store(told):
    store, halves = told["store"], Halves()
    assert len(store) == 20
    assert told["first"]["skipped"] == {}
    configs = told["first"]["configs"]
    assert set(configs) == {f"float32[{8 * (i + 1)}]" for i in range(20)}
    for key in store.keys():  # noqa: SIM118  a store is no dict
        assert key.op_id == halves.full_op_id
        assert key.device == told["first"]["device"]
        stored = store.get(key)
        assert configs[store.entry(key)["about"]["signature"]] == stored.rows
        assert store.entry(key)["about"]["seconds"] > 0


def test_the_killed_one_was_tried_again_and_none_was_tuned_twice(told):
    begun = [size for size, _ in tunings(told["log_after_first"])]
    killed = told["killed"][0]
    assert sorted(begun) == sorted([*(8 * (i + 1) for i in range(20)), killed])
    assert (
        f"worker that tuned {Halves().full_op_id} was lost (WorkerCrashedError)" in told["output"]
    )


def test_two_workers_shared_the_work(told):
    processes = {process for _, process in tunings(told["log_after_first"])}
    assert len(processes) >= 3  # two, and the one that took the killed one's place


def test_the_result_is_that_of_offline_tuning(told):
    assert told["first"]["types_fit"]
    assert all(seconds > 0 for seconds in told["first"]["seconds"])
    assert all(", on " in origin for origin in told["first"]["origins"])
    assert told["first"]["others"] == 0
    assert told["in_memory"] == 20


def test_a_cluster_that_was_started_here_is_ended_and_another_one_is_left_alone(told):
    assert told["up_after_first"] is False
    assert told["up_after_again"] is True


def test_what_is_finished_is_never_repeated(told):
    assert told["log_after_again"] == told["log_after_first"]
    assert told["again"]["configs"] == told["first"]["configs"]


def test_what_a_worker_cannot_find_is_skipped_with_the_reason(told):
    reasons = told["again"]["skipped"]
    assert len(reasons) == 2
    script = next(reason for label, reason in reasons.items() if "in_the_script" in label)
    assert "__main__:InTheScript cannot be imported by a worker" in script
    nowhere = next(reason for label, reason in reasons.items() if "nowhere" in label)
    assert "cannot be constructed without arguments" in nowhere
