"""The seam between selection and the tuner, which lies above it and is handed in.

A selection that finds nothing may measure. `ejkernel.ops` says how to get at what measures, so that
nothing of it is loaded before something is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .outcome import Outcome

if TYPE_CHECKING:
    from ..core.invocation import Invocation
    from ..core.kernel import Kernel


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


_load: Callable[[], Measuring] | None = None


def provide_measuring(load: Callable[[], Measuring]) -> None:
    """Say where to get what measures; it is loaded when first needed."""
    global _load
    _load = load


def measuring() -> Measuring:
    """What measures."""
    assert _load is not None  # `ejkernel.ops` provides it when it is imported
    return _load()
