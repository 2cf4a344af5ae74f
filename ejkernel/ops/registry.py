"""What was called so far: the distinct invocations of this process, as shapes.

Tracing records, so lowering a function is enough to know its operations. Memory is bounded: the
oldest distinct call is forgotten first.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from .core.types import ConfigKey
from .utils import environment

if TYPE_CHECKING:
    from .core.invocation import Invocation
    from .core.kernel import Kernel

LIMIT = 4096

_lock = threading.Lock()
_invocations: OrderedDict[ConfigKey, Invocation[Any, Any]] = OrderedDict()
_replaced: set[ConfigKey | None] = (
    set()
)  # calls that were traced only on the way to their gradients


def record_invocation(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
    """Remember a call by its shapes; live arrays and tracers are never kept."""
    _remember(kernel, inv, unlimited=True)


class Recorded:
    """What the executor records of one call that it traces; `EJKERNEL_OPS_RECORD` has the say.

    JAX traces a call forward before it asks for the gradient. Then it is the call with its gradient
    that runs, and the one without is no longer listed unless a program runs it too, as it says when
    it is lowered. Its label finds it in either case.
    """

    def __init__(self) -> None:
        self._added: ConfigKey | None = None
        self._runs = False

    def runs_forward(self) -> None:
        """A program is lowered in which the call runs without its gradient."""
        self._runs = True
        with _lock:
            _replaced.discard(self._added)

    def while_tracing(self, kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
        """Record a call; with a gradient, instead of the same call without."""
        mode = environment.RECORD.read()
        if mode == "0":
            return
        if inv.differentiated and self._added is not None and not self._runs:
            with _lock:
                _replaced.add(self._added)
        is_new = inv.key not in _invocations
        _remember(kernel, inv, unlimited=mode == "1")
        if is_new and not inv.differentiated:
            self._added = inv.key


def _remember(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], unlimited: bool) -> None:
    abstract = dataclasses.replace(inv.abstract(), kernel=kernel, override_cfg=None)
    key = inv.key if inv.kernel is kernel else abstract.key
    with _lock:
        _invocations[key] = abstract
        _invocations.move_to_end(key)
        _replaced.discard(key)
        while not unlimited and len(_invocations) > LIMIT:
            _replaced.discard(_invocations.popitem(last=False)[0])


def get_invocations(device: str | None = None) -> list[Invocation[Any, Any]]:
    """The recorded invocations, oldest first; with `device` (a fingerprint) only that device's."""
    with _lock:
        return [
            inv
            for key, inv in _invocations.items()
            if device in (None, key.device) and key not in _replaced
        ]


def find_invocation(op_id: str, call_key: str, device: str) -> Invocation[Any, Any] | None:
    """The recorded invocation of a label, if any."""
    with _lock:
        return _invocations.get(ConfigKey(device, op_id, call_key))


def clear_invocations() -> None:
    """Forget all recorded invocations."""
    with _lock:
        _invocations.clear()
        _replaced.clear()
