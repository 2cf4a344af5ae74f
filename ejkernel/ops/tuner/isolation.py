"""A bench whose candidates run in another process, so that they may crash or hang.

The parent traces; the worker (`worker.py`) compiles, runs, compares and times. A candidate that
takes the worker with it is blamed and stays dead; the next request starts a new worker, which
loads the other candidates' executables instead of compiling them again.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ..utils.fingerprint import current_device
from ..utils.stable import short_hash
from .bench import BenchUnavailable, CandidateError, Function, Lowered
from .judge import differs
from .worker import ANY_CUSTOM_CALL, Blob, Channel, Disconnected, Header, describe, raw

T = TypeVar("T")

_START_SECONDS = 120.0  # importing JAX takes seconds, on a busy machine many
_ATTEMPTS = 3  # of a request, if workers end for other reasons
_LONGEST_LOG = 1 << 20
_CONFIG = (
    "jax_platforms",  # first: it counts until a device is asked for
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
)
# Where in the user's files an operation comes from: definitions, and references at ends of lines.
_LOCATION = re.compile(
    r"""^\#loc\d*\ =\ .*\n | \ loc\((?:\#loc\d*|unknown|"(?:[^"\\]|\\.)*")\)""",
    re.MULTILINE | re.VERBOSE,
)
# As `python -m` would, but with this process' import path: it may have been extended by hand.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from ejkernel.ops.tuner.worker import main; main()"
)


class CandidateDied(CandidateError):
    """A candidate that took the worker with it, or had to be ended with it."""


class WorkerUnavailable(BenchUnavailable):
    """No worker can be had, whatever the candidate: run in this process instead."""


class _WorkerLost(Exception):
    """The worker ended; `started` says whether it had begun with the request."""

    def __init__(self, how: str, started: bool) -> None:
        super().__init__(how)
        self.started = started


# --- the process ---------------------------------------------------------------------------------


class _Process:
    """One worker process."""

    def __init__(self) -> None:
        if os.name != "posix" or not sys.executable:
            raise WorkerUnavailable("workers need POSIX pipes and a Python executable")
        self._log = _unnamed_file()
        requests, replies = os.pipe(), os.pipe()
        path = json.dumps([str(folder) for folder in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, path, str(requests[0]), str(replies[1])],
                pass_fds=(requests[0], replies[1]),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is the parent's affair
            )
        finally:
            os.close(requests[0])
            os.close(replies[1])
        self.pid = self._process.pid
        self._channel = Channel(replies[0], requests[1])
        self._closed = False

    def ask(
        self, header: Header, blobs: Sequence[Blob], seconds: float, doing: str
    ) -> tuple[Header, list[bytearray]]:
        """Send a request and wait for its answer. Raises `_WorkerLost`, and is then of no use."""
        try:
            return self._converse(header, blobs, seconds, doing)
        except BaseException:
            self.kill()  # also after Ctrl-C: half a conversation cannot be taken up again
            raise

    def _converse(
        self, header: Header, blobs: Sequence[Blob], seconds: float, doing: str
    ) -> tuple[Header, list[bytearray]]:
        started = False
        if os.fstat(self._log).st_size > _LONGEST_LOG:
            os.ftruncate(self._log, 0)
        logged = os.fstat(self._log).st_size
        try:
            self._channel.send(header, blobs, _START_SECONDS)
            self._channel.receive(_START_SECONDS)
            started = True
            return self._channel.receive(seconds)
        except Disconnected:
            how = f"{self._end()} while {doing} it{self._last_words(logged)}"
            raise _WorkerLost(how, started) from None
        except TimeoutError:
            if started:
                how = f"still {doing} after {seconds:g} s; the worker was killed"
            else:
                how = f"the worker did not respond for {_START_SECONDS:g} s and was killed"
            raise _WorkerLost(how, started) from None

    def alive(self) -> bool:
        """Is it still there?"""
        return not self._closed and self._process.poll() is None

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()
        self.abandon()

    def abandon(self) -> None:
        """Close this process' ends of the pipes, once."""
        if not self._closed:
            self._closed = True
            self._channel.close()
            os.close(self._log)

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.poll()
        if code is None:
            return "the worker closed its pipe"
        if code >= 0:
            return f"the worker exited with code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{hint}"

    def _last_words(self, logged: int) -> str:
        size = os.fstat(self._log).st_size
        start = max(logged, size - 2000)
        lines = os.pread(self._log, size - start, start).decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f"; its last words: {words[-1][:300]}" if words else ""


