"""Compare search strategies on recorded tables, without compiling or running anything.

    python benchmarks/search_replay.py
    python benchmarks/search_replay.py benchmarks/tables/matmul.json --seeds 100 --json

For every table and budget: the time of the chosen config by that of the table's best, as the mean
and the 90th percentile over seeds. A seed changes the search and the noise that it sees. The
strategy "exhaustive" evaluates everything: what it misses is the noise of the final race, which no
search can do better than by chance.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replay import Table, replay_at

TABLES = Path(__file__).parent / "tables"
SHARES = (0.1, 0.2, 0.4)


def budgets_of(table: Table, strategy: str) -> dict[str, int]:
    """How many evaluations to allow, by what they are called."""
    if strategy == "exhaustive":
        return {"100%": len(table)}
    return {"24": 24} | {f"{share:.0%}": round(share * len(table)) for share in SHARES}


def ratios(strategy: str, path: Path, seed: int) -> list[float]:
    """Chosen/best of one search, at every budget."""
    table = Table.load(path)
    stops = replay_at(table, strategy, list(budgets_of(table, strategy).values()), seed)
    return [stop.ratio for stop in stops]


def compare(paths: list[Path], strategies: list[str], seeds: int, workers: int) -> list[Any]:
    """One row per table, strategy and budget."""
    rows = []
    # Searches share nothing: one process each. Threads would wait for each other.
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for path in paths:
            table = Table.load(path)
            for strategy in strategies:
                start = time.monotonic()
                one = functools.partial(ratios, strategy, path)
                found = list(pool.map(one, range(seeds), chunksize=4))
                seconds = time.monotonic() - start
                for (label, evaluations), column in zip(
                    budgets_of(table, strategy).items(), zip(*found, strict=True), strict=True
                ):
                    row = {
                        "table": table.name,
                        "configs": len(table),
                        "strategy": strategy,
                        "budget": label,
                        "evaluations": evaluations,
                        "mean": round(statistics.fmean(column), 4),
                        "p90": round(statistics.quantiles(column, n=10, method="inclusive")[8], 4),
                        "seeds": seeds,
                    }
                    rows.append(row)
                print(f"{table.name}, {strategy}: {seconds:.1f} s", file=sys.stderr)
    return rows


def printed(rows: list[Any]) -> str:
    """The rows as a table: mean and 90th percentile by budget."""
    labels = list(dict.fromkeys(row["budget"] for row in rows))
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells = groups.setdefault((f"{row['table']} ({row['configs']})", row["strategy"]), {})
        cells[row["budget"]] = f"{row['mean']:.3f} / {row['p90']:.2f}"
    lines = [f"{'table':<18}{'strategy':<12}" + "".join(f"{label:>15}" for label in labels)]
    for (table, strategy), cells in groups.items():
        line = "".join(f"{cells.get(label, ''):>15}" for label in labels)
        lines.append(f"{table:<18}{strategy:<12}{line}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, default=sorted(TABLES.glob("*.json")))
    parser.add_argument("--strategies", default="random,model,exhaustive", help="by commas")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: one search says little")
    rows = compare(options.tables, options.strategies.split(","), options.seeds, options.workers)
    print(json.dumps(rows, indent=1) if options.json else printed(rows))


if __name__ == "__main__":
    main()
