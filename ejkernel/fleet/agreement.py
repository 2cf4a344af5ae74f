"""The processes of one job run with the same configs: one decides each key, the others read it.

Who traces a call first claims its key in the job's key-value store, decides (and tunes, if the
policy allows it) and publishes the decision; who comes later reads it, or waits for it. There is no
barrier and no collective, so it does not matter that only some processes trace an operation, or in
which order. While it decides, a process gives heartbeats, so that the others can tell one that
is slow from one that is dead.

What the program itself says, `cfg=` and overlays, is the same in every process already and is not
asked about.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator

import jax

from .. import __version__
from ..ops.config import context
from ..ops.config.decision import Answer, Decision
from ..ops.config.hooks import AgreementError, AgreementTimeout
from ..ops.config.tiers.request import Request
from ..ops.utils import environment
from ..ops.utils.fingerprint import short_hash
from .coordination import CoordinationService, connect
from .message import Message, described

logger = logging.getLogger(__name__)

PREFIX = "ejkernel/agreement/1"
"""Where everything is in the job's store; the number is that of this protocol."""

SLICE = 2.0
"""Seconds between two looks for heartbeats; Ctrl-C is heard in between, too."""

_ALIKE = (
    environment.AUTOTUNE,
    environment.STRICT,
    environment.STAMP,
    environment.PREFIX,
    environment.AGREEMENT_SECONDS,
)
"""Settings that change decisions, programs or how to wait: to be the same in every process."""

_DECIDING = context.Layer("deciding for all processes")


