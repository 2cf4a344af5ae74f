"""Ranking by the device's own time: profiles as a GPU and a TPU write them, and none on a CPU."""

from __future__ import annotations

import jax.numpy as jnp
import jax.profiler
import pytest

from ejkernel.ops import Tuner
from ejkernel.ops.tuner.bench import LocalBench
from ejkernel.ops.tuner.build import TuningTask
from ejkernel.ops.tuner.clock import DeviceTime, Stopwatch, busy_seconds, profile_of
from ejkernel.ops.tuner.isolation.worker_bench import WorkerBench

X = jnp.ones((8, 8))


def plane(name, **lines):
    """A plane of a profile in text form; an event is (start, length) in microseconds."""
    text = f'planes {{ name: "{name}" event_metadata {{ key: 1 value {{ id: 1 name: "e" }} }}'
    for number, (line, events) in enumerate(lines.items()):
        text += f' lines {{ id: {number} name: "{line.replace("_", " ")}"'
        for start, length in events:
            picoseconds = (round(start * 1e6), round(length * 1e6))
            text += " events { metadata_id: 1 offset_ps: %d duration_ps: %d }" % picoseconds  # noqa: UP031
        text += " }"
    return text + " }"


def profile(*planes):
    return jax.profiler.ProfileData.from_text_proto("\n".join(planes))


def test_streams_of_a_gpu_that_overlap_count_once():
    found = profile(
        plane("/host:CPU", python=[(0, 1000)]),
        plane("/device:GPU:0", Stream_1=[(0, 10), (20, 10)], Stream_2=[(5, 10), (28, 4)]),
    )
    assert busy_seconds(found) == pytest.approx(27e-6)


def test_a_tpu_is_busy_as_long_as_its_modules_run():
    found = profile(
        plane("/device:TPU:0", Steps=[(0, 500)], XLA_Modules=[(10, 30)], XLA_Ops=[(10, 5)])
    )
    assert busy_seconds(found) == pytest.approx(30e-6)


def test_of_several_devices_the_busiest_counts():
    found = profile(
        plane("/device:GPU:0", Stream_1=[(0, 10)]), plane("/device:GPU:1", Stream_1=[(0, 25)])
    )
    assert busy_seconds(found) == pytest.approx(25e-6)


def test_a_real_profile_of_a_cpu_has_no_device():
    found = profile_of(lambda: X @ X)
    assert any("CPU" in plane.name for plane in found.planes)
    assert busy_seconds(found) is None


def test_a_sample_is_the_devices_time_per_call():
    device = profile(plane("/device:GPU:0", Stream_1=[(0, 80)]))

    def read(function):
        function()
        return device

    device_time = DeviceTime(read)
    ticks = iter(range(100))
    watch = Stopwatch(lambda: X, lambda: float(next(ticks)), 8.0, device_time=device_time.of)
    watch.warm_up(1)  # one tick per call, so eight calls make a sample
    assert watch.sample() == pytest.approx(10e-6)
    assert device_time.works is True


def test_what_the_first_profile_says_holds_for_all():
    profiles = [profile(plane("/device:GPU:0", Stream_1=[(0, 1)])), profile()]
    device_time = DeviceTime(lambda function: profiles.pop(0))
    assert device_time.of(lambda: None) == pytest.approx(1e-6)
    with pytest.raises(RuntimeError, match="saw nothing of it"):
        device_time.of(lambda: None)
    calls = []
    silent = DeviceTime(lambda function: profile())
    assert silent.of(lambda: calls.append(1)) is None
    assert silent.of(lambda: calls.append(1)) is None
    assert calls == [1]  # the second time it is run without a profiler


def test_a_profiler_that_is_taken_leaves_it_to_the_wall_clock(tmp_path, caplog):
    device_time, calls = DeviceTime(), []
    with jax.profiler.trace(tmp_path):
        assert device_time.of(lambda: calls.append(1)) is None
    assert calls == [1]
    assert device_time.works is False
    assert "wall clock" in caplog.text


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_without_device_time_the_wall_clock_ranks(isolation):
    tuner = Tuner(progress=False, clock="device", isolation=isolation)
    work = TuningTask("sum", lambda cfg: lambda x: x + cfg, (X,), {}, [1, 2])
    outcome = tuner.tune(work)
    assert outcome.clock == "wall"
    assert outcome.about()["clock"] == "wall"
    assert outcome.seconds(outcome.best) > 0


def test_benches_know_their_clock_and_bad_ones_are_refused():
    assert LocalBench([X]).clock == "wall"
    assert WorkerBench([X]).clock == "wall"
    with pytest.raises(ValueError, match="clock='cpu' must be 'auto', 'device' or 'wall'"):
        Tuner(clock="cpu")
