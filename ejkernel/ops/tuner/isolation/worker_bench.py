"""A bench whose candidates run in another process, so that they may crash or hang.

The parent traces; the worker (`worker.py`) compiles, runs, compares and times. A candidate that
takes the worker with it is blamed and stays dead; the next request starts a new worker, which
loads the other candidates' executables instead of compiling them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import jax
from jax import export

from ...config.functions import Function
from ...utils.fingerprint import current_device
from ..bench import CandidateError, Clock, Lowered
from ..judge import NonDeterminism, differs
from .process import SHARED, START_SECONDS, Process, WorkerLost, WorkerUnavailable, worker_pid
from .program_export import Input, exported
from .worker import Blob, Header, describe, raw

T = TypeVar("T")

_ATTEMPTS = 3  # of a request, if workers end for other reasons
CARRIED_SETTINGS = (
    "jax_platforms",  # first: it counts until a device is asked for
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
)
"""JAX's settings that change programs: a process that measures for another one takes them over."""


class CandidateDied(CandidateError):
    """A candidate that took the worker with it, or had to be ended with it."""


_NUMBERS = itertools.count(1)  # of benches and handles


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

    def take_executable(self, attached: Sequence[Blob], generation: int) -> None:
        """Remember what a worker compiled, for the next worker, if it could be written."""
        self.executable = bytes(attached[0]) if attached else None
        self.loaded_in = generation