class JobAgreement:
    """Agrees with the other processes of a job, through a store that they share."""

    def __init__(self, service: CoordinationService) -> None:
        self.service = service
        self._lock = threading.Lock()
        self._settled: dict[str, Message] = {}
        self._under_way: dict[str, threading.Lock] = {}
        self._here = threading.local()
        self._settings_compared = False

    def settle(self, request: Request, generation: int, ask: Callable[[Request], Answer]) -> Answer:
        """The answer that holds in every process (see `ejkernel.ops.config.hooks`)."""
        question = question_of(request, generation)
        request = dataclasses.replace(request, agreed=True)
        if question not in self._settled and self._deciding_here:
            # A kernel that is being measured calls another one. Tuning waits for nobody.
            return ask(request)
        with self._lock:
            under_way = self._under_way.setdefault(question, threading.Lock())
        with under_way:  # of several threads with the same question, one asks
            if question not in self._settled:
                self._settled[question], answer = self._ask_or_read(question, request, ask)
                return answer
        return self._read(self._settled[question], request)

    def _ask_or_read(
        self, question: str, request: Request, ask: Callable[[Request], Answer]
    ) -> tuple[Message, Answer]:
        # Starting a backend is a collective of all processes. One that waited here without having
        # done its part would keep the others, the deciding one among them, from starting theirs.
        jax.devices()
        self._compare_settings()
        if self.service.set_first(f"{question}/claim", str(self.service.process)):
            return self._decide(question, request, ask)
        message = self._wait(question, request)
        return message, self._read(message, request)

    def _read(self, message: Message, request: Request) -> Answer:
        answer = message.answer(request)
        if isinstance(answer, Decision):
            request.emit("agreed", cfg=answer.cfg, tier=answer.tier, process=message.process)
        return answer

    # --- deciding --------------------------------------------------------------------------------

    @property
    def _deciding_here(self) -> bool:
        return getattr(self._here, "deciding", False)

    @contextlib.contextmanager
    def _deciding(self, question: str) -> Iterator[None]:
        self._here.deciding = True
        try:
            # In the jit key, because what is traced meanwhile is answered here alone: a program of
            # the caller's must never find it in JAX's cache.
            with context.Block(_DECIDING), self._heartbeat(f"{question}/alive"):
                yield
        finally:
            self._here.deciding = False

    @contextlib.contextmanager
    def _heartbeat(self, key: str) -> Iterator[None]:
        """Give heartbeats while the block runs, so that those who wait can tell slow from dead.

        Nobody answers a heartbeat and nobody waits for one: a measurement that runs meanwhile
        shares its process with one short message every few seconds, and synchronises with nothing.
        """
        # Often enough that losing a few of them is no alarm. A short block gives none.
        every = longest_silence(environment.AGREEMENT_SECONDS.seconds()) / 5
        over = threading.Event()

        def beat() -> None:
            count = 0
            while not over.wait(every):
                count += 1
                try:
                    self.service.set(key, str(count))
                except AgreementError as error:
                    logger.warning("ejkernel: no more heartbeats while deciding: %s", error)
                    return

        thread = threading.Thread(target=beat, name="ejkernel-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=every)

    def _decide(
        self, question: str, request: Request, ask: Callable[[Request], Answer]
    ) -> tuple[Message, Answer]:
        process = self.service.process
        try:
            with self._deciding(question):
                answer = ask(request)
            message = Message.of(answer, process)
            if isinstance(answer, Decision):
                answer = dataclasses.replace(answer, cfg=message.rebuilt(request))
        except BaseException as error:  # whatever it is, the others must not wait for it
            with contextlib.suppress(AgreementError):  # the first error is the one to show
                self._publish(question, Message.of_failure(error, process))
            raise
        self._publish(question, message)
        return message, answer

    def _publish(self, question: str, message: Message) -> None:
        self.service.set_first(f"{question}/answer", message.dumps())

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(self, question: str, request: Request) -> Message:
        limit = environment.AGREEMENT_SECONDS.seconds()
        start = heard = now = time.monotonic()
        last: str | None = None
        while now - start < limit:
            text = self.service.get(f"{question}/answer", min(SLICE, limit - (now - start)))
            if text is not None:
                return Message.loads(text)
            now = time.monotonic()
            heartbeat = self.service.try_get(f"{question}/alive")
            if heartbeat != last:
                last, heard = heartbeat, now
            if now - heard >= longest_silence(limit):
                raise self._timeout(question, request, now - start, now - heard)
        raise self._timeout(question, request, now - start)

    def _timeout(
        self, question: str, request: Request, waited: float, silent: float | None = None
    ) -> AgreementTimeout:
        name = environment.AGREEMENT_SECONDS.name
        limit = environment.AGREEMENT_SECONDS.seconds()
        process = self.service.try_get(f"{question}/claim")
        text = (
            f"process {self.service.process} waited {waited:.1f} s for the config of "
            f"{described(request)}, which process {process} is deciding, and stops: "
        )
        if silent is not None:
            text += (
                f"process {process} has given no heartbeat for {silent:.1f} s and is probably "
                f"dead; see its output. ({name}={limit:g} allows for a silence of "
                f"{longest_silence(limit):g} s.)"
            )
        else:
            text += (
                f"process {process} is alive and has not finished in time. Set {name} (now "
                f"{limit:g}) higher, in all processes, or tune beforehand"
            )
        return AgreementTimeout(text)

    # --- settings --------------------------------------------------------------------------------

    def _compare_settings(self) -> None:
        """Refuse to go on where processes are set up differently: they would never agree."""
        if self._settings_compared:
            return
        key = f"{PREFIX}/settings"
        me = self.service.process
        mine = {"ejkernel": __version__, **{variable.name: variable.read() for variable in _ALIKE}}
        self.service.set_first(key, json.dumps({"process": me, "settings": mine}))
        text = self.service.try_get(key)
        assert text is not None  # nothing is ever taken out of the store
        first = json.loads(text)
        differences = [
            f"{name} is {first['settings'].get(name)!r} in process {first['process']} and "
            f"{value!r} in process {me}"
            for name, value in mine.items()
            if first["settings"].get(name) != value
        ]
        if differences:
            raise AgreementError(
                f"the processes of this job cannot agree on configs: {'; '.join(differences)}; "
                "give all processes the same"
            )
        self._settings_compared = True


def longest_silence(limit: float) -> float:
    """After how many seconds without a heartbeat a process counts as dead.

    `limit` is the longest wait for an answer. At most a minute: JAX itself ends all processes of a
    job about 100 seconds after it lost one, and by then the reason should have been said.
    """
    return min(60.0, limit / 2)


def question_of(request: Request, generation: int) -> str:
    """Where the answer to a request is in the job's store: the same in every process.

    Of the device only its kind (`cpu`, `gpu`, `tpu`) is part of it: hosts may have different models
    and still have to run the same program. The policy is, because a program that asks for tuning
    must not be answered with what was agreed without; and so is the generation.
    """
    content = {
        "call": request.key.call_key,
        "device": request.key.device.partition("|")[0],
        "policy": request.policy,
        "generation": generation,
        "offline": request.offline,
    }
    return f"{PREFIX}/{request.key.op_id}/{short_hash(content)}"


_current: JobAgreement | None = None
_current_lock = threading.Lock()


def job_agreement() -> JobAgreement | None:
    """The agreement of this process's job; None if it is the only process, or if it is off."""
    global _current
    if environment.AGREEMENT_SECONDS.seconds() == 0:
        return None
    service = connect()
    if service is None:
        return None
    with _current_lock:
        # A job that was shut down and started again has a new, empty store.
        if _current is None or _current.service.client is not service.client:
            _current = JobAgreement(service)
        return _current
