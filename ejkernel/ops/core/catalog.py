"""Which kernels exist in this process, by operation id: how a label finds its kernel again."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernel import Kernel

_lock = threading.Lock()
_kernels: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def add(kernel: Kernel[Any, Any]) -> None:
    """Remember a kernel for as long as somebody else does; the newest of a name wins."""
    with _lock:
        _kernels[kernel.full_op_id] = kernel


def find(full_op_id: str) -> Kernel[Any, Any] | None:
    """The live kernel with this operation id, if there is one."""
    with _lock:
        return _kernels.get(full_op_id)
