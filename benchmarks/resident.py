"""What a call needs of memory by the system's count: for kernels that a compiler knows nothing of.

It is read from `/proc`, so this works on Linux only.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax


def resident_bytes(
    function: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    check: Callable[..., None] | None = None,
) -> int:
    """By how much a process grows during its first call, results included.

    The process is a new one: memory that earlier calls left behind would be used again, uncounted.
    So function, arguments and check must be found by their names there.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_growth, function, arguments, check).result()


def _growth(
    function: Callable[..., Any],
    arguments: Callable[[], tuple[Any, ...]],
    check: Callable[..., None] | None,
) -> int:
    given = jax.block_until_ready(arguments())
    compiled = jax.jit(function).lower(*given).compile()
    before = _status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the largest size so far
    result = jax.block_until_ready(compiled(*given))
    most = _status("VmHWM")
    if check is not None:
        check(result, *given)
    return most - before


def _status(name: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}: this needs Linux")
    return int(found[1]) * 1024
