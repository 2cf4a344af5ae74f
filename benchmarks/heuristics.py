"""How good are the heuristics: each operation over a grid of calls, heuristic against tuned.

    python benchmarks/heuristics.py [operation ...] [--backward] [--xla] [--only TEXT] [--json FILE]

Forward, or with `--backward` forward and backward together, for the operations that have gradients.
For each call all candidates are tuned; then the heuristic config and the tuned one run interleaved.
A ratio is the heuristic's time over the tuned one's: 1.15 at most is what we promise for the mean
of an operation's grid, and tuned is never slower than the heuristic beyond noise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from benchmarks.side_by_side import Call, prepared, race
from ejkernel.modules import OPERATIONS
from ejkernel.ops.core.invocation import split
from ejkernel.ops.tuner.inputs import realistic_inputs
from ejkernel.ops.tuner.session import function_maker, tune_invocation, with_gradients
from ejkernel.ops.tuner.tuner import Tuner

PROMISED = 1.15
ONLY_FORWARD = ("paged_attention", "ragged_paged_attention")


def judge(operation: str, call: Call, seconds: float, *, backward: bool) -> dict[str, Any]:
    inv = call.kernel.bind(*call.arguments, **call.keywords).abstract()
    heuristic = call.kernel.heuristic(inv)
    outcome = tune_invocation(Tuner(effort="quick"), inv, call.kernel, backward=backward)
    if backward and outcome.measured == "forward":
        raise SystemExit(f"{operation} {call.name}: {'; '.join(outcome.notes)}")
    tuned = outcome.best
    ratio = low = high = 1.0
    if tuned != heuristic:
        args, kwargs = realistic_inputs(call.kernel, inv, 0)
        arrays, rest = split((args, kwargs))
        make = function_maker(inv, call.kernel)

        def of(cfg: Any) -> Any:
            def forward(*arrays: Any) -> Any:
                some, named = rest.merge(arrays)
                return make(cfg)(*some, **named)

            if not backward:
                return prepared(forward, tuple(arrays))
            wanted = [
                jnp.ones(leaf.shape, leaf.dtype)
                for leaf in jax.tree.leaves(jax.eval_shape(forward, *arrays))
                if jnp.issubdtype(leaf.dtype, jnp.inexact)
            ]
            return prepared(with_gradients(forward), (wanted, *arrays))

        times = race({"heuristic": of(heuristic), "tuned": of(tuned)}, seconds)
        by_round = sorted(
            a / b for a, b in zip(times["heuristic"].seconds, times["tuned"].seconds, strict=True)
        )
        ratio = statistics.median(by_round)
        low, _, high = statistics.quantiles(by_round, n=4)
    return {
        "operation": operation,
        "name": call.name,
        "ratio": ratio,
        "quartiles": [low, high],
        "heuristic": str(heuristic),
        "tuned": str(tuned),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--backward", action="store_true", help="time the gradients too")
    parser.add_argument("--xla", action="store_true", help="as on a machine without a C++ compiler")
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the race of each call")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.xla:
        os.environ["EJKERNEL_NATIVE"] = "off"
    print(f"jax {jax.__version__}, {jax.devices()[0]}")
    rows, kept = [], True
    for operation in options.operations:
        if options.backward and operation in ONLY_FORWARD:
            continue
        calls = list(importlib.import_module(f"benchmarks.operations.{operation}").grid())
        mine = []
        for call in calls:
            if options.only in call.name:
                row = judge(operation, call, options.seconds, backward=options.backward)
                mine.append(row)
                low, high = row["quartiles"]
                changed = "" if row["ratio"] == 1.0 else f"  {row['heuristic']} -> {row['tuned']}"
                print(
                    f"{operation:<24}{call.name:<44}{row['ratio']:.3f} "
                    f"[{low:.2f}, {high:.2f}]{changed}",
                    flush=True,
                )
        if mine:
            found = [row["ratio"] for row in mine]
            within = sum(ratio <= PROMISED for ratio in found)
            kept = kept and statistics.mean(found) <= PROMISED
            print(
                f"{operation}: {len(mine)} calls, mean {statistics.mean(found):.3f}, worst "
                f"{max(found):.3f}, {within} within {PROMISED}, tuned slower than the heuristic: "
                f"{sum(ratio < 0.97 for ratio in found)}"
            )
        rows += mine
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    sys.exit(not kept)


if __name__ == "__main__":
    main()
