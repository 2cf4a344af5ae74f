"""What a call through ejkernel costs versus the same function under plain `jax.jit`.

    python benchmarks/overhead.py

Medians of interleaved runs; every pair is checked for equal results first. Ratios near 1 mean that
the framework is free once a call is warm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import tunable
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel


@dataclasses.dataclass(frozen=True)
class Config:
    unused: int = 1


class Product(Kernel[Config, jax.Array]):
    def run(self, a, b, *, cfg):
        return a @ b


class ProductWithKeyword(Kernel[Config, jax.Array]):
    def run(self, a, b, *, cfg, transpose=False):
        return product(a, b, transpose=transpose)


class TreeSum(Kernel[Config, jax.Array]):
    def run(self, tree, *, cfg):
        return tree_sum(tree)


class ProductWithGradient(Kernel[Config, jax.Array]):
    def run(self, a, b, *, cfg):
        return a @ b

    def fwd_with_residuals(self, a, b, *, cfg):
        return a @ b, (a, b)

    def vjp(self, residuals, out, dout, *args, cfg):
        a, b = residuals
        return dout @ b.T, a.T @ dout


def product(a, b, transpose=False):
    return a.T @ b if transpose else a @ b


@tunable(block=[1, 2])
def tunable_product(a, b, *, block=1):
    return a @ b


def blocked_product(a, b, *, block=1):
    return a @ b


def tree_sum(tree):
    return sum(jax.tree.leaves(tree))


@jax.custom_vjp
def product_with_gradient(a, b):
    return a @ b


product_with_gradient.defvjp(
    lambda a, b: (a @ b, (a, b)), lambda res, dout: (dout @ res[1].T, res[0].T @ dout)
)


def interleaved(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, calls: int
) -> tuple[float, float, float]:
    """Median seconds per call of both, and the median of their ratio, round by round."""
    np.testing.assert_allclose(ours(), theirs(), rtol=1e-5)
    mine, other = [], []
    for _ in range(rounds):
        for function, times in ((ours, mine), (theirs, other)):
            start = time.perf_counter()
            for _ in range(calls):
                out = function()
            jax.block_until_ready(out)
            times.append((time.perf_counter() - start) / calls)
    ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
    return statistics.median(mine), statistics.median(other), ratio


def call_cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], float]]:
    a, b = jnp.ones((8, 8)), jnp.full((8, 8), 2.0)
    tree = {f"w{i}": jnp.full((8, 8), float(i)) for i in range(24)}
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False))
    kernel, sums, custom = Product(), TreeSum(), ProductWithGradient()
    keyworded = ProductWithKeyword()
    plain = jax.jit(product, static_argnames="transpose")
    plain_blocked = jax.jit(blocked_product, static_argnames="block")
    plain_sum = jax.jit(tree_sum)
    plain_custom = jax.jit(product_with_gradient)
    plain_positional = jax.jit(lambda a, b: a @ b)
    return {
        "kernel(a, b)": (lambda: kernel(a, b), lambda: plain_positional(a, b), 1.10),
        "executor(kernel, a, b)": (
            lambda: executor(kernel, a, b), lambda: plain_positional(a, b), 1.10,
        ),
        "the same, a keyword unused": (
            lambda: keyworded(a, b), lambda: plain_positional(a, b), 1.10,
        ),
        "kernel, static keyword": (
            lambda: keyworded(a, b, transpose=True), lambda: plain(a, b, transpose=True), 1.20,
        ),
        "executor, static keyword": (
            lambda: executor(keyworded, a, b, transpose=True),
            lambda: plain(a, b, transpose=True),
            1.20,
        ),
        "24-leaf pytree": (lambda: sums(tree), lambda: plain_sum(tree), 1.15),
        "tunable(a, b)": (lambda: tunable_product(a, b), lambda: plain_positional(a, b), 1.10),
        "tunable, explicit value": (
            lambda: tunable_product(a, b, block=2), lambda: plain_blocked(a, b, block=2), 1.20,
        ),
        "custom gradient": (lambda: custom(a, b), lambda: plain_custom(a, b), 1.10),
    }  # fmt: skip


def trace_seconds(function: Callable[..., Any], a: Any) -> float:
    def repeated(x):
        for _ in range(100):
            x = function(x, a)
        return x

    start = time.perf_counter()
    jax.jit(repeated).trace(a)
    return time.perf_counter() - start


def trace_ratio(rounds: int) -> tuple[float, float, float]:
    """Tracing 100 calls of a kernel versus 100 calls of one small jitted function."""
    a = jnp.ones((8, 8))
    kernel, plain = Product(), jax.jit(lambda a, b: a @ b)
    trace_seconds(kernel, a), trace_seconds(plain, a)
    pairs = [(trace_seconds(kernel, a), trace_seconds(plain, a)) for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    ratio = statistics.median(o / t for o, t in pairs)
    return statistics.median(ours), statistics.median(theirs), ratio


def import_ratio(rounds: int) -> tuple[float, float, float]:
    """`import ejkernel.ops` versus `import jax`, each in a new process."""

    def seconds(module: str) -> float:
        code = (
            f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
        )
        return float(subprocess.check_output([sys.executable, "-c", code], env=environment))

    with tempfile.TemporaryDirectory() as folder:
        # As installed: both from byte code, whatever this shell says about writing it.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        seconds("ejkernel.ops"), seconds("jax")
        pairs = [(seconds("ejkernel.ops"), seconds("jax")) for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    return (
        statistics.median(ours),
        statistics.median(theirs),
        statistics.median(o / t for o, t in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    rows = []
    for name, (ours, theirs, limit) in call_cases().items():
        rows.append((name, *interleaved(ours, theirs, options.rounds, options.calls), limit))
    rows.append(("trace 100 calls", *trace_ratio(max(5, options.rounds // 10)), 1.30))
    rows.append(("import ejkernel.ops / jax", *import_ratio(max(3, options.rounds // 30)), 1.15))
    if options.json:
        print(
            json.dumps(
                [
                    dict(zip(("case", "ours", "plain", "ratio", "limit"), row, strict=True))
                    for row in rows
                ]
            )
        )
        return
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {jax.devices()[0]}")
    print(f"{'case':28} {'ours':>12} {'plain':>12} {'ratio':>7} {'limit':>7}")
    for name, ours, theirs, ratio, limit in rows:
        mark = "" if ratio <= limit else "  over"
        print(
            f"{name:28} {ours * 1e6:9.2f} µs {theirs * 1e6:9.2f} µs {ratio:7.3f} {limit:7.2f}{mark}"
        )


if __name__ == "__main__":
    main()