def _unnamed_file() -> int:
    """A file for what a worker prints, without a name: it goes when the processes do."""
    created, name = tempfile.mkstemp(prefix="ejkernel-worker-")
    os.close(created)
    descriptor = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    os.unlink(name)
    return descriptor


class _Shared:
    """The worker of this process: started when needed, used by one request at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0  # counts workers: what an earlier one was told, a new one was not
        # What the worker may free: (what, bench, handle). It is told with the next request, so that
        # a finalizer, which may run anywhere, only has to append.
        self.garbage: list[tuple[str, int, int]] = []
        self.process: _Process | None = None
        self._settings: Header | None = None

    def ensure(self, settings: Header) -> None:
        """Have a worker that runs, with these settings. Hold the lock."""
        if self.process is None or not self.process.alive():
            self.stop()
            self.process = _Process()
            self.generation += 1
            self._settings = None
        if self._settings != settings:
            answer, _ = self.ask({"do": "configure", **settings}, (), _START_SECONDS, "starting")
            if "error" in answer:
                raise WorkerUnavailable(f"the worker cannot be set up: {answer['error']}")
            self._settings = settings

    def ask(
        self, header: Header, blobs: Sequence[Blob], seconds: float, doing: str
    ) -> tuple[Header, list[bytearray]]:
        """Ask the worker that `ensure` found."""
        assert self.process is not None
        garbage = [self.garbage.pop() for _ in range(len(self.garbage))]
        return self.process.ask({**header, "garbage": garbage}, blobs, seconds, doing)

    def stop(self) -> None:
        """End the worker, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def forget_in_fork(self) -> None:
        """A forked child has no worker: the one it sees is its parent's."""
        if self.process is not None:
            self.process.abandon()
        self.__init__()  # type: ignore[misc]  # the lock too: who held it is not here


_SHARED = _Shared()
atexit.register(_SHARED.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SHARED.forget_in_fork)
_NUMBERS = itertools.count(1)  # of benches and handles


def worker_pid() -> int | None:
    """The process id of the worker, if one runs."""
    process = _SHARED.process
    return process.pid if process is not None and process.alive() else None


def stop_worker() -> None:
    """End the worker, if one runs; the next request of any bench starts another."""
    with _SHARED.lock:
        _SHARED.stop()


# --- the bench -----------------------------------------------------------------------------------


