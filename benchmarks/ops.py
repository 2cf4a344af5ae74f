"""Every operation versus the formulations and libraries that compute the same.

    python benchmarks/ops.py [operation ...] [--seconds 4] [--only TEXT] [--json FILE]

What is compared stands in `benchmarks/operations/<operation>.py`. Results are checked first; then
all candidates run interleaved. A ratio is our time over the peer's, so less than 1 is faster. It
exits with 1 if a promised ratio is not kept. `pip install torch==2.13.0` adds torch as a peer.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import pathlib
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax

from benchmarks.resident import resident_bytes
from benchmarks.side_by_side import (
    OURS,
    Bound,
    Comparison,
    Ratio,
    Times,
    compare,
    ratios,
    temporary_bytes,
    trace_times,
)
from ejkernel.modules import OPERATIONS


def comparisons(operation: str) -> Iterator[Comparison]:
    module = importlib.import_module(f"benchmarks.operations.{operation}")
    yield from module.comparisons()


def bounds(operation: str) -> Iterator[Bound]:
    module = importlib.import_module(f"benchmarks.operations.{operation}")
    if hasattr(module, "bounds"):
        yield from module.bounds()


def run_one(operation: str, comparison: Comparison, seconds: float) -> list[dict[str, Any]]:
    times, found = compare(comparison, seconds)
    rows = [_row(operation, comparison.name, times, ratio) for ratio in found]
    if comparison.trace_limit:
        name, times = f"tracing {comparison.name}", trace_times(comparison, comparison.trace_limit)
        rows += [
            _row(operation, name, times, ratio) for ratio in ratios(times, comparison.trace_limit)
        ]
    for peer, limit in comparison.memory_limit.items():
        arguments = comparison.arguments()
        mine = temporary_bytes(comparison.ours, arguments)
        theirs = temporary_bytes(comparison.peers[peer], arguments)
        name = f"{comparison.name}, temporary MiB"
        rows.append(_memory_row(operation, name, peer, mine, theirs, limit))
    return rows


def _row(operation: str, name: str, times: Mapping[str, Times], ratio: Ratio) -> dict[str, Any]:
    return {
        "operation": operation,
        "name": name,
        "peer": ratio.peer,
        "ours_ms": 1e3 * times[OURS].best,
        "peer_ms": 1e3 * times[ratio.peer].best,
        "best": ratio.best,
        "median": ratio.median,
        "quartiles": [ratio.low, ratio.high],
        "limit": ratio.limit,
        "verdict": ratio.verdict,
    }


def run_bound(operation: str, bound: Bound) -> dict[str, Any]:
    """The temporary memory of a call, as a share of what is promised.

    Of kernels that take memory by themselves, all that the process grows by, results included.
    """
    if bound.compiler_knows:
        arguments = bound.arguments()
        compiled = jax.jit(bound.function).lower(*arguments).compile()
        used = compiled.memory_analysis().temp_size_in_bytes
        if bound.check is not None:
            bound.check(compiled(*arguments), *arguments)
    else:
        used = resident_bytes(bound.function, bound.arguments, bound.check)
    name = f"{bound.name}, {'temporary' if bound.compiler_knows else 'with results,'} MiB"
    if bound.mib is None:
        return _memory_row(operation, name, "none", used, used, None)
    return _memory_row(operation, name, "the limit", used, bound.mib * 2**20, 1.0)


def _memory_row(
    operation: str, name: str, peer: str, mine: float, theirs: float, limit: float | None
) -> dict[str, Any]:
    ratio = mine / max(theirs, 1)  # a program may need nothing
    return {
        "operation": operation,
        "name": name,
        "peer": peer,
        "ours_ms": mine / 2**20,
        "peer_ms": theirs / 2**20,
        "best": ratio,
        "median": ratio,
        "quartiles": [ratio] * 2,
        "limit": limit,
        "verdict": "" if limit is None else "kept" if mine <= limit * theirs else "missed",
    }


def show(row: dict[str, Any]) -> str:
    low, high = row["quartiles"]
    limit = "" if row["limit"] is None else f"  limit {row['limit']:.2f}: {row['verdict']}"
    return (
        f"{row['operation']:<24}{row['name']:<52}{row['peer']:<22}"
        f"{row['ours_ms']:>10.2f}{row['peer_ms']:>10.2f}  best {row['best']:.2f}  "
        f"median {row['median']:.2f} [{low:.2f}, {high:.2f}]{limit}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--seconds", type=float, default=4.0, help="for each comparison")
    parser.add_argument("--only", default="", help="comparisons whose name contains this")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {jax.devices()[0]}")
    rows = []
    for operation in options.operations:
        for comparison in comparisons(operation):
            if options.only in comparison.name:
                for row in run_one(operation, comparison, options.seconds):
                    rows.append(row)
                    print(show(row), flush=True)
        for bound in bounds(operation):
            if options.only in bound.name:
                rows.append(run_bound(operation, bound))
                print(show(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    count = collections.Counter(row["verdict"] for row in rows if row["verdict"])
    print(
        f"{sum(count.values())} ratios are promised: "
        + ", ".join(map("{0[1]} {0[0]}".format, count.most_common()))
    )
    sys.exit(count["missed"] > 0)


if __name__ == "__main__":
    main()
