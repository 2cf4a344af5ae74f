"""Record how long every config of a space takes on this machine, for `search_replay.py`.

    python benchmarks/record_table.py matmul attention recurrence --minutes 10

Every config is compiled once and checked against a plain implementation; then all of them are timed
in interleaved rounds, each in a new random order, so that a busy moment of the machine hits all
alike. The time limit may cut rounds, never below 15.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops import Space
from ejkernel.ops.tuner.clock import Stopwatch, typical

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replay import Table

TABLES = Path(__file__).parent / "tables"
FEWEST_ROUNDS = 15
Config = dict[str, Any]


class Experiment(NamedTuple):
    """A kernel, its space, and the config that somebody would choose without measuring."""

    title: str
    kernel: Callable[..., jax.Array]
    reference: Callable[..., jax.Array]
    inputs: tuple[np.ndarray, ...]
    space: Space
    heuristic: Config


def matmul(a: jax.Array, b: jax.Array, cfg: Config) -> jax.Array:
    """Blocked product; `order` says which loop is outermost."""
    m, k = a.shape
    n = b.shape[1]
    bm, bn, bk = cfg["block_m"], cfg["block_n"], cfg["block_k"]

    def product(i: Any, j: Any, p: Any) -> jax.Array:
        left = lax.dynamic_slice(a, (i * bm, p * bk), (bm, bk))
        return left @ lax.dynamic_slice(b, (p * bk, j * bn), (bk, bn))

    def accumulated(i: Any, j: Any) -> jax.Array:
        return lax.fori_loop(
            0,
            k // bk,
            lambda p, total: total + product(i, j, p),
            jnp.zeros((bm, bn), a.dtype),
            unroll=cfg["unroll"],
        )

    def add(out: jax.Array, i: Any, j: Any, p: Any) -> jax.Array:
        old = lax.dynamic_slice(out, (i * bm, j * bn), (bm, bn))
        return lax.dynamic_update_slice(out, old + product(i, j, p), (i * bm, j * bn))

    def store(out: jax.Array, i: Any, j: Any) -> jax.Array:
        return lax.dynamic_update_slice(out, accumulated(i, j), (i * bm, j * bn))

    rows, columns = m // bm, n // bn
    zeros = jnp.zeros((m, n), a.dtype)
    if cfg["order"] == "k":

        def over_tiles(p: Any, out: jax.Array) -> jax.Array:
            return lax.fori_loop(
                0, rows * columns, lambda t, out: add(out, t // columns, t % columns, p), out
            )

        return lax.fori_loop(0, k // bk, over_tiles, zeros, unroll=cfg["unroll"])
    if cfg["order"] == "mn":
        return lax.fori_loop(
            0, rows * columns, lambda t, out: store(out, t // columns, t % columns), zeros
        )
    return lax.fori_loop(0, rows * columns, lambda t, out: store(out, t % rows, t // rows), zeros)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, cfg: Config) -> jax.Array:
    """Online-softmax attention over key blocks; `queries` says how query blocks are visited."""
    heads, length, depth = q.shape
    bq, bk = cfg["block_q"], cfg["block_k"]
    scaled = (q * depth**-0.5).reshape(heads, length // bq, bq, depth).swapaxes(0, 1)

    def one(block: jax.Array) -> jax.Array:
        def step(j: Any, carry: Any) -> Any:
            top, total, out = carry
            keys = lax.dynamic_slice_in_dim(k, j * bk, bk, 1)
            values = lax.dynamic_slice_in_dim(v, j * bk, bk, 1)
            scores = jnp.einsum("hqd,hkd->hqk", block, keys)
            new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
            weights = jnp.exp(scores - new_top)
            shrink = jnp.exp(top - new_top)
            out = out * shrink + jnp.einsum("hqk,hkd->hqd", weights, values)
            return new_top, total * shrink + weights.sum(-1, keepdims=True), out

        start = (
            jnp.full((heads, bq, 1), -1e30, q.dtype),
            jnp.zeros((heads, bq, 1), q.dtype),
            jnp.zeros((heads, bq, depth), q.dtype),
        )
        _, total, out = lax.fori_loop(0, length // bk, step, start, unroll=cfg["unroll"])
        return out / total

    if cfg["queries"] == "map":
        out = lax.map(one, scaled)
    elif cfg["queries"] == "vmap":
        out = jax.vmap(one)(scaled)
    else:
        out = jnp.stack([one(block) for block in scaled])
    return out.swapaxes(0, 1).reshape(heads, length, depth)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax attention as in a textbook."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)


def recurrence(x: jax.Array, decay: jax.Array, cfg: Config) -> jax.Array:
    """y[t] = decay * y[t - 1] + x[t] by chunks; `inner` says how a chunk is computed."""
    length, width = x.shape
    chunk, bd = cfg["chunk"], cfg["block_d"]

    def inside(part: jax.Array, rate: jax.Array) -> jax.Array:
        if cfg["inner"] == "scan":

            def step(y: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
                y = rate * y + row
                return y, y

            return lax.scan(step, jnp.zeros_like(part[0]), part, unroll=cfg["unroll"])[1]
        if cfg["inner"] == "associative":
            rates = jnp.broadcast_to(rate, part.shape)
            return lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (rates, part)
            )[1]
        lag = np.arange(chunk)[:, None] - np.arange(chunk)[None, :]
        weights = jnp.where(lag >= 0, rate[:, None, None] ** np.maximum(lag, 0), 0.0)
        return jnp.einsum("dts,sd->td", weights, part)

    def columns(part: jax.Array, rate: jax.Array) -> jax.Array:
        powers = rate ** jnp.arange(1, chunk + 1)[:, None]

        def step(last: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = inside(rows, rate) + powers * last
            return y[-1], y

        blocks = part.reshape(length // chunk, chunk, bd)
        outer = 1 if cfg["inner"] == "scan" else cfg["unroll"]
        _, out = lax.scan(step, jnp.zeros(bd, x.dtype), blocks, unroll=outer)
        return out.reshape(length, bd)

    parts = x.reshape(length, width // bd, bd).swapaxes(0, 1)
    out = lax.map(lambda both: columns(*both), (parts, decay.reshape(-1, bd)))
    return out.swapaxes(0, 1).reshape(length, width)


def plain_recurrence(x: jax.Array, decay: jax.Array) -> jax.Array:
    """The recurrence, step by step."""

    def step(y: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = decay * y + row
        return y, y

    return lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def experiments() -> dict[str, Experiment]:
    """What can be recorded, by name."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    blocks = [32, 64, 128, 256, 512]
    return {
        "matmul": Experiment(
            "blocked matmul, 512x512x512 float32",
            matmul,
            jnp.matmul,
            (normal(512, 512), normal(512, 512)),
            Space(
                block_m=blocks,
                block_n=blocks,
                block_k=blocks,
                order=["mn", "nm", "k"],
                unroll=[1, 2],
                where=[
                    lambda block_k, unroll: unroll * block_k <= 512,
                    lambda block_m, block_n: block_m * block_n >= 8192,
                    lambda block_m, block_n, block_k: block_m * block_n * block_k >= 2**20,
                ],
            ),
            {"block_m": 128, "block_n": 128, "block_k": 128, "order": "mn", "unroll": 1},
        ),
        "attention": Experiment(
            "chunked attention, 4 heads x 512 x 64 float32",
            attention,
            plain_attention,
            (normal(4, 512, 64), normal(4, 512, 64), normal(4, 512, 64)),
            Space(
                block_q=[8, 16, *blocks],
                block_k=[8, 16, *blocks],
                queries=["map", "vmap", "python"],
                unroll=[1, 2, 4],
                where=[
                    lambda block_k, unroll: unroll * block_k <= 512,
                    lambda block_q, block_k: block_q * block_k >= 1024,
                    lambda block_q, queries, unroll: (
                        queries != "python" or 512 // block_q * unroll <= 16
                    ),
                ],
            ),
            {"block_q": 128, "block_k": 128, "queries": "map", "unroll": 1},
        ),
        "recurrence": Experiment(
            "chunked linear recurrence, 1024 x 256 float32",
            recurrence,
            plain_recurrence,
            (normal(1024, 256), rng.uniform(0.5, 0.99, 256).astype(np.float32)),
            Space(
                chunk=[8, 16, 32, 64, 128, 256, 512, 1024],
                block_d=[16, 32, 64, 128, 256],
                inner=["scan", "associative", "matmul"],
                unroll=[1, 2, 4],
                where=[
                    lambda chunk, unroll, inner: inner == "scan" or unroll * chunk <= 512,
                    lambda chunk, block_d, inner: inner != "matmul" or chunk * chunk <= 2**12,
                    lambda chunk, inner: inner != "associative" or chunk <= 256,
                ],
            ),
            {"chunk": 64, "block_d": 64, "inner": "scan", "unroll": 1},
        ),
    }


