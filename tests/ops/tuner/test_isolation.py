"""Candidates in a worker process: real processes, real crashes, real hangs."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.tuner.bench import CandidateError, LocalBench
from ejkernel.ops.tuner.isolation import process, worker_bench
from ejkernel.ops.tuner.isolation.process import WorkerUnavailable, stop_worker, worker_pid
from ejkernel.ops.tuner.isolation.worker_bench import CandidateDied, WorkerBench

ROOT = pathlib.Path(worker_bench.__file__).parents[4]
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def double(x):
    return {"out": x * 2, "sum": x.sum()}


def hang(x):
    return jax.lax.while_loop(lambda y: y[0, 0] < 1e30, lambda y: y * 0 + x, x)


def crash(x):
    """XLA's gate to Python callbacks, with the number of a callback that does not exist."""
    call = jax.ffi.ffi_call("xla_ffi_python_cpu_callback", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, index=np.uint64(10**6))


def built(bench, function):
    return bench.compile(bench.lower(function))


def ran(bench, function):
    handle = built(bench, function)
    bench.run(handle)
    return handle


@pytest.fixture
def bench():
    with WorkerBench([X], run_seconds=20) as bench:
        yield bench


def gone(pid, seconds=20.0):
    """Does a process end (or become a zombie, which only its parent can help) in time?"""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.05)
    return False


# --- right and wrong -----------------------------------------------------------------------------


def test_a_right_program_is_compiled_run_compared_and_timed(bench):
    reference = ran(bench, double)
    duplicate = ran(bench, lambda x: {"out": x + x, "sum": jnp.sum(x.T)})
    assert bench.compare(duplicate, reference) is None
    bench.warm_up(duplicate, 2)
    assert all(bench.sample(duplicate) > 0 for _ in range(3))


def test_wrong_outputs_are_named_as_the_local_bench_names_them(bench):
    local = LocalBench([jnp.asarray(X)])
    wrong = {
        "values": lambda x: {"out": x * 2, "sum": x.sum() + 1},
        "nan": lambda x: {"out": jnp.full_like(x, jnp.nan), "sum": x.sum()},
        "shape": lambda x: {"out": x[:4], "sum": x.sum()},
        "dtype": lambda x: {"out": (x * 2).astype(jnp.bfloat16), "sum": x.sum()},
        "structure": lambda x: [x * 2, x.sum()],
    }
    reference, local_reference = ran(bench, double), ran(local, double)
    for name, function in wrong.items():
        reason = bench.compare(ran(bench, function), reference)
        assert reason is not None, name
        assert reason == local.compare(ran(local, function), local_reference)


def test_fingerprints_tell_programs_apart(bench):
    same = bench.lower(lambda x: {"out": x * 2, "sum": x.sum()}).fingerprint
    assert bench.lower(double).fingerprint == same
    assert bench.lower(lambda x: {"out": x * 3, "sum": x.sum()}).fingerprint != same
    assert bench.lower(lambda x: {"o": x * 2, "sum": x.sum()}).fingerprint != same


def test_arrays_of_all_kinds_arrive_as_they_are():
    generator = np.random.default_rng(0)
    arrays = [
        jnp.asarray(generator.standard_normal((3, 4)), dtype)
        for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    ]
    arrays += [
        jnp.arange(5),
        jnp.asarray([True, False]),
        jnp.asarray([1, -2], "int4"),
        jnp.asarray([1 + 2j, 3j]),
        jnp.zeros((0, 3)),
        jnp.float32(2.5),
        np.asarray(X.T),  # not contiguous
        np.arange(3, dtype=np.int64),  # 32 bits here, as in jit
        jax.random.key(7),
        jax.random.split(jax.random.key(8, impl="rbg"), 3),
    ]

    def expected(*given):
        assert [jax.typeof(a).dtype for a in given[:-3]] == [a.dtype for a in arrays[:-3]]
        # As constants: what the worker got must be equal to what is here.
        return [jnp.asarray(a) if not _is_key(a) else a for a in arrays]

    def _is_key(array):
        return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)

    with WorkerBench(arrays) as bench:
        sent = ran(bench, lambda *given: list(given))
        assert bench.compare(sent, ran(bench, expected)) is None
        other = ran(bench, lambda *given: [*given[:-2], jax.random.key(9), given[-1]])
        assert "output[13]: " in bench.compare(other, sent)


