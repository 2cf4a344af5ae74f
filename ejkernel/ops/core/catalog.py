"""Which kernels exist in this process, by operation id: how a label finds its kernel again."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernel import Kernel

_lock = threading.Lock()
_kernels: dict[str, list[weakref.ref[Any]]] = {}  # the newest last


def add(kernel: Kernel[Any, Any]) -> None:
    """Remember a kernel for as long as somebody else does; the newest of a name wins."""
    with _lock:
        for op_id, refs in list(_kernels.items()):
            _kernels[op_id] = [ref for ref in refs if ref() is not None]
            if not _kernels[op_id]:
                del _kernels[op_id]
        _kernels.setdefault(kernel.full_op_id, []).append(weakref.ref(kernel))


def operations() -> list[str]:
    """The operation ids of all live kernels."""
    with _lock:
        return [op_id for op_id, refs in _kernels.items() if any(ref() is not None for ref in refs)]


def find(full_op_id: str) -> Kernel[Any, Any] | None:
    """The newest live kernel with this operation id, if there is one."""
    with _lock:
        for ref in reversed(_kernels.get(full_op_id, [])):
            if (kernel := ref()) is not None:
                return kernel  # type: ignore[no-any-return]
    return None
