"""How much work a call is: what turns a time into GFLOP/s and GB/s."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..utils.fingerprint import is_array
from .invocation import BatchAxes, array_owners, is_inexact

if TYPE_CHECKING:
    from .invocation import Invocation
    from .kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call has to do, whoever does it and with whichever config.

    Attributes:
      flops: floating-point operations that the definition needs; a multiply-add is two. What an
        implementation computes twice counts once. None: not counted.
      bytes: of memory, with every argument read once and every result written once. None: not
        counted.

    >>> Work(flops=2e9, bytes=1e6)
    Work(flops=2000000000.0, bytes=1000000.0)
    """

    flops: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("flops", self.flops), ("bytes", self.bytes)):
            if value is None:
                continue
            is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(f"Work: {name}={value!r} must be a number of 0 or more, or None")
            object.__setattr__(self, name, float(value))  # NumPy's are not plain data


def counted_work(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> dict[str, Any] | None:
    """What a kernel's `work` says about a call, as it is stored with its times; None if nothing.

    It is of the whole call: of a batch, all its examples. The dtype is that of the first array of
    floating numbers, which says what the machine's peak is.
    """
    work = kernel.work(inv)
    if work is None:
        return None
    if not isinstance(work, Work):
        raise TypeError(
            f"kernel {kernel.full_op_id}: work must return a Work or None, got {work!r}"
        )
    flops, moved = work.flops, work.bytes
    if isinstance(inv.batch_axes, BatchAxes):
        # The invocation is of one example, and some arguments may be those of all of them.
        flops, moved = None if flops is None else flops * inv.batch_axes.size, None
    leaves = jax.tree.leaves((inv.args, dict(inv.kwargs)))
    dtypes = [str(leaf.dtype) for leaf in leaves if is_array(leaf) and is_inexact(leaf)]
    return {"flops": flops, "bytes": moved, "dtype": dtypes[0] if dtypes else ""}


def traffic(inv: Invocation[Any, Any], *results: Any) -> float:
    """Bytes of a call whose arguments are read once and whose results are written once.

    The backward pass of a call that is differentiated reads the arguments and the cotangents of the
    results, and writes a gradient for each argument that has one.
    """
    owners = array_owners(inv.args, inv.kwargs)
    moved = sum(map(_size, (leaf for _, leaf in owners))) + sum(map(_size, results))
    if inv.differentiated:
        gradients = (x for name, x in owners if name in inv.differentiated and is_inexact(x))
        moved = 2 * moved + sum(map(_size, gradients))
    return float(moved)


def _size(array: Any) -> int:
    return int(math.prod(array.shape) * array.dtype.itemsize)