def record(name: str, experiment: Experiment, rounds: int, seconds: float) -> Table:
    """Compile, check and time every config; fewer rounds if the time is over, but not too few."""
    configs = [cfg for cfg in experiment.space if cfg != experiment.heuristic]
    configs.insert(0, experiment.heuristic)
    start = time.monotonic()
    load_before = os.getloadavg()[0]
    inputs = [jnp.asarray(x) for x in experiment.inputs]
    expected = np.asarray(experiment.reference(*inputs))
    watches: list[Stopwatch | None] = []
    for index, cfg in enumerate(configs):
        compiled = (
            jax.jit(lambda *args, cfg=cfg: experiment.kernel(*args, cfg)).lower(*inputs).compile()
        )
        right = np.allclose(np.asarray(compiled(*inputs)), expected, rtol=1e-3, atol=1e-3)
        watch = Stopwatch(lambda compiled=compiled: compiled(*inputs))
        watch.warm_up(2)
        watches.append(watch if right else None)
        if not right:
            print(f"{name}: {cfg} is wrong", file=sys.stderr)
        if index % 50 == 0:
            spent = time.monotonic() - start
            print(f"{name}: {index}/{len(configs)} in {spent:.0f} s", file=sys.stderr)
    samples: list[list[float]] = [[] for _ in configs]
    order = [index for index, watch in enumerate(watches) if watch is not None]
    shuffle = random.Random(0).shuffle
    done = 0
    for done in range(1, rounds + 1):
        shuffle(order)
        for index in order:
            watch = watches[index]
            assert watch is not None
            samples[index].append(watch.sample())
        if done >= FEWEST_ROUNDS and time.monotonic() - start > seconds:
            break
    spent = time.monotonic() - start
    print(f"{name}: {len(configs)} configs, {done} rounds in {spent:.0f} s", file=sys.stderr)
    about = {
        "what": experiment.title,
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "rounds": done,
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
    }
    return Table(name, tuple(configs), tuple(map(tuple, samples)), about)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    known = experiments()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(known), help=f"of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=24, help=f"at least {FEWEST_ROUNDS}")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of each table")
    parser.add_argument("--into", type=Path, default=TABLES)
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    if options.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds {options.rounds}: at least {FEWEST_ROUNDS} are needed")
    options.into.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        table = record(name, known[name], options.rounds, options.minutes * 60)
        table.save(options.into / f"{name}.json")
        best, *_, worst = sorted(typical(s) for s in table.samples if s)
        print(f"{name}: best {best * 1e6:.0f} µs, worst {worst * 1e6:.0f} µs", file=sys.stderr)


if __name__ == "__main__":
    main()
