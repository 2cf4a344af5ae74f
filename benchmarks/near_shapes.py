"""Is the config of the nearest tuned shape better than the heuristic?

    python benchmarks/near_shapes.py [--rounds 15] [--json]

Some shapes of a kernel are tuned. Other shapes then ask for a config: once with near shapes
allowed, once without. Both run interleaved, after their outputs were compared; the ratio is near /
heuristic. Shapes for which both are the same config are counted and left out of the mean, and so
are those for which no near config is valid.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention import FlashAttention
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Dimension,
    Kernel,
    NearShapes,
    PersistentCache,
    Tuner,
)
from ejkernel.ops.tuner.clock import typical


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int = 64
    inner: int = 64


class BlockedMatmul(Kernel[Blocks, jax.Array]):
    """A blocked product whose heuristic is what people write: a constant."""

    near_shapes = NearShapes(
        Dimension(argument=0, axis=0, rounding="nearest"),
        Dimension(argument=0, axis=1, rounding="nearest"),
        Dimension(argument=1, axis=0, rounding="nearest"),
        Dimension(argument=1, axis=1, rounding="nearest"),
    )

    def __init__(self) -> None:
        super().__init__(name="blocked_matmul")

    def run(self, a, b, *, cfg):
        steps = a.shape[1] // cfg.inner
        inner = b.reshape(steps, cfg.inner, b.shape[1])

        def one(block):
            parts = block.reshape(cfg.rows, steps, cfg.inner).swapaxes(0, 1)
            zero = jnp.zeros((cfg.rows, b.shape[1]), a.dtype)
            return jax.lax.scan(lambda s, xs: (s + xs[0] @ xs[1], None), zero, (parts, inner))[0]

        return jax.lax.map(one, a.reshape(-1, cfg.rows, a.shape[1])).reshape(a.shape[0], -1)

    def heuristic_cfg(self, inv):
        return Blocks()

    def candidate_cfgs(self, inv):
        (rows, inner) = inv.args[0].shape
        return [
            Blocks(r, i)
            for r in (32, 64, 128, 256)
            for i in (64, 128, 256, 512)
            if rows % r == 0 and inner % i == 0
        ]


def cases() -> dict[str, tuple[Kernel[Any, Any], list[Any], list[Any]]]:
    """Kernel, calls to tune, calls to ask for; a call is (arrays, keywords)."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.standard_normal(shape, dtype=np.float32))

    def product(m: int, k: int, n: int) -> Any:
        return (normal(m, k), normal(k, n)), {}

    def attention(length: int, causal: bool) -> Any:
        keywords = {"causal": causal, "softmax_scale": 0.125}
        return tuple(normal(1, length, 8, 64) for _ in range(3)), keywords

    lengths = (384, 640, 768, 1280, 1536, 1792, 2560, 3072)
    return {
        "blocked matmul": (
            BlockedMatmul(),
            [product(m, 512, n) for m in (512, 1024) for n in (512, 1024)],
            [product(m, 512, n) for m in (256, 768, 1280, 1536) for n in (384, 768)],
        ),
        "flash_attention": (
            FlashAttention(),
            [attention(n, causal) for n in (512, 1024, 2048) for causal in (False, True)],
            [attention(n, causal) for n in lengths for causal in (False, True)],
        ),
    }


def compared(kernel: Any, call: Any, configs: list[Any], rounds: int) -> list[float]:
    """Seconds per call of each config, interleaved, after comparing their outputs."""
    args, keywords = call
    run = kernel.implementation("xla").forward if kernel.implementations else kernel.run
    programs = [jax.jit(lambda *args, cfg=cfg: run(*args, cfg=cfg, **keywords)) for cfg in configs]
    first, *others = [np.asarray(program(*args)) for program in programs]
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-2, atol=1e-2)
    samples: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for program, taken in zip(programs, samples, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            taken.append(time.perf_counter() - start)
    return [typical(taken) for taken in samples]


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for name, (kernel, tuned, asked) in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            store = PersistentCache(folder)
            chain = ConfigSelectorChain(
                ConfigCache(), persistent=store, tuner=Tuner(progress=False, effort="full")
            )
            for args, keywords in tuned:
                chain.known_or_tuned(kernel.bind(*args, **keywords), kernel)
            ratios, same, none = [], 0, 0
            for call in asked:
                inv = kernel.bind(*call[0], **call[1])
                near = ConfigSelectorChain(
                    ConfigCache(), AutotunePolicy(allow_autotune=False), persistent=store
                ).decide(inv, kernel)
                heuristic = kernel.heuristic(inv)
                if near.tier != "near":
                    none += 1
                elif near.cfg == heuristic:
                    same += 1
                else:
                    lent, default = compared(kernel, call, [near.cfg, heuristic], options.rounds)
                    ratios.append(lent / default)
            store.close()
        rows.append(
            {
                "kernel": name,
                "shapes": len(asked),
                "same config": same,
                "nothing near": none,
                "mean": math.exp(statistics.fmean(map(math.log, ratios))) if ratios else 1.0,
                "worst": max(ratios, default=1.0),
            }
        )
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"jax {jax.__version__}, Python {platform.python_version()}; near / heuristic")
    names = ("kernel", "shapes", "same", "nothing", "mean", "worst")
    print("{:18} {:>6} {:>5} {:>8} {:>6} {:>6}".format(*names))
    for row in rows:
        print(
            f"{row['kernel']:18} {row['shapes']:6d} {row['same config']:5d} "
            f"{row['nothing near']:8d} {row['mean']:6.2f} {row['worst']:6.2f}"
        )


if __name__ == "__main__":
    main()
