"""The tuner versus two others: how good is the pick, how long does it take, does it repeat itself.

    python benchmarks/tuner.py [--repeats 6] [--json]

Tuners, on the same two 16-candidate kernels in the same run, interleaved:

- ours: `Tuner()`, as it comes;
- isolated: `Tuner(isolation="process")`, candidates in a worker process that may be killed;
- naive: the loop that most projects write, "1 warm-up, mean of 3", one candidate after the other;
- tune-jax: the published tuner, if it is installed (`pip install tune-jax`).

The reference times (`reference_times.py`) are measured between the repeats, because neighbours on a
shared machine change which config is best. Regret is how much slower a tuner's pick is than the
true best; a little less than zero is noise. Every candidate's output is checked against the
reference first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reference_times import ReferenceTimes

from ejkernel.ops.tuner.build import TuningTask
from ejkernel.ops.tuner.tuner import Tuner


@dataclasses.dataclass(frozen=True)
class Blocks:
    rows: int
    columns: int


def matmul(a: jax.Array, b: jax.Array, cfg: Blocks) -> jax.Array:
    """A blocked product: rows by `cfg.rows`, the inner dimension by `cfg.columns`."""
    rows = a.reshape(-1, cfg.rows, a.shape[1])

    def one(block: jax.Array) -> jax.Array:
        steps = a.shape[1] // cfg.columns
        parts = block.reshape(cfg.rows, steps, cfg.columns).swapaxes(0, 1)
        inner = b.reshape(steps, cfg.columns, b.shape[1])
        zero = jnp.zeros((cfg.rows, b.shape[1]), a.dtype)
        return jax.lax.scan(lambda acc, xs: (acc + xs[0] @ xs[1], None), zero, (parts, inner))[0]

    return jax.lax.map(one, rows).reshape(a.shape[0], b.shape[1])


def attention(q: jax.Array, k: jax.Array, v: jax.Array, cfg: Blocks) -> jax.Array:
    """Chunked attention over (heads, length, dim): query blocks by key blocks, online softmax."""
    heads, _, dim = q.shape

    def one(block: jax.Array) -> jax.Array:
        def step(state: Any, xs: Any) -> Any:
            top, total, out = state
            keys, values = xs
            scores = jnp.einsum("hqd,hkd->hqk", block, keys) * dim**-0.5
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            total = total * shrink + weights.sum(-1)
            out = out * shrink[..., None] + jnp.einsum("hqk,hkd->hqd", weights, values)
            return (new_top, total, out), None

        def chunks(x: jax.Array) -> jax.Array:
            return x.reshape(heads, -1, cfg.columns, dim).swapaxes(0, 1)

        start = (
            jnp.full((heads, cfg.rows), -jnp.inf),
            jnp.zeros((heads, cfg.rows)),
            jnp.zeros((heads, cfg.rows, dim)),
        )
        (_, total, out), _ = jax.lax.scan(step, start, (chunks(k), chunks(v)))
        return out / total[..., None]

    blocks = q.reshape(heads, -1, cfg.rows, dim).swapaxes(0, 1)
    return jax.lax.map(one, blocks).swapaxes(0, 1).reshape(q.shape)


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Blocks]]]:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.standard_normal(shape, dtype=np.float32))

    square = [Blocks(r, c) for r in (32, 64, 128, 256) for c in (64, 128, 256, 512)]
    chunks = [Blocks(r, c) for r in (64, 128, 256, 512) for c in (64, 128, 256, 512)]
    return {
        "matmul 512³": (matmul, (normal(512, 512), normal(512, 512)), square),
        "attention 4×512×64": (attention, tuple(normal(4, 512, 64) for _ in range(3)), chunks),
    }


def ours(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    configs: list[Any],
    seed: int,
    **options: Any,
) -> Any:
    work = TuningTask(
        "benchmark",
        lambda cfg: lambda *args: function(*args, cfg),
        args,
        {},
        configs,
        baseline=configs[0],
    )
    return Tuner(seed=seed, progress=False, **options).tune(work).best


def naive(
    function: Callable[..., Any], args: tuple[Any, ...], configs: list[Any], seed: int
) -> Any:
    times = []
    for cfg in configs:
        jitted = jax.jit(lambda *args, cfg=cfg: function(*args, cfg))
        jax.block_until_ready(jitted(*args))
        start = time.perf_counter()
        for _ in range(3):
            jax.block_until_ready(jitted(*args))
        times.append(time.perf_counter() - start)
    return configs[times.index(min(times))]


def tune_jax(
    function: Callable[..., Any], args: tuple[Any, ...], configs: list[Any], seed: int
) -> Any:
    import tune_jax as peer

    def call(*args: Any, rows: int, columns: int) -> Any:
        return function(*args, Blocks(rows, columns))

    space = {
        "rows": sorted({cfg.rows for cfg in configs}),
        "columns": sorted({cfg.columns for cfg in configs}),
    }
    tuned = peer.tune(call, hyperparams=space)
    tuned(*args)
    return Blocks(**tuned.optimal_hyperparams)


def reference_times_of(
    function: Callable[..., Any], args: tuple[Any, ...], configs: list[Any]
) -> ReferenceTimes:
    """To measure all candidates carefully, once they are seen to agree."""
    calls = {}
    for cfg in configs:
        program = jax.jit(lambda *args, cfg=cfg: function(*args, cfg)).lower(*args).compile()
        calls[cfg] = lambda program=program: program(*args)
    reference = np.asarray(calls[configs[0]]())
    for call in calls.values():
        np.testing.assert_allclose(np.asarray(call()), reference, rtol=1e-3, atol=1e-3)
    return ReferenceTimes(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of the reference times")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    isolated = functools.partial(ours, isolation="process")
    tuners = {"ours": ours, "isolated": isolated, "naive": naive}
    if importlib.util.find_spec("tune_jax") is not None:
        tuners["tune-jax"] = tune_jax
    rows = []
    for name, (function, args, configs) in cases().items():
        picks: dict[str, list[Any]] = {c: [] for c in tuners}
        seconds: dict[str, list[float]] = {c: [] for c in tuners}
        times = reference_times_of(function, args, configs)
        for repeat in range(options.repeats):
            order = list(tuners)
            random.Random(repeat).shuffle(order)  # so that leftovers hit nobody in particular
            for tuner in order:
                tune = tuners[tuner]
                jax.clear_caches()
                gc.collect()
                time.sleep(0.5)
                start = time.perf_counter()
                picks[tuner].append(tune(function, args, configs, repeat))
                seconds[tuner].append(time.perf_counter() - start)
            times.measure(math.ceil(options.rounds / options.repeats))
        for tuner in tuners:
            regrets = [times.versus_the_best(cfg) - 1 for cfg in picks[tuner]]
            rows.append(
                {
                    "case": name,
                    "tuner": tuner,
                    "mean regret": statistics.mean(regrets),
                    "worst regret": max(regrets),
                    "winners": len(set(picks[tuner])),
                    "spread of winners": max(regrets) - min(regrets),
                    "seconds": statistics.median(seconds[tuner]),
                    "ours / this": statistics.median(
                        mine / theirs
                        for mine, theirs in zip(seconds["ours"], seconds[tuner], strict=True)
                    ),
                }
            )
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {options.repeats} repeats")
    names = ("case", "tuner", "regret", "worst", "winners", "seconds", "ours/this")
    print("{:20} {:10} {:>7} {:>7} {:>8} {:>8} {:>10}".format(*names))
    for row in rows:
        print(
            f"{row['case']:20} {row['tuner']:10} {row['mean regret']:7.1%} "
            f"{row['worst regret']:7.1%} {row['winners']:8d} {row['seconds']:8.2f} "
            f"{row['ours / this']:10.2f}"
        )


if __name__ == "__main__":
    main()
