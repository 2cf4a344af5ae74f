"""How far tuning runs are, for other processes to see: a small file per run, while it lasts.

`ejkernel dashboard` reads these files. They lie in the folder `progress` of the cache folder, are
written a few times per second at most, between measurements and never during one, and are removed
at the end. A file whose process is gone counts for nothing. A run that cannot write its file goes
on without.

Each state is a new file, whole from its first moment, and then the one before is removed: `ext4`
waits for the disk when a file is renamed over another one (4 ms; a new name takes 20 µs).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import logging
import math
import pathlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

from ...store.private import PrivateFolder
from ...store.reading import parse_json
from ..utils import environment
from ..utils.fingerprint import device_fingerprint
from ..utils.processes import ProcessIdentity

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 0.25  # two writes of one run
LARGEST_SHARE = 0.005  # of a run's time that writing may take, however slow the folder is
# Whether a process of another machine (or container) lives cannot be seen from here. Between two
# steps a run compiles or measures one candidate: a file that is older than this is forgotten.
ELSEWHERE_SECONDS = 900.0
LARGEST_FILE = 2**16
LONGEST_TEXT = 2000


def default_folder() -> pathlib.Path:
    """`progress` in the cache folder; `NoHomeFolder` if there is no such place."""
    return environment.cache_folder("progress")


class Best(NamedTuple):
    """The fastest config that was measured so far, and the heuristic one's time, if it has one."""

    config: str
    seconds: float
    heuristic_seconds: float | None


@dataclasses.dataclass(frozen=True)
class TuningProgress:
    """How far a tuning run was when it last said so. Moments are seconds since 1970.

    Attributes:
      name: the operation that is being tuned, with its call; empty before the first.
      device: the device's fingerprint.
      phase: what is being done.
      operation: its number, from 1.
      operations: how many there are in this run.
      tried: candidates that were compiled and checked, or refused.
      candidates: how many there are to try.
      done: steps of this phase that are done: candidates, or rounds of the race.
      steps: how many it has, at most.
      best: the config that leads; empty before there is one.
      seconds: its time per call.
      heuristic_seconds: that of the heuristic config.
      limit: most seconds for this operation, if there is a limit.
      began: when the run began.
      operation_began: when this operation did.
      phase_began: when this phase did.
      when: when this was written.
    """

    name: str
    device: str
    phase: str
    operation: int
    operations: int
    tried: int
    candidates: int
    done: int
    steps: int
    best: str
    seconds: float | None
    heuristic_seconds: float | None
    limit: float | None
    began: float
    operation_began: float
    phase_began: float
    when: float
    process: ProcessIdentity

    @classmethod
    def loads(cls, data: bytes) -> Self:
        """Read what a run wrote; a `ValueError` if it is something else."""
        plain = parse_json(data)
        process = _checked(ProcessIdentity, plain.get("process") if type(plain) is dict else None)
        fields = _checked(cls, {**plain, "process": process})
        return cls(**{**fields, "process": ProcessIdentity(**process)})

    def seconds_left(self, now: float | None = None) -> float | None:
        """About how long the run will go on; None if there is nothing to tell it from.

        This phase at its speed so far, or until the limit; later operations like the earlier ones.
        """
        if not 0 < self.done <= self.steps:
            return None
        now = time.time() if now is None else now
        pace = (self.when - self.phase_began) / self.done
        left = max(0.0, pace * (self.steps - self.done) - (now - self.when))
        if self.limit is not None:
            left = max(0.0, min(left, self.limit - (now - self.operation_began)))
        finished = self.operation - 1
        spent = self.operation_began - self.began
        each = spent / finished if finished > 0 else now - self.operation_began + left
        return left + max(0, self.operations - self.operation) * max(0.0, each)


def _checked(kind: type, plain: Any) -> dict[str, Any]:
    """The fields of a class, each of its type; a `ValueError` if one is missing or something else.

    A number that JSON lacks, or that no clock gives, is refused too.
    """
    allowed = {"str": (str,), "int": (int,), "float": (int, float), "ProcessIdentity": (dict,)}
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = plain.get(field.name) if isinstance(plain, dict) else None
        name, _, optional = str(field.type).partition(" | ")
        if not (value is None and optional):
            if type(value) not in allowed[name]:
                raise ValueError(f"it is not the progress of a run: {field.name} is missing")
            if isinstance(value, (int, float)) and not 0 <= value < 1e12:
                raise ValueError(f"it is not the progress of a run: {field.name} is no such number")
        fields[field.name] = value
    return fields


def running(folder: pathlib.Path | None = None) -> list[TuningProgress]:
    """The tuning runs that are under way, the oldest first."""
    found: dict[str, TuningProgress] = {}
    with contextlib.suppress(OSError), PrivateFolder.open(folder or default_folder()) as opened:
        for _ in range(3):  # a state that is gone by the time it is read has a successor, or ended
            latest = {name.partition("-")[0]: name for name in _names(opened)}
            found = {run: progress for run, progress in found.items() if run in latest}
            for run, name in latest.items():
                with contextlib.suppress(OSError, ValueError):
                    found[run] = TuningProgress.loads(opened.read(name, limit=LARGEST_FILE))
            if found.keys() == latest.keys():
                break
    return sorted(filter(_is_running, found.values()), key=lambda progress: progress.began)


def _names(folder: PrivateFolder) -> list[str]:
    """The files, `RUN-NUMBER.json`, sorted: the last one of a run is its latest."""
    return [name for name in folder.names() if name.endswith(".json")]


