"""The worker process and its keeper: started when needed, one for all benches, killed at will."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from ..bench import BenchUnavailable
from .worker import Blob, Channel, Header

START_SECONDS = 120.0  # importing JAX takes seconds, on a busy machine many
_LONGEST_LOG = 1 << 20
MOST_COMPILERS = 8  # programs that are compiled at the same time
# As `python -m` would, but with this process' import path: it may have been extended by hand.
_PROGRAM = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "importlib.import_module(sys.argv.pop(1)).main()"
)


class WorkerUnavailable(BenchUnavailable):
    """No worker can be had, whatever the candidate: run in this process instead."""


class WorkerLost(Exception):
    """The worker ended; `started` says whether it had begun with the request.

    `too_long` says that it was ended because of that very request.
    """

    def __init__(self, how: str, started: bool, too_long: bool = False) -> None:
        super().__init__(how)
        self.started = started
        self.too_long = too_long


class Process:
    """One worker process.

    Args:
      module: its `main` answers; it finds the numbers of its sockets on its command line.
      environment: of the process, if not this one's.
      compilers: how many programs it compiles at the same time, each over a socket of its own.
    """

    def __init__(
        self,
        module: str = "ejkernel.ops.tuner.isolation.worker",
        environment: Mapping[str, str] | None = None,
        compilers: int = 0,
    ) -> None:
        if os.name != "posix" or not sys.executable:
            raise WorkerUnavailable("workers need POSIX and a Python executable")
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  what it prints
        self._heard = 0  # how long the log was when it last answered
        pairs = [socket.socketpair() for _ in range(1 + compilers)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        path = json.dumps([str(folder) for folder in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, path, module, *map(str, descriptors)],
                env=environment,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is the parent's affair
            )
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.pid = self._process.pid
        self._channels = [Channel(ours) for ours, _ in pairs]
        self._compilers: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        for channel in self._channels[1:]:
            self._compilers.put(channel)
        self._closed = False

    def ask(
        self, header: Header, blobs: Sequence[Blob], seconds: float, doing: str
    ) -> tuple[Header, list[bytearray]]:
        """Send a request and wait for its answer. Raises `WorkerLost`, and is then of no use."""
        return self._ask(self._channels[0], header, blobs, seconds, doing)

    def compile(
        self, header: Header, blobs: Sequence[Blob], seconds: float
    ) -> tuple[Header, list[bytearray]]:
        """As `ask`, while other requests are answered: several threads may call it."""
        channel = self._compilers.get()
        try:
            return self._ask(channel, header, blobs, seconds, "compiling")
        finally:
            self._compilers.put(channel)

    def _ask(
        self, channel: Channel, header: Header, blobs: Sequence[Blob], seconds: float, doing: str
    ) -> tuple[Header, list[bytearray]]:
        started, answer = False, None
        if self._heard > _LONGEST_LOG:
            self._log.seek(0)  # the worker writes where this says
            self._log.truncate()
            self._heard = 0
        # Not from now on: one that ended before it was asked anything has said why, too.
        logged = self._heard
        try:
            channel.send(header, blobs, START_SECONDS)
            channel.receive(START_SECONDS)
            started = True
            answer = channel.receive(seconds)
            self._heard = os.fstat(self._log.fileno()).st_size
            return answer
        except ConnectionError:
            how = f"{self._end()} while {doing} it{self._last_words(logged)}"
            raise WorkerLost(how, started) from None
        except TimeoutError:
            if started:
                how = f"still {doing} after {seconds:g} s; the worker was killed"
            else:
                how = f"the worker did not respond for {START_SECONDS:g} s and was killed"
            raise WorkerLost(how, started, too_long=started) from None
        finally:
            if answer is None:
                self.kill()  # also after Ctrl-C: half a conversation cannot be taken up again

    def alive(self) -> bool:
        """Is it still there?"""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it now. Those who wait for an answer are told by their sockets."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close this process' ends of the sockets and the log, once."""
        if not self._closed:
            self._closed = True
            for channel in self._channels:
                channel.close()
            self._log.close()

    def __del__(self) -> None:  # not in `kill`: other threads may use them still
        if hasattr(self, "_closed"):
            self.close()

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.poll()
        if code is None:
            return "the worker closed its socket"
        if code >= 0:
            return f"the worker exited with code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{hint}"

    def _last_words(self, logged: int) -> str:
        log = self._log.fileno()
        size = os.fstat(log).st_size
        start = max(logged, size - 2000)
        lines = os.pread(log, size - start, start).decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f"; its last words: {words[-1][:300]}" if words else ""


class Shared:
    """The worker of this process: started when needed, used by one request at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0  # counts workers: what an earlier one was told, a new one was not
        # What the worker may free: (what, bench, handle). It is told with the next request, so that
        # a finalizer, which may run anywhere, only has to append.
        self.garbage: list[tuple[str, int, int]] = []
        self.process: Process | None = None
        self.compiling: set[int] = set()  # handles that are compiled alongside other requests
        self.one_at_a_time = False  # once a worker ended and it was not clear who was to blame
        self._settings: Header | None = None

    def ensure(self, settings: Header) -> None:
        """Have a worker that runs, with these settings. Hold the lock."""
        if self.process is None or not self.process.alive():
            self.stop()
            self.process = Process(compilers=MOST_COMPILERS)
            self.generation += 1
            self.compiling.clear()
            self._settings = None
        if self._settings != settings:
            answer, _ = self.ask({"do": "configure", **settings}, (), START_SECONDS, "starting")
            if "error" in answer:
                raise WorkerUnavailable(f"the worker cannot be set up: {answer['error']}")
            self._settings = settings

    def ask(
        self, header: Header, blobs: Sequence[Blob], seconds: float, doing: str
    ) -> tuple[Header, list[bytearray]]:
        """Ask the worker that `ensure` provided."""
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
            self.process.close()
        self.__init__()  # type: ignore[misc]  # the lock too: who held it is not here


SHARED = Shared()
atexit.register(SHARED.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SHARED.forget_in_fork)


def worker_pid() -> int | None:
    """The process id of the worker, if one runs."""
    process = SHARED.process
    return process.pid if process is not None and process.alive() else None


def stop_worker() -> None:
    """End the worker, if one runs; the next request of any bench starts another."""
    with SHARED.lock:
        SHARED.stop()
