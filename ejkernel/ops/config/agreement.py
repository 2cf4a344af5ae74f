"""One answer for all processes of a job: the seam between selection and `ejkernel.fleet`.

Selection knows nothing of several processes. It asks here whether there are any; only then is
`ejkernel.fleet` loaded, which does the talking and which `ejkernel.ops` hands in. A run of one
process pays one attribute look-up per traced call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

from .decision import Decision, TierMiss
from .tiers.request import Request

Answer = Decision[Any] | tuple[TierMiss, ...]
"""A decision; or, if no source has a config, each source with its reason."""


class AgreementError(RuntimeError):
    """The processes of a job could not agree on a config; the message says on which, and why."""


class AgreementTimeout(AgreementError):
    """The process that was to decide did not answer in time."""


class Agreement(Protocol):
    """What makes several processes run with the same config."""

    def settle(self, request: Request, generation: int, ask: Callable[[Request], Answer]) -> Answer:
        """The answer that holds in every process; one of them calls `ask` to find it.

        `generation` counts how often the program changed its configs for good (`install`,
        `clear`). What was settled before holds for the earlier generation only.
        """
        ...


_connect: Callable[[], Agreement | None] | None = None


def provide_agreement(connect: Callable[[], Agreement | None]) -> None:
    """Say how to agree with the other processes of a job; it is called where there are any."""
    global _connect
    _connect = connect


def agreement_in_force() -> Agreement | None:
    """How to agree with the other processes of this job; None if there are none."""
    if _connect is None or not jax.distributed.is_initialized():
        return None
    return _connect()
