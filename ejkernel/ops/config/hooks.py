"""What selection calls of the layers above it, which `ejkernel.ops` hands in.

Measuring: a selection that finds nothing may tune. Agreement: with several processes, one answer
holds for all of them; `ejkernel.fleet` does the talking. Nothing of either is loaded before it is
needed, and a run of one process pays one look-up per traced call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax

if TYPE_CHECKING:
    from ..core.invocation import Invocation
    from ..core.kernel import Kernel
    from .decision import Answer
    from .outcome import Outcome
    from .tiers.request import Request


class Measuring(Protocol):
    """What measures the candidates of a call."""

    Tuner: Any  # the class of tuners; without arguments it makes the default one

    def tune_invocation(
        self,
        tuner: Any,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        *,
        stored: Sequence[Mapping[str, Any]] = (),
    ) -> Outcome[Any]:
        """Measure a kernel's candidates for a call; `stored` are trials of earlier runs."""
        ...


class Agreement(Protocol):
    """What makes several processes run with the same config."""

    def settle(self, request: Request, generation: int, ask: Callable[[Request], Answer]) -> Answer:
        """The answer that holds in every process; one of them calls `ask` to find it.

        `generation` counts how often the program changed its configs for good (`install`,
        `clear`). What was settled before holds for the earlier generation only.
        """
        ...


class AgreementError(RuntimeError):
    """The processes of a job could not agree on a config; the message says on which, and why."""


class AgreementTimeout(AgreementError):
    """The process that was to decide did not answer in time."""


_load: Callable[[], Measuring] | None = None
_connect: Callable[[], Agreement | None] | None = None


def provide_measuring(load: Callable[[], Measuring]) -> None:
    """Say where to get what measures; it is loaded when first needed."""
    global _load
    _load = load


def measuring() -> Measuring:
    """What measures."""
    assert _load is not None  # `ejkernel.ops` provides it when it is imported
    return _load()


def provide_agreement(connect: Callable[[], Agreement | None]) -> None:
    """Say how to agree with the other processes of a job; it is called where there are any."""
    global _connect
    _connect = connect


def job_agreement() -> Agreement | None:
    """How to agree with the other processes of this job; None if there are none."""
    if _connect is None or not jax.distributed.is_initialized():
        return None
    return _connect()