def _is_running(progress: TuningProgress) -> bool:
    known = progress.process.is_running()
    return time.time() - progress.when < ELSEWHERE_SECONDS if known is None else known


# --- writing -------------------------------------------------------------------------------------

_current: contextvars.ContextVar[ProgressFile | None] = contextvars.ContextVar(
    "ejkernel_progress_file", default=None
)


@contextlib.contextmanager
def progress_file(operations: int = 1) -> Iterator[ProgressFile]:
    """The file of the run that is under way here, or else of a new one of so many operations."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    file = ProgressFile(operations)
    token = _current.set(file)
    try:
        yield file
    finally:
        _current.reset(token)
        file.close()


class ProgressFile:
    """The file of one tuning run; nothing is written before the first step of its first operation.

    Args:
      operations: how many are to be tuned.
      clock: of the pauses between writes; tests give a fake one.
    """

    def __init__(self, operations: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.operations = operations
        self.begun = 0
        self.began = time.time()
        self._clock = clock
        self._run = uuid.uuid4().hex
        self._written = 0
        self._folder: PrivateFolder | None = None
        self._next: float = 0.0  # when it may be written again; never, if it cannot be
        self._process: ProcessIdentity | None = None

    def prepare(self, phase: str) -> None:
        """Something is done before the first operation begins."""
        OperationProgress(self, 0, "", lambda: None, None).enter(phase)

    def operation(
        self, name: str, best: Callable[[], Best | None], limit: float | None = None
    ) -> OperationProgress:
        """One more operation begins; its steps are told to what this gives."""
        self.begun += 1
        return OperationProgress(self, self.begun, name, best, limit)

    def write(self, state: Callable[[ProcessIdentity], TuningProgress]) -> None:
        """Write a state, unless the last one is too young; no error leaves this."""
        start = self._clock()
        if start < self._next:
            return
        try:
            if self._folder is None or self._process is None:
                self._folder = PrivateFolder.open(default_folder(), create=True)
                self._process = ProcessIdentity.here()
                _remove_the_dead(self._folder)
            data = json.dumps(dataclasses.asdict(state(self._process))).encode()
            self._folder.write(self._name(self._written + 1), data, durable=False)
            self._written += 1
            self._folder.remove(self._name(self._written - 1))
        except OSError as error:
            logger.info("ejkernel: other processes will not see how far this run is: %s", error)
            self._next = math.inf
            return
        spent = self._clock() - start
        self._next = start + max(SECONDS_BETWEEN, spent / LARGEST_SHARE)

    def close(self) -> None:
        """Remove the file."""
        self._next = math.inf
        if self._folder is not None:
            with contextlib.suppress(OSError), self._folder:
                self._folder.remove(self._name(self._written))
            self._folder = None

    def _name(self, number: int) -> str:
        return f"{self._run}-{number:09d}.json"


def _remove_the_dead(folder: PrivateFolder) -> None:
    """Remove files of processes that are gone; those that cannot be judged are left alone."""
    for name in _names(folder):
        with contextlib.suppress(OSError, ValueError):
            progress = TuningProgress.loads(folder.read(name, limit=LARGEST_FILE))
            if progress.process.is_running() is False:
                folder.remove(name)


class OperationProgress:
    """One operation of a run; `step` is told what `Tuner(on_step=)` is told."""

    def __init__(
        self,
        file: ProgressFile,
        number: int,
        name: str,
        best: Callable[[], Best | None],
        limit: float | None,
    ) -> None:
        self._file = file
        self._number = number
        self._name = name
        self._best = best
        self._limit = limit
        self._began = self._phase_began = time.time()
        self._phase = "starting"
        self._tried = self._candidates = self._done = self._steps = 0

    def step(self, step: str, *, name: str, **data: Any) -> None:
        """Note a step, and write it if it is time to."""
        if step == "build":
            # A search says first how many it will try, then each batch of them.
            self._candidates = max(self._candidates, data["candidates"])
            self.enter("compiling and checking", self._tried, self._candidates)
            return
        elif step == "candidate":
            self._tried += 1
            self._done = self._tried
            self._candidates = self._steps = max(self._candidates, self._tried)
        elif step == "race":
            self.enter(f"racing {data['candidates']} candidates", 0, data["rounds"])
            return
        elif step == "round":
            running = data["running"]
            self._phase = f"racing {running} candidate{'' if running == 1 else 's'}"
            self._done = data["done"]
        self._file.write(self._state)

    def enter(self, phase: str, done: int = 0, steps: int = 0) -> None:
        """Another phase begins, of so many steps."""
        if self._phase != phase:
            self._phase, self._phase_began = phase, time.time()
        self._done, self._steps = done, steps
        self._file.write(self._state)

    def _state(self, process: ProcessIdentity) -> TuningProgress:
        best = self._best()
        config = "" if best is None else best.config
        return TuningProgress(
            name=self._name[:LONGEST_TEXT],
            device=device_fingerprint(),
            phase=self._phase,
            operation=self._number,
            operations=max(self._file.operations, self._number),
            tried=self._tried,
            candidates=self._candidates,
            done=self._done,
            steps=self._steps,
            best=config[:LONGEST_TEXT],
            seconds=None if best is None else best.seconds,
            heuristic_seconds=None if best is None else best.heuristic_seconds,
            limit=self._limit,
            began=self._file.began,
            operation_began=self._began,
            phase_began=self._phase_began,
            when=time.time(),
            process=process,
        )
