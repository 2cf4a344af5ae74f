"""One answer for all processes of a job: the seam between selection and `ejkernel.fleet`.

Selection knows nothing of several processes. It asks here whether there are any; only then is
`ejkernel.fleet` imported, which does the talking. A run of one process pays one attribute look-up
per traced call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

from .decision import Decision, Passed
from .tiers import Request

Answer = Decision[Any] | tuple[Passed, ...]
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


def agreement_in_force() -> Agreement | None:
    """How to agree with the other processes of this job; None if there are none."""
    if not jax.distributed.is_initialized():
        return None
    # Upwards, like a kernel's way to its executor: nothing of it is loaded in a run of one process.
    from ...fleet.agreement import job_agreement

    return job_agreement()
