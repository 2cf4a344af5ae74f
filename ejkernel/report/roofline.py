"""The most that this machine can do: measured once, and stored in the cache folder.

Nothing is measured before a record of a run is made whose operations count their work. It takes
about a second.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ..ops.utils import environment
from ..ops.utils.fingerprint import StandIn, current_device, device_fingerprint
from ..store.private import PrivateFolder
from .plain import NotARun, as_text, from_text
from .record import Roofline

logger = logging.getLogger(__name__)

SCHEMA, MARK = 1, "ejkernel_roofline"

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""What peaks are measured of; other numbers have none."""

BYTES = 256 * 2**20  # of the array that memory is measured with: more than caches hold
SIDES = (512, 1024, 2048, 4096, 8192)  # of square matrices
SAMPLES_SECONDS = 0.1  # of one program
BUSY = 1.5  # processes that want to run, per core: whoever measures then measures the others
LONGEST_PROGRAM = 0.02  # a matrix product that takes longer is large enough

_measured: dict[str, Roofline] = {}  # of this process, where nothing can be stored


def roofline_of(device: str, dtypes: Iterable[str] = ()) -> Roofline | None:
    """The most that a device can do with numbers of these dtypes.

    What is stored; if that is not enough, and it is the device of this process, it is measured.
    """
    known = _measured.get(device) or _stored(device)
    wanted = [dtype for dtype in dict.fromkeys(("float32", *dtypes)) if dtype in DTYPES]
    missing = [dtype for dtype in wanted if known is None or dtype not in known.flops]
    if not missing or isinstance(current_device(), StandIn) or device != device_fingerprint():
        return known
    try:
        peaks = {dtype: peak for dtype in missing if (peak := flops_per_second(dtype)) is not None}
        memory = bytes_per_second() if known is None else known.bytes
    except (jax.errors.JaxRuntimeError, MemoryError) as error:  # a device without room for it
        logger.info("ejkernel: the peak of this machine cannot be measured: %s", error)
        return known
    found = Roofline(
        device=device,
        flops={**({} if known is None else known.flops), **peaks},
        bytes=memory,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    _measured[device] = found
    if _is_busy():
        logger.info("ejkernel: this machine is busy; its peak will be measured again another time")
    else:
        _store(found)
    return found


def flops_per_second(dtype: str) -> float | None:
    """The most operations per second of a matrix product, over some sizes; None if JAX lacks it."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None  # float64 without `jax_enable_x64`
    most, until = 0.0, time.perf_counter() + 2 * SAMPLES_SECONDS
    multiply = jax.jit(jnp.matmul)
    for side in SIDES:
        matrix = jnp.ones((side, side), dtype)
        seconds = _fastest(functools.partial(multiply, matrix, matrix))
        most = max(most, 2.0 * side**3 / seconds)
        if seconds > LONGEST_PROGRAM or time.perf_counter() > until:
            break
    return most


def bytes_per_second() -> float:
    """The most bytes per second that are read, or read and written again in place."""
    # A result in memory of its own would measure how fast the system hands that out.
    negate = jax.jit(jnp.negative, donate_argnums=0)
    largest = jax.jit(lambda x: jnp.max(x, axis=1))
    array = jnp.ones((BYTES // 4096, 1024), jnp.float32)
    reading = BYTES / _fastest(lambda: largest(array), 2 * SAMPLES_SECONDS)

    def in_place() -> Any:
        nonlocal array
        array = negate(array)
        return array

    return max(reading, 2 * BYTES / _fastest(in_place, 2 * SAMPLES_SECONDS))


def _fastest(run: Callable[[], Any], seconds: float = SAMPLES_SECONDS) -> float:
    """Seconds of the fastest of some runs: what else the machine does slows down the others."""
    jax.block_until_ready(run())  # compiled
    until = time.perf_counter() + seconds
    fastest = float("inf")
    while True:
        start = time.perf_counter()
        jax.block_until_ready(run())
        end = time.perf_counter()
        fastest = min(fastest, max(end - start, 1e-9))
        if end > until:
            return fastest


def _is_busy() -> bool:
    """True if other programs want more than the cores that there are."""
    try:
        return os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # not on this system
        return False


# --- stored --------------------------------------------------------------------------------------


def _file_name(device: str) -> str:
    return f"{re.sub(r'[^a-z0-9.]+', '-', device.lower()).strip('-')[:120]}.json"


def _stored(device: str) -> Roofline | None:
    try:
        with PrivateFolder.open(environment.cache_folder("rooflines")) as folder:
            text = folder.read(_file_name(device))
        found = from_text(Roofline, text, SCHEMA, "the roofline", MARK)
    except (OSError, NotARun, ValueError) as error:  # not there, damaged, or somebody else's
        logger.debug("ejkernel: no stored roofline of %s: %s", device, error)
        return None
    return found if found.device == device else None


def _store(roofline: Roofline) -> None:
    text = as_text(roofline, SCHEMA, MARK)
    try:
        with PrivateFolder.open(environment.cache_folder("rooflines"), create=True) as folder:
            folder.write(_file_name(roofline.device), text.encode())
    except OSError as error:
        logger.info("ejkernel: the roofline of this machine is not stored: %s", error)