def test_unused_inputs_and_python_numbers_and_keys_as_outputs():
    with WorkerBench([X, X + 1, jax.random.key(0)]) as bench:

        def function(x, unused, key):
            return (x, 3, {"key": jax.random.split(key)[0]})

        reference = ran(bench, function)
        assert bench.compare(ran(bench, function), reference) is None
        other = ran(bench, lambda x, y, key: (x, 3, {"key": jax.random.key(0, impl="rbg")}))
        assert "output[2]['key']: dtype key<rbg> differs" in bench.compare(other, reference)


def test_64_bits_are_64_bits():
    with jax.enable_x64(True), WorkerBench([np.float64([1, 1e-12])]) as bench:
        reference = ran(bench, lambda x: x.sum())
        assert bench.compare(ran(bench, lambda x: x[0] + x[1]), reference) is None
        reason = bench.compare(ran(bench, lambda x: (x[0] + x[1]).astype(jnp.float32)), reference)
        assert "dtype float32 differs from the reference's float64" in reason


def test_inputs_on_several_devices_are_refused():
    arrays = [jax.device_put(X, device) for device in jax.devices()[:2]]
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    with pytest.raises(ValueError, match="one device; the inputs are on 2"):
        WorkerBench(arrays)


def test_another_device_than_the_first():
    array = jax.device_put(X, jax.devices()[-1])
    with WorkerBench([array]) as bench:
        reference = ran(bench, double)
        stop_worker()
        assert bench.compare(ran(bench, double), reference) is None


# --- errors that leave the worker alive ----------------------------------------------------------


