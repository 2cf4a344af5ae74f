"""The files of ejkernel that the first call of a kernel visits, counted with `sys.settrace`.

    python benchmarks/first_call.py

A reader who follows one call through the package opens these files. Importing is not counted.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, PersistentCache

PACKAGE = str(pathlib.Path(ejkernel.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Chunks:
    chunks: int = 1


class Scale(Kernel[Chunks, jax.Array]):
    def run(self, x: jax.Array, *, cfg: Chunks, factor: float = 2.0) -> jax.Array:
        return jnp.concatenate([part * factor for part in jnp.split(x, cfg.chunks)])

    def heuristic_cfg(self, inv: Any) -> Chunks:
        return Chunks(2)


def files_of(call: Any) -> list[str]:
    """The files of the package in which functions were called."""
    seen: set[str] = set()

    def trace(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            seen.add(name.removeprefix(f"{PACKAGE}/"))

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return sorted(seen)


def main() -> None:
    x = jnp.ones(8)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EJKERNEL_CACHE_DIR"] = folder  # nothing is stored yet, whoever runs this
        store = PersistentCache(folder)
        executor = Executor(ConfigSelectorChain(ConfigCache(), persistent=store, autotune=False))
        cases = {
            "kernel(x)": lambda: Scale("first")(x),
            "executor(kernel, x), an empty store": lambda: executor(Scale("second"), x),
        }
        for name, call in cases.items():
            files = files_of(call)
            print(f"{name}: {len(files)} files")
            for file in files:
                print(f"  {file}")


if __name__ == "__main__":
    main()
