"""What a store costs when it is large: `put` and `get` at a million entries versus a thousand.

    python benchmarks/store.py

Both stores are asked in turn, and the median of the ratios counts. The large store is filled with
one bulk insert; everything that is timed goes through `PersistentCache`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from ejkernel.ops import ConfigCache, ConfigKey, PersistentCache

DEVICE = "cpu|amd-epyc|2-threads"
LIMIT = 1.5
ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 64
    columns: int = 128


def key(number: int) -> ConfigKey:
    # Spread like the hashes that real call keys are; a hundred operations.
    return ConfigKey(DEVICE, f"op{number % 100}@v1", f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}")


def fill(folder: str, entries: int) -> PersistentCache:
    """A store with this many entries, each with two trials, written at once."""
    cache = PersistentCache(folder)
    trials = [{"config": {"rows": n}, "verdict": "measured", "seconds": 0.001} for n in (1, 2)]
    about = {"measured": "forward", "seconds": 0.001, "source": "0" * 32, "trials": trials}
    cache.put(key(0), Config(), about=about)
    cache.close()
    with contextlib.closing(sqlite3.connect(f"{folder}/configs.sqlite3")) as connection:
        for table, column in (("ejkernel_entries", "id"), ("ejkernel_trials", "entry_id")):
            copy_row(connection, table, column, entries)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return cache


def copy_row(connection: sqlite3.Connection, table: str, id_column: str, entries: int) -> None:
    """Repeat the rows of the first entry for all the others."""
    cursor = connection.execute(f"SELECT * FROM {table}")
    names = [column[0] for column in cursor.description]
    templates = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def rows():
        for number in range(1, entries):
            for template in templates:
                row = {**template, id_column: number + 1}
                if table == "ejkernel_entries":
                    row |= key(number)._asdict()
                else:
                    row["id"] = None
                yield tuple(row.values())

    marks = ", ".join("?" * len(names))
    connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows())


def interleaved(
    large: Callable[[], object], small: Callable[[], object], rounds: int, calls: int
) -> tuple[float, float, float]:
    """Median seconds per call of both, and the median of their ratio, round by round."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for act, found in zip((large, small), times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                act()
            found.append((time.perf_counter() - start) / calls)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return statistics.median(times[0]), statistics.median(times[1]), ratio


def getter(cache: PersistentCache, entries: int) -> Callable[[], object]:
    chance = random.Random(0)

    def get() -> None:
        found = cache.get(key(chance.randrange(entries)))
        assert found == Config(), found

    return get


def misser(cache: PersistentCache) -> Callable[[], object]:
    chance = random.Random(1)

    def get() -> None:
        assert cache.get(key(chance.randrange(10**9, 10**10))) is None

    return get


def putter(cache: PersistentCache) -> Callable[[], object]:
    chance = random.Random(2)
    about = {"measured": "forward", "seconds": 0.001, "source": "0" * 32}

    def put() -> None:
        cache.put(key(chance.randrange(10**7, 10**8)), Config(), about=about)

    return put


def first_get(folder: str, number: int) -> float:
    """Seconds from a closed store to its first entry, in a process that imported everything."""
    code = f"""
import time, ejkernel.store.backends
from ejkernel.ops import PersistentCache
start = time.perf_counter()
found = PersistentCache({folder!r}).get({tuple(key(number))!r})
print(time.perf_counter() - start)
assert found == {{"rows": 64, "columns": 128}}, found
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return float(subprocess.check_output([sys.executable, "-c", code], env=environment))


def opening(large: str, small: str, rounds: int) -> tuple[float, float, float]:
    pairs = [(first_get(large, n), first_get(small, n)) for n in range(rounds)]
    medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return medians[0], medians[1], statistics.median(a / b for a, b in pairs)


def memory_hit(rounds: int) -> tuple[float, float, float]:
    """A hit in the memory cache versus a dictionary."""
    cache, plain, wanted = ConfigCache(), {}, key(7)
    for number in range(1000):
        cache.put(key(number), Config())
        plain[key(number)] = Config()
    return interleaved(lambda: cache.get(wanted), lambda: plain.get(wanted), rounds, 2000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        large, small = f"{folder}/large", f"{folder}/small"
        big, little = fill(large, options.entries), fill(small, 1000)
        filled, size = time.perf_counter() - start, os.path.getsize(f"{large}/configs.sqlite3")
        opened = opening(large, small, 5)
        rows = [
            ("open and get the first", *opened, LIMIT),
            (
                "get",
                *interleaved(
                    getter(big, options.entries), getter(little, 1000), options.rounds, 20
                ),
                LIMIT,
            ),
            (
                "get what is not there",
                *interleaved(misser(big), misser(little), options.rounds, 20),
                LIMIT,
            ),
            ("put", *interleaved(putter(big), putter(little), options.rounds, 5), LIMIT),
            ("memory hit versus a dict", *memory_hit(options.rounds), None),
        ]
        assert len(big) > options.entries
        big.close()
        little.close()
    if options.json:
        names = ("case", "large", "small", "ratio", "limit")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    print(f"{options.entries:,} entries, {size / 1e6:,.0f} MB, filled in {filled:.0f} s")
    print(f"{'case':26} {'large':>12} {'1,000':>12} {'ratio':>7} {'limit':>7}")
    for name, ours, theirs, ratio, limit in rows:
        mark = "  over" if limit is not None and ratio > limit else ""
        shown = f"{limit:7.2f}" if limit is not None else ""
        print(f"{name:26} {ours * 1e6:9.2f} µs {theirs * 1e6:9.2f} µs {ratio:7.3f} {shown}{mark}")


if __name__ == "__main__":
    main()
