"""Programs without the lines of source that they come from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax

_NAME = "jax_traceback_in_locations_limit"
_changing = threading.Lock()
_inside = 0  # of threads, and of kernels that are tuned while another one is traced
_outside: int | None = None  # the setting before the first of them came


@contextlib.contextmanager
def without_locations() -> Iterator[None]:
    """Lower without locations: equal programs are equal bytes then, whoever asked for them.

    Pallas writes locations into the kernel's bytecode, where nothing can take them out again; and
    writing them is a fifth of the time that lowering takes. The setting is the process's; what
    another thread lowers meanwhile lacks its locations too, and nothing else.
    """
    global _inside, _outside
    with _changing:
        if _inside == 0:
            _outside = getattr(jax.config, _NAME)
            jax.config.update(_NAME, 0)
        _inside += 1
    try:
        yield
    finally:
        with _changing:
            _inside -= 1
            if _inside == 0:
                jax.config.update(_NAME, _outside)
