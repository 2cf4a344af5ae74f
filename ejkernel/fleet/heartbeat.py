"""Heartbeats of a process that decides, so that those who wait can tell slow from dead.

Nobody answers a heartbeat and nobody waits for one: a measurement that runs meanwhile shares its
process with one short message every few seconds, and synchronises with nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..ops.config.hooks import AgreementError
from .coordination import CoordinationService

logger = logging.getLogger(__name__)


def longest_silence(limit: float) -> float:
    """After how many seconds without a heartbeat a process counts as dead.

    `limit` is the longest wait for an answer.

    At most a minute: JAX itself ends all processes of a job about 100 seconds after it lost one,
    and by then the reason should have been said.
    """
    return min(60.0, limit / 2)


def heartbeat_interval(limit: float) -> float:
    """How often heartbeats are given: often enough that losing a few of them is no alarm."""
    return longest_silence(limit) / 5


class Heartbeat:
    """Gives heartbeats while the block runs. A block that is quickly over gives none."""

    def __init__(self, service: CoordinationService, key: str, every: float) -> None:
        self._service = service
        self._key = key
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ejkernel-heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(timeout=self._every)

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(self._every):
            count += 1
            try:
                self._service.set(self._key, str(count))
            except AgreementError as error:
                logger.warning("ejkernel: no more heartbeats while deciding: %s", error)
                return


class HeartbeatMonitor:
    """Watches for the heartbeats that another process gives under a key."""

    def __init__(
        self, service: CoordinationService, key: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._key = key
        self._clock = clock
        self._sign: str | None = None
        self._heard_at = clock()

    def silent_for(self) -> float:
        """Seconds since the last heartbeat; since monitoring began, if there was none yet."""
        sign = self._service.try_get(self._key)
        if sign != self._sign:
            self._sign, self._heard_at = sign, self._clock()
        return self._clock() - self._heard_at
