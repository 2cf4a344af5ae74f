"""Serve with shipped configs, where a forgotten shape is an error and not a slow surprise.

    python examples/serve_strictly.py

1. Before release: the shapes that will be served are tuned and exported as a bundle.
2. In production: only the bundle is there. Every call is served from it; in strict mode a call
   that nobody tuned raises at once and says what to run.
"""

from __future__ import annotations

import pathlib
import tempfile

import jax
import jax.numpy as jnp

from ejkernel.modules import rms_norm
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    StrictMiss,
    autotune_lowered,
    export_bundle,
    import_bundle,
    set_default_executor,
    stats,
)

SERVED = ((1, 512), (8, 512))  # batch, features


@jax.jit
def respond(x, weight):
    return jnp.tanh(rms_norm(x, weight))


def weight_of(x):
    return jnp.ones(x.shape[-1])


def tune_before_release(bundle: pathlib.Path, folder: str) -> None:
    store = PersistentCache(folder)
    selector = ConfigSelectorChain(cache=ConfigCache(), persistent=store)
    for shape in SERVED:
        x = jnp.ones(shape)
        print(autotune_lowered(selector, respond.lower(x, weight_of(x))))
    export_bundle(store, bundle)
    print(f"\nshipped: {bundle.name}, {bundle.stat().st_size} bytes\n")


def serve(bundle: pathlib.Path, folder: str) -> None:
    store = PersistentCache(folder)
    import_bundle(store, bundle)
    policy = AutotunePolicy(allow_autotune=False, strict=True)
    chain = ConfigSelectorChain(cache=ConfigCache(), persistent=store, policy=policy)
    set_default_executor(Executor(chain))
    for shape in SERVED:
        x = jnp.ones(shape)
        print(f"{shape}: served, first value {respond(x, weight_of(x))[0, 0]:.3f}")
    forgotten = jnp.ones((3, 512))
    try:
        respond(forgotten, weight_of(forgotten))
    except StrictMiss as error:
        print(f"{forgotten.shape}: refused\n\n{error}\n")
    else:
        raise SystemExit("a shape that nobody tuned was served")
    print(stats())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = pathlib.Path(folder, "tuned.json")
        tune_before_release(bundle, f"{folder}/before")
        serve(bundle, f"{folder}/production")


if __name__ == "__main__":
    main()
