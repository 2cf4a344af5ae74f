"""JAX's settings of a thread, taken along to another one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

_SETTINGS = (
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "default_matmul_precision",
    "default_prng_impl",
    "threefry_partitionable",
    "legacy_prng_key",
    "debug_nans",
    "debug_infs",
)


def current_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The settings of this thread that change what is traced, to be put in force elsewhere."""
    values = {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS}

    @contextlib.contextmanager
    def in_force() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                if getattr(jax.config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            yield

    return in_force