class _Input:
    """An input array as it travels: key arrays as the numbers they are made of."""

    def __init__(self, array: Any) -> None:
        self._key_kind = None
        weak = bool(getattr(array, "weak_type", False))
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            self._key_kind = jax.random.key_impl(array)
            array = jax.random.key_data(array)
        values = np.asarray(array)
        # As jit would: without x64, an array of 64 bits is taken for one of 32.
        self.values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)
        self.abstract = jax.ShapeDtypeStruct(values.shape, self.values.dtype, weak_type=weak)

    def as_given(self, array: Any) -> Any:
        """What the function takes, from what the program takes."""
        if self._key_kind is None:
            return array
        return jax.random.wrap_key_data(array, impl=self._key_kind)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A traced function: what the worker needs, and what its outputs are called here."""

    module: bytes
    header: Header
    outputs: Any  # a pytree of shapes


@dataclasses.dataclass(eq=False)
class WorkerHandle:
    """A program compiled in the worker.

    The `_in` fields say which worker, by its generation, holds the executable, holds an output and
    knows how long a sample is.
    """

    number: int
    lowered: Lowered
    executable: bytes | None = None
    loaded_in: int = 0
    output_in: int = 0
    warm_in: int = 0
    has_run: bool = False
    warm_ups: int = 0


class WorkerBench:
    """Runs candidates in a worker process: the `Bench` that survives them.

    All benches of this process share one worker, which takes one request at a time, so that
    nothing else runs on its device while it measures. Any method may raise `CandidateError` (the
    candidate failed), `CandidateDied` (and took the worker with it; it stays dead) or
    `WorkerUnavailable` (nobody's fault).

    Args:
      arrays: the inputs, in the order in which functions take them; all on one device.
      compile_seconds: a candidate that compiles longer is killed.
      run_seconds: a candidate that runs longer is killed.
    """

    def __init__(
        self, arrays: list[Any], *, compile_seconds: float = 120.0, run_seconds: float = 30.0
    ) -> None:
        device = _only_device(arrays)
        place = [device.platform, jax.local_devices(backend=device.platform).index(device)]
        config = {name: getattr(jax.config, name) for name in _CONFIG}
        self._platform = _export_platform(device)
        self._settings: Header = {"config": config, "device": place}
        self._inputs = [_Input(array) for array in arrays]
        self._inputs_in = 0
        self._compile_seconds, self._run_seconds = compile_seconds, run_seconds
        self._dead: dict[str, str] = {}  # by fingerprint: a twin would die the same way
        self._number = next(_NUMBERS)
        self._close = weakref.finalize(self, _SHARED.garbage.append, ("bench", self._number, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the worker holds for this bench; the worker stays for the next one."""
        if not self._close.alive:
            return
        self._close()
        with _SHARED.lock, contextlib.suppress(_WorkerLost):  # nothing is left to be freed then
            if worker_pid() is not None:
                _SHARED.ask({"do": "nothing"}, (), _START_SECONDS, "closing")

    # --- what a Bench does -----------------------------------------------------------------------

    def lower(self, function: Function) -> Lowered:
        seen: list[Any] = []

        def program(arrays: list[Any]) -> list[Any]:
            pairs = zip(self._inputs, arrays, strict=True)
            out = function(*(given.as_given(array) for given, array in pairs))
            seen[:] = [jax.tree.map(_shape, out)]
            return [_plain(leaf) for leaf in jax.tree.leaves(out)]

        abstract = [given.abstract for given in self._inputs]
        jitted = jax.jit(program)
        jitted.trace(abstract)  # the user's own errors come out as they are
        exporting = export.export(
            jitted, platforms=[self._platform], disabled_checks=ANY_CUSTOM_CALL
        )
        try:
            exported = exporting(abstract)
        except Exception as error:
            reason = f"it cannot be lowered for a worker: {type(error).__name__}: {error}"
            raise CandidateError(reason) from error
        if exported.nr_devices != 1 or exported.ordered_effects:
            raise CandidateError("a worker runs programs of one device, without ordered effects")
        [outputs] = seen
        header = {
            "platform": self._platform,
            "kept": list(exported.module_kept_var_idx),
            "outputs": [describe(aval) for aval in exported.out_avals],
        }
        # The module alone does not tell how its outputs are named and nested.
        named = [str(part) for part in jax.tree_util.tree_flatten_with_path(outputs)]
        text = "\n".join((_LOCATION.sub("", exported.mlir_module()), *named))
        return Lowered(
            short_hash(text, 32),
            _Program(exported.mlir_module_serialized, header, outputs),
        )

    def compile(self, lowered: Lowered) -> WorkerHandle:
        handle = WorkerHandle(next(_NUMBERS), lowered)
        self._steadily(handle, lambda: self._compile(handle))
        weakref.finalize(handle, _SHARED.garbage.append, ("handle", self._number, handle.number))
        return handle

    def run(self, handle: WorkerHandle) -> None:
        self._steadily(handle, lambda: self._run(handle))

    def compare(self, handle: WorkerHandle, truth: WorkerHandle) -> str | None:
        for side in (handle, truth):
            self._refuse_dead(side)
            if not side.has_run:
                raise RuntimeError("a program has no output to compare before it has run")
        got, wanted = handle.lowered.program.outputs, truth.lowered.program.outputs
        if jax.tree.structure(got) != jax.tree.structure(wanted):  # type: ignore[operator]
            return differs(got, wanted)
        named = jax.tree_util.tree_leaves_with_path(got)
        for (path, mine), other in zip(named, jax.tree.leaves(wanted), strict=True):
            if mine.shape == other.shape and mine.dtype != other.dtype:  # maybe only here: of keys
                where = jax.tree_util.keystr(path)
                return (
                    f"output{where}: dtype {mine.dtype} differs from the reference's {other.dtype}"
                )

        def action() -> Header:
            for side in (handle, truth):
                if side.output_in != _SHARED.generation:
                    self._run(side)
            return self._ask(handle, "compare", "comparing", truth=truth.number)

        answer = self._steadily(handle, action)
        if answer["reason"] is None:
            return None
        where = jax.tree_util.keystr(named[answer["output"]][0])
        return f"output{where}{answer['reason'].removeprefix('output')}"

    def warm_up(self, handle: WorkerHandle, times: int) -> None:
        handle.warm_ups = max(times, 1)
        self._steadily(handle, lambda: self._warm_up(handle))

    def sample(self, handle: WorkerHandle) -> float:
        def action() -> Header:
            self._load(handle)
            if handle.warm_ups and handle.warm_in != _SHARED.generation:
                self._warm_up(handle)
            return self._ask(handle, "sample", "running")

        return float(self._steadily(handle, action)["seconds"])

    def forget(self, handle: WorkerHandle) -> None:
        handle.has_run, handle.output_in = False, 0
        _SHARED.garbage.append(("output", self._number, handle.number))

    # --- steps of these, for a worker that is there and has the inputs ---------------------------

    def _compile(self, handle: WorkerHandle) -> None:
        program = handle.lowered.program
        seconds, blobs = self._compile_seconds, [program.module]
        answer = self._ask(handle, "compile", "compiling", seconds, blobs, **program.header)
        handle.executable = bytes(answer["attached"][0]) if answer["attached"] else None
        handle.loaded_in = _SHARED.generation

    def _load(self, handle: WorkerHandle) -> None:
        """Have the executable in the worker, from an earlier worker's if possible."""
        if handle.loaded_in == _SHARED.generation:
            return
        if handle.executable is None:
            self._compile(handle)
            return
        header = handle.lowered.program.header
        blobs = [handle.executable]
        try:
            self._ask(handle, "load", "loading", self._compile_seconds, blobs, **header)
        except CandidateDied:
            raise
        except CandidateError:  # not every executable can be moved; a program always can
            self._compile(handle)
        handle.loaded_in = _SHARED.generation

    def _run(self, handle: WorkerHandle) -> None:
        self._load(handle)
        self._ask(handle, "run", "running")
        handle.has_run, handle.output_in = True, _SHARED.generation

    def _warm_up(self, handle: WorkerHandle) -> None:
        self._load(handle)
        seconds = self._run_seconds * handle.warm_ups
        self._ask(handle, "warm_up", "running", seconds, times=handle.warm_ups)
        handle.warm_in = _SHARED.generation

    # --- talking to the worker -------------------------------------------------------------------

    def _steadily(self, handle: WorkerHandle, action: Callable[[], T]) -> T:
        """Do something in the worker, once more if that ends for a reason of its own."""
        self._refuse_dead(handle)  # before a worker is started for it
        if not self._close.alive:
            raise RuntimeError("this bench is closed")
        how = ""
        with _SHARED.lock:
            for _ in range(_ATTEMPTS):
                try:
                    _SHARED.ensure(self._settings)
                    self._send_inputs()
                    return action()
                except _WorkerLost as lost:
                    how = str(lost)
        raise WorkerUnavailable(f"{_ATTEMPTS} workers ended before a candidate ran: {how}")

    def _send_inputs(self) -> None:
        if self._inputs_in == _SHARED.generation:
            return
        header = {
            "do": "inputs",
            "bench": self._number,
            "device": self._settings["device"],
            "arrays": [describe(given.values) for given in self._inputs],
        }
        blobs = [raw(given.values) for given in self._inputs]
        answer, _ = _SHARED.ask(header, blobs, _START_SECONDS, "sending the inputs to")
        if "error" in answer:
            raise WorkerUnavailable(f"the worker cannot take the inputs: {answer['error']}")
        self._inputs_in = _SHARED.generation

    def _refuse_dead(self, handle: WorkerHandle) -> None:
        reason = self._dead.get(handle.lowered.fingerprint)
        if reason is not None:
            raise CandidateDied(reason)

    def _ask(
        self,
        handle: WorkerHandle,
        do: str,
        doing: str,
        seconds: float | None = None,
        blobs: Sequence[Blob] = (),
        **more: Any,
    ) -> Header:
        """Ask the worker to do something for which this handle is to blame."""
        self._refuse_dead(handle)
        header = {"do": do, "bench": self._number, "handle": handle.number, **more}
        limit = self._run_seconds if seconds is None else seconds
        try:
            answer, attached = _SHARED.ask(header, blobs, limit, doing)
        except _WorkerLost as lost:
            if not lost.started:
                raise
            self._dead[handle.lowered.fingerprint] = str(lost)
            raise CandidateDied(str(lost)) from None
        if "error" in answer:
            raise CandidateError(answer["error"])
        return {**answer, "attached": attached}


def _only_device(arrays: list[Any]) -> Any:
    """The device of all arrays, as far as they care."""
    devices: set[Any] = set()
    for array in arrays:
        if isinstance(array, jax.Array) and array.committed:
            devices |= array.sharding.device_set
    if len(devices) > 1:
        raise ValueError(f"a worker measures on one device; the inputs are on {len(devices)}")
    return devices.pop() if devices else current_device()


def _export_platform(device: Any) -> str:
    if device.platform == jax.default_backend():
        return str(export.default_export_platform())  # tells one kind of GPU from the other
    return str(device.platform)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def _plain(leaf: Any) -> Any:
    """An output as it travels: an ordinary array."""
    dtype = jax.typeof(leaf).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if dtype == jax.dtypes.float0:  # a derivative of integers, which has no values
        return jnp.zeros(leaf.shape, bool)
    return leaf