class WorkerBench:
    """Runs candidates in a worker process: the `Bench` that survives them.

    All benches of this process share one worker, which takes one request at a time, so that
    nothing else runs on its device while it measures; only compiling goes on meanwhile. Any
    method may raise `CandidateError` (the candidate failed), `CandidateDied` (and took the worker
    with it; it stays dead) or `WorkerUnavailable` (nobody's fault).

    Args:
      arrays: the inputs, in the order in which functions take them; all on one device.
      compile_seconds: a candidate that compiles longer is killed.
      run_seconds: a candidate that runs longer is killed.
      clock: as `LocalBench` takes it.
    """

    def __init__(
        self,
        arrays: list[Any],
        *,
        compile_seconds: float = 120.0,
        run_seconds: float = 30.0,
        clock: Clock = "auto",
    ) -> None:
        self.clock = "wall"
        self._wanted_clock = clock
        device = _only_device(arrays)
        place = [device.platform, jax.local_devices(backend=device.platform).index(device)]
        config = {name: getattr(jax.config, name) for name in CARRIED_SETTINGS}
        self._platform = str(device.platform)
        if device.platform == jax.default_backend():
            self._platform = export.default_export_platform()  # tells one kind of GPU from another
        self._settings: Header = {"config": config, "device": place}
        self._inputs = [Input(array) for array in arrays]
        self._inputs_in = 0
        self._compile_seconds, self._run_seconds = compile_seconds, run_seconds
        self._dead: dict[str, str] = {}  # by fingerprint: a duplicate would die the same way
        self._number = next(_NUMBERS)
        self._close = weakref.finalize(self, SHARED.garbage.append, ("bench", self._number, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the worker holds for this bench; the worker stays for the next one."""
        if not self._close.alive:
            return
        self._close()
        with SHARED.lock, contextlib.suppress(WorkerLost):  # nothing is left to be freed then
            if worker_pid() is not None:
                SHARED.ask({"do": "nothing"}, (), START_SECONDS, "closing")

    # --- what a Bench does -----------------------------------------------------------------------

    def lower(self, function: Function) -> Lowered:
        return exported(function, self._inputs, self._platform)

    def compile(self, lowered: Lowered) -> WorkerHandle:
        handle = WorkerHandle(next(_NUMBERS), lowered)
        if not self._compile_alongside(handle):
            self._steadily(handle, lambda: self._compile(handle))
        weakref.finalize(handle, SHARED.garbage.append, ("handle", self._number, handle.number))
        return handle

    def run(self, handle: WorkerHandle) -> None:
        self._steadily(handle, lambda: self._run(handle))

    def compare(self, handle: WorkerHandle, reference: WorkerHandle) -> str | None:
        for side in (handle, reference):
            self._refuse_dead(side)
            if not side.has_run:
                raise RuntimeError("a program has no output to compare before it has run")
        got, wanted = handle.lowered.program.outputs, reference.lowered.program.outputs
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
            self._have_output(handle)
            self._have_output(reference)
            return self._ask(handle, "compare", "comparing", reference=reference.number)

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
            if handle.warm_ups and handle.warm_in != SHARED.generation:
                self._warm_up(handle)
            return self._ask(handle, "sample", "running")

        answer = self._steadily(handle, action)
        self.clock = answer["clock"]
        return float(answer["seconds"])

    def repeats(self, handle: WorkerHandle) -> NonDeterminism | None:
        def action() -> Header:
            self._have_output(handle)
            return self._ask(handle, "repeats", "running")

        answer = self._steadily(handle, action)["difference"]
        return None if answer is None else NonDeterminism(**answer)

    def forget(self, handle: WorkerHandle) -> None:
        handle.has_run, handle.output_in = False, 0
        SHARED.garbage.append(("output", self._number, handle.number))

    # --- steps of these, for a worker that is there and has the inputs ---------------------------

    def _compile(self, handle: WorkerHandle) -> None:
        program = handle.lowered.program
        seconds, blobs = self._compile_seconds, [program.module]
        answer = self._ask(handle, "compile", "compiling", seconds, blobs, **program.header)
        handle.take_executable(answer["attached"], SHARED.generation)

    def _compile_alongside(self, handle: WorkerHandle) -> bool:
        """Compile while the worker answers other requests; False if it is to be done alone.

        That is so if the worker ended meanwhile: this program may have been the reason.
        """

        def begin() -> tuple[Process, int] | None:
            if SHARED.one_at_a_time or SHARED.process is None:
                return None
            SHARED.compiling.add(handle.number)
            return SHARED.process, SHARED.generation

        begun = self._steadily(handle, begin)
        if begun is None:
            return False
        (process, generation), program = begun, handle.lowered.program
        header = self._header(handle, "compile", **program.header, garbage=[])
        try:
            answer, attached = process.compile(header, [program.module], self._compile_seconds)
        except WorkerLost as lost:  # it stays in `compiling` until there is a new worker
            if lost.too_long:
                raise self._died(handle, str(lost)) from None
            return False
        SHARED.compiling.discard(handle.number)
        if "error" in answer:
            raise CandidateError(answer["error"])
        handle.take_executable(attached, generation)
        return True

    def _load(self, handle: WorkerHandle) -> None:
        """Have the executable in the worker, from an earlier worker's if possible."""
        if handle.loaded_in == SHARED.generation:
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
        handle.loaded_in = SHARED.generation

    def _run(self, handle: WorkerHandle) -> None:
        self._load(handle)
        self._ask(handle, "run", "running")
        handle.has_run, handle.output_in = True, SHARED.generation

    def _have_output(self, handle: WorkerHandle) -> None:
        if handle.output_in != SHARED.generation:
            self._run(handle)

    def _warm_up(self, handle: WorkerHandle) -> None:
        self._load(handle)
        seconds = self._run_seconds * handle.warm_ups
        self._ask(handle, "warm_up", "running", seconds, times=handle.warm_ups)
        handle.warm_in = SHARED.generation

    # --- talking to the worker -------------------------------------------------------------------

    def _steadily(self, handle: WorkerHandle, action: Callable[[], T]) -> T:
        """Do something in the worker, once more if that ends for a reason of its own."""
        self._refuse_dead(handle)  # before a worker is started for it
        if not self._close.alive:
            raise RuntimeError("this bench is closed")
        how = ""
        with SHARED.lock:
            for _ in range(_ATTEMPTS):
                try:
                    SHARED.ensure(self._settings)
                    self._send_inputs()
                    return action()
                except WorkerLost as lost:
                    how = str(lost)
        raise WorkerUnavailable(f"{_ATTEMPTS} workers ended before a candidate ran: {how}")

    def _send_inputs(self) -> None:
        if self._inputs_in == SHARED.generation:
            return
        header = {
            "do": "inputs",
            "bench": self._number,
            "device": self._settings["device"],
            "clock": self._wanted_clock,
            "arrays": [describe(given.values) for given in self._inputs],
        }
        blobs = [raw(given.values) for given in self._inputs]
        answer, _ = SHARED.ask(header, blobs, START_SECONDS, "sending the inputs to")
        if "error" in answer:
            raise WorkerUnavailable(f"the worker cannot take the inputs: {answer['error']}")
        self._inputs_in = SHARED.generation

    def _died(self, handle: WorkerHandle, how: str) -> CandidateDied:
        self._dead[handle.lowered.fingerprint] = how
        return CandidateDied(how)

    def _refuse_dead(self, handle: WorkerHandle) -> None:
        reason = self._dead.get(handle.lowered.fingerprint)
        if reason is not None:
            raise CandidateDied(reason)

    def _header(self, handle: WorkerHandle, do: str, **more: Any) -> Header:
        return {"do": do, "bench": self._number, "handle": handle.number, **more}

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
        header = self._header(handle, do, **more)
        limit = self._run_seconds if seconds is None else seconds
        try:
            answer, attached = SHARED.ask(header, blobs, limit, doing)
        except WorkerLost as lost:
            if not lost.started:
                raise
            if SHARED.compiling - {handle.number} and not lost.too_long:
                # It may have been one of those that compiled meanwhile. From now on one request
                # follows the other: whoever it was, the next time it will be alone.
                SHARED.one_at_a_time = True
                raise
            SHARED.one_at_a_time = False  # the culprit is found
            raise self._died(handle, str(lost)) from None
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