def test_errors_leave_the_worker_alive(bench):
    reference = ran(bench, double)
    before = worker_pid()
    with pytest.raises(CandidateError, match=r"it needs 1 TiB and .* are available"):
        built(bench, lambda x: jnp.zeros(2**38, jnp.float32) + x[0, 0])
    with pytest.raises(CandidateError, match="NOT_FOUND"):
        built(bench, lambda x: jax.ffi.ffi_call("no_such_thing", jax.typeof(x))(x))
    with pytest.raises(CandidateError, match="cannot be lowered for a worker"):
        bench.lower(lambda x: jax.pure_callback(np.sin, jax.typeof(x), x))
    with pytest.raises(ZeroDivisionError):  # the user's own errors are not wrapped
        bench.lower(lambda x: x * (1 // 0))
    assert bench.compare(ran(bench, double), reference) is None
    assert worker_pid() == before


def test_misuse_is_explained(bench):
    handle = built(bench, double)
    with pytest.raises(RuntimeError, match="before it has run"):
        bench.compare(handle, handle)
    bench.run(handle)
    bench.forget(handle)
    with pytest.raises(RuntimeError, match="before it has run"):
        bench.compare(handle, handle)
    assert bench.sample(handle) > 0  # only its output is gone
    bench.close()
    bench.close()
    with pytest.raises(RuntimeError, match="closed"):
        bench.run(handle)


# --- candidates that take the worker with them ---------------------------------------------------


def test_crash_and_hang_cost_only_the_culprits():
    with WorkerBench([X], run_seconds=3) as bench:
        reference, good = ran(bench, double), ran(bench, lambda x: {"out": x + x, "sum": x.sum()})
        bench.warm_up(good, 1)
        deadly, endless = built(bench, crash), built(bench, hang)

        before = worker_pid()
        with pytest.raises(CandidateDied, match=r"killed by SIG(SEGV|ABRT) while running it"):
            bench.run(deadly)
        assert gone(before)
        # The others live on, with outputs and sample lengths; their executables are loaded.
        compiles = []
        bench._compile, really = compiles.append, bench._compile
        assert bench.compare(good, reference) is None
        assert bench.sample(good) > 0
        assert compiles == []
        bench._compile = really
        after = worker_pid()
        assert after != before

        with pytest.raises(CandidateDied, match="still running after 3 s; the worker was killed"):
            bench.run(endless)
        assert gone(after)
        # The culprits stay dead, whatever is asked of them, and so do their duplicates.
        for culprit in (deadly, endless):
            for use in (bench.run, bench.sample, lambda handle: bench.compare(handle, reference)):
                with pytest.raises(CandidateDied):
                    use(culprit)
            bench.forget(culprit)
        assert worker_pid() is None
        with pytest.raises(CandidateDied, match="SIG"):
            built(bench, crash)
        assert bench.compare(good, reference) is None


def test_a_worker_killed_while_idle_blames_nobody(bench):
    reference, good = ran(bench, double), ran(bench, double)
    before = worker_pid()
    os.kill(before, signal.SIGKILL)
    assert bench.compare(good, reference) is None
    assert worker_pid() != before


def test_a_worker_killed_while_running_says_by_what(bench):
    endless = built(bench, hang)
    killer = threading.Timer(1.0, os.kill, (worker_pid(), signal.SIGKILL))
    killer.start()
    with pytest.raises(CandidateDied, match=r"killed by SIGKILL \(out of memory\?\) while running"):
        bench.run(endless)


def test_an_interrupted_request_does_not_confuse_the_next(bench, monkeypatch):
    good = ran(bench, double)
    endless = built(bench, hang)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        bench.run(endless)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert bench.compare(good, good) is None


def test_no_worker_at_all_is_not_a_candidates_fault(bench, monkeypatch):
    lowered = bench.lower(double)
    stop_worker()
    monkeypatch.setattr(process, "_PROGRAM", "import sys; sys.exit('no such thing here')")
    with pytest.raises(WorkerUnavailable, match=r"code 1.*no such thing here"):
        bench.compile(lowered)
    monkeypatch.undo()
    bench.run(bench.compile(lowered))


def test_the_last_words_of_a_worker_that_ends_at_once_are_heard(monkeypatch):
    monkeypatch.setattr(process, "_PROGRAM", "import sys; sys.exit('no such thing here')")
    worker = process.Process()
    assert gone(worker.pid)  # before it was asked anything
    with pytest.raises(process.WorkerLost, match="no such thing here"):
        worker.ask({"do": "nothing"}, (), 10, "greeting")


# --- one worker for all --------------------------------------------------------------------------


def test_the_worker_is_shared_and_freed(bench):
    ran(bench, double)
    before = worker_pid()
    with WorkerBench([X * 3]) as second:
        assert second.compare(ran(second, double), ran(second, double)) is None
        # Each bench has its own inputs.
        bench_sees = ran(bench, lambda x: x - X)
        zero = ran(bench, lambda x: x * 0)
        assert bench.compare(bench_sees, zero) is None
    gc.collect()
    assert worker_pid() == before


def test_two_threads_take_turns():
    failures = []

    def work(factor):
        try:
            with WorkerBench([X * factor]) as bench:
                reference = ran(bench, lambda x: X * factor * 2)
                for _ in range(3):
                    handle = ran(bench, lambda x: x * 2)
                    assert bench.compare(handle, reference) is None
                    assert bench.sample(handle) > 0
                    bench.forget(handle)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def slow_to_compile(x, steps=400):
    for number in range(steps):
        x = jnp.sin(x @ x + number)
    return x


def test_a_crash_while_another_compiles_is_blamed_on_the_right_one(bench):
    """The first time it is not clear who it was; the second time it is alone."""
    crashing = built(bench, crash)
    compiled = []
    thread = threading.Thread(target=lambda: compiled.append(built(bench, slow_to_compile)))
    thread.start()
    while not process.SHARED.compiling:
        time.sleep(0.001)
    with pytest.raises(CandidateDied, match="SIG"):
        bench.run(crashing)
    thread.join()
    [innocent] = compiled
    bench.run(innocent)
    assert bench.compare(innocent, innocent) is None
    assert not process.SHARED.one_at_a_time
    assert process.SHARED.compiling == set()


def test_a_worker_that_is_lost_while_it_compiles_is_replaced(bench):
    ran(bench, double)
    lowered = bench.lower(slow_to_compile)
    compiled = []
    thread = threading.Thread(target=lambda: compiled.append(bench.compile(lowered)))
    thread.start()
    deadline = time.monotonic() + 60
    while not process.SHARED.compiling and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.3)  # the request is answered, compiling goes on for seconds
    os.kill(worker_pid(), signal.SIGKILL)
    thread.join(120)
    assert not thread.is_alive()  # it heard of the end, and waits no longer
    bench.run(compiled[0])


def test_more_may_compile_at_once_than_there_are_sockets_and_all_hear_of_the_end(bench):
    ran(bench, double)
    lowered = [
        bench.lower(lambda x, n=n: slow_to_compile(x, 40) + n)
        for n in range(process.MOST_COMPILERS + 2)
    ]
    with ThreadPoolExecutor(len(lowered)) as pool:
        compiling = [pool.submit(bench.compile, program) for program in lowered]
        while len(process.SHARED.compiling) < len(lowered) and not compiling[0].done():
            time.sleep(0.001)
        os.kill(worker_pid(), signal.SIGKILL)
        for handle in compiling:
            bench.run(handle.result(timeout=300))
    assert process.SHARED.compiling == set()


def test_what_compiles_too_long_is_ended_and_stays_dead(bench):
    with WorkerBench([X], compile_seconds=0.2) as hasty:
        lowered = hasty.lower(slow_to_compile)
        for _ in range(2):
            with pytest.raises(CandidateDied, match=r"still compiling after 0.2 s"):
                hasty.compile(lowered)
    assert bench.compare(*[ran(bench, double)] * 2) is None


# --- whole programs ------------------------------------------------------------------------------


def start_program(body, folder=None, **environment):
    text = textwrap.dedent(
        """
        import jax, numpy as np, os, sys, time
        from ejkernel.ops.tuner.isolation import worker_bench
        from ejkernel.ops.tuner.isolation.worker_bench import WorkerBench
        from ejkernel.ops.tuner.isolation.process import worker_pid
        bench = WorkerBench([np.ones((8, 8), np.float32)], run_seconds=60)
        double = bench.compile(bench.lower(lambda x: x * 2))
        """
    ) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_the_worker_ends_with_its_parent_even_in_a_loop(end):
    program = start_program(
        """
        import threading
        endless = bench.compile(bench.lower(
            lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 1e30, lambda y: y * 0 + x, x)))
        threading.Thread(target=bench.run, args=(endless,), daemon=True).start()
        time.sleep(1)
        print(worker_pid(), flush=True)
        """
        + ("time.sleep(600)" if end == "kill" else "os._exit(0)")
    )
    worker = int(program.stdout.readline())
    if end == "kill":
        assert not gone(worker, 0.5)
        program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    assert gone(worker)


def test_stray_output_and_forks_do_no_harm(tmp_path):
    # XLA itself prints every program to standard output here, and makes a folder of that name.
    program = start_program(
        """
        bench.run(double)
        child = os.fork()
        if child == 0:  # its end must not end the worker
            os._exit(0 if worker_pid() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        before = worker_pid()
        assert bench.compare(double, double) is None
        assert worker_pid() == before
        print("fine", os.fstat(worker_bench.SHARED.process._log.fileno()).st_size)
        """,
        folder=tmp_path,
        XLA_FLAGS="--xla_dump_to=-",
    )
    out, _ = program.communicate(timeout=120)
    word, size = out.split()[-2:]
    assert (word, program.returncode) == ("fine", 0)
    assert int(size) > 1000
    assert "HloModule" not in out


@pytest.fixture(scope="module", autouse=True)
def no_worker_left():
    yield
    with contextlib.suppress(ProcessLookupError):
        stop_worker()
