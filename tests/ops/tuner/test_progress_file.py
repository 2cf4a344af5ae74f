"""What other processes see of a tuning run: a small file, while it lasts, at no cost."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import pytest

from ejkernel.ops import ConfigSelectorChain, Kernel, Tuner, autotune
from ejkernel.ops.tuner import progress_file as files
from ejkernel.ops.tuner.progress_file import Best, ProgressFile, TuningProgress, running
from ejkernel.ops.utils.processes import ProcessIdentity


@dataclasses.dataclass(frozen=True)
class Scale:
    parts: int = 1


class Doubled(Kernel[Scale, object]):
    def run(self, x, *, cfg):
        return sum([x] * 2) * cfg.parts / cfg.parts

    def candidate_cfgs(self, inv):
        return [Scale(1), Scale(2), Scale(4)]


def seen_while_tuning(monkeypatch, run):
    """What `running` gives after each step of a run."""
    monkeypatch.setattr(files, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(files, "LARGEST_SHARE", float("inf"))
    seen = []
    write = ProgressFile.write

    def spied(self, state):
        write(self, state)
        seen.extend(running())

    monkeypatch.setattr(ProgressFile, "write", spied)
    run()
    return seen


def test_a_run_says_how_far_it_is_and_then_nothing(monkeypatch):
    def run():
        autotune(lambda x, y: (Doubled()(x), Doubled()(y)), jnp.ones(8), jnp.ones(16))

    seen = seen_while_tuning(monkeypatch, run)
    assert running() == []
    assert os.listdir(files.default_folder()) == []
    assert (seen[0].operation, seen[0].phase) == (0, "timing each operation once")
    assert [progress.operations for progress in seen] == [2] * len(seen)
    for number in (1, 2):
        steps = [progress for progress in seen if progress.operation == number]
        assert steps[0].name.startswith("doubled@v1(float32[")
        assert steps[0].phase == "compiling and checking"
        assert (steps[0].tried, steps[0].candidates) == (0, 3)
        tried = [progress.tried for progress in steps]
        assert tried == sorted(tried)
        assert tried[-1] == 3
        assert steps[-1].phase.startswith("racing ")
        assert steps[-1].best.startswith("Scale(parts=")
        assert steps[-1].seconds > 0
        assert steps[-1].heuristic_seconds > 0
        assert steps[-1].process == ProcessIdentity.here()


def test_nothing_is_written_when_nothing_is_tuned():
    selector = ConfigSelectorChain(tuner=Tuner(progress=False))

    def function(x):
        return Doubled()(x)

    autotune(function, jnp.ones(8), selector=selector)
    os.rmdir(files.default_folder())
    autotune(function, jnp.ones(8), selector=selector)  # it is known by now
    assert not files.default_folder().exists()


def test_writes_are_few(monkeypatch):
    now, count = [0.0], [0]

    class Counting:
        def write(self, *args, **kwargs):
            count[0] += 1
            now[0] += 0.001

        def remove(self, name): ...
        def names(self): return []  # fmt: skip

        def __enter__(self): ...
        def __exit__(self, *error): ...

    monkeypatch.setattr(files.PrivateFolder, "open", lambda *args, **kwargs: Counting())
    file = ProgressFile(1, clock=lambda: now[0])
    operation = file.operation("f", lambda: None)
    for done in range(10_000):
        operation.step("round", name="f", running=2, done=done)
        now[0] += 0.001
    assert now[0] / 0.25 - 2 <= count[0] <= now[0] / 0.25 + 1
    file.close()


def test_a_slow_folder_is_written_to_less_often(monkeypatch):
    now = [0.0]

    class Slow:
        def write(self, *args, **kwargs):
            now[0] += 2.0

        def remove(self, name): ...
        def names(self): return []  # fmt: skip

    monkeypatch.setattr(files.PrivateFolder, "open", lambda *args, **kwargs: Slow())
    operation = ProgressFile(1, clock=lambda: now[0]).operation("f", lambda: None)
    for _ in range(700):
        operation.step("round", name="f", running=2, done=1)
        now[0] += 1.0
    assert now[0] == 700 + 2 * 2.0  # written at 0 and after 400 seconds


@pytest.mark.parametrize("what", ["a file", "not writable", "no home", "removed meanwhile"])
def test_a_run_goes_on_without_its_file(monkeypatch, tmp_path, what):
    if what == "a file":
        files.default_folder().parent.mkdir(parents=True)
        files.default_folder().write_text("")
    elif what == "not writable":
        folder = files.default_folder()
        folder.mkdir(parents=True)
        monkeypatch.setattr(
            files.PrivateFolder, "write", lambda *args, **kwargs: (_ for _ in ()).throw(OSError())
        )
    elif what == "no home":
        monkeypatch.setattr(
            files, "default_folder", lambda: (_ for _ in ()).throw(files.environment.NoHomeFolder())
        )
    else:
        write = ProgressFile.write

        def removing(self, state):
            write(self, state)
            if self._folder is not None:
                for name in self._folder.names():
                    self._folder.remove(name)
                self._folder.path.rmdir() if self._folder.path.exists() else None

        monkeypatch.setattr(files, "SECONDS_BETWEEN", 0.0)
        monkeypatch.setattr(ProgressFile, "write", removing)
    tuner = Tuner(progress=False)
    best = tuner.autotune(lambda cfg: lambda x: x * 2, (jnp.ones(8),), {}, [Scale(1), Scale(2)])
    assert isinstance(best, Scale)


def example(**changes):
    values = {
        "name": "f@v1(x)", "device": "cpu|x", "phase": "racing 2 candidates", "operation": 1,
        "operations": 1, "tried": 4, "candidates": 4, "done": 10, "steps": 40, "best": "A(1)",
        "seconds": 1e-3, "heuristic_seconds": None, "limit": None, "began": 100.0,
        "operation_began": 100.0, "phase_began": 110.0, "when": 120.0,
        "process": dataclasses.asdict(ProcessIdentity.here()),
    }  # fmt: skip
    return json.dumps(values | changes).encode()


def test_time_left():
    def left(now, **changes):
        return TuningProgress.loads(example(**changes)).seconds_left(now)

    assert left(120.0) == 30.0  # a second per round, 30 rounds to go
    assert left(125.0) == 25.0
    assert left(1000.0) == 0.0
    assert left(120.0, limit=25.0) == 5.0
    assert left(120.0, done=0) is None
    assert left(120.0, operation=2, operations=4, began=50.0) == 30.0 + 2 * 50.0
    assert left(120.0, operations=2) == 30.0 + 50.0


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"3", b"null", b'{"process": 3}', example(name=3), example(done="1"),
        example(seconds=float("nan")), example(began=-1), example(operation=True),
        example(process={"host": "x"}), example(steps=10**400), b"[" * 10_000,
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored(data):
    files.default_folder().mkdir(parents=True, mode=0o700)
    (files.default_folder() / "x.json").write_bytes(data)
    assert running() == []


def test_the_file_of_a_dead_process_is_ignored_and_then_removed():
    code = (
        "import os; from ejkernel.ops.tuner.progress_file import ProgressFile\n"
        "operation = ProgressFile().operation('f', lambda: None)\n"
        "operation.step('build', name='f', candidates=3)\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert len(os.listdir(files.default_folder())) == 1
    assert running() == []
    file = ProgressFile()
    file.operation("g", lambda: None).step("build", name="g", candidates=3)
    assert [progress.name for progress in running()] == ["g"]
    assert len(os.listdir(files.default_folder())) == 1
    file.close()


def test_a_run_on_another_machine_is_seen_while_it_writes():
    files.default_folder().mkdir(parents=True, mode=0o700)
    elsewhere = {"host": "another-host", "pid": 1, "started": "", "boot": "", "namespace": ""}
    file = files.default_folder() / "x.json"
    file.write_bytes(example(when=time.time(), process=elsewhere))
    assert len(running()) == 1
    file.write_bytes(example(when=time.time() - 3600, process=elsewhere))
    assert running() == []


def test_it_is_private(monkeypatch):
    file = ProgressFile()
    file.operation("f", lambda: Best("A(1)", 1.0, 2.0)).step("build", name="f", candidates=3)
    (name,) = os.listdir(files.default_folder())
    assert os.stat(files.default_folder()).st_mode & 0o777 == 0o700
    assert os.stat(files.default_folder() / name).st_mode & 0o777 == 0o600
    file.close()


def test_two_runs_of_one_process_have_a_file_each():
    first, second = ProgressFile(), ProgressFile()
    for file, name in ((first, "f"), (second, "g")):
        file.operation(name, lambda: None).step("build", name=name, candidates=1)
    assert [progress.name for progress in running()] == ["f", "g"]
    first.close()
    assert [progress.name for progress in running()] == ["g"]
    second.close()
    assert running() == []


def test_a_run_that_is_written_all_the_time_is_always_seen(monkeypatch):
    monkeypatch.setattr(files, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(files, "LARGEST_SHARE", float("inf"))
    file, over = ProgressFile(), threading.Event()
    operation = file.operation("f", lambda: None)
    operation.step("race", name="f", candidates=3, rounds=10**6)

    def write():
        done = 0
        while not over.is_set():
            done += 1
            operation.step("round", name="f", running=3, done=done)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        done = [[progress.done for progress in running()] for _ in range(300)]
    finally:
        over.set()
        thread.join()
        file.close()
    assert all(len(each) == 1 for each in done)
    assert done == sorted(done)
    assert len({each[0] for each in done}) > 10
    assert os.listdir(files.default_folder()) == []
