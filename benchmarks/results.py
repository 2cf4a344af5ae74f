"""Run every benchmark and write what they print, with commands, machine and versions.

    make bench                     (python benchmarks/results.py --public .venv-public/bin/python)
    python benchmarks/results.py --only ops
    python benchmarks/results.py --draw        (again from benchmarks/data, without measuring)

Writes `docs/results.md`, a chart of each operation, and its table into its page; the figures behind
them go to `benchmarks/data`. Benchmarks run one after the other, in processes of their own; one
that fails, or misses what is promised, is shown as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
DATA = ROOT / "benchmarks" / "data" / "ops.json"
CHARTS = ROOT / "docs" / "images" / "results"

sys.path.insert(0, str(ROOT))

from benchmarks import charts  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A command, and what a reader has to know about its output.

    `table` turns the figures it writes with `--json FILE` into Markdown; else its output is shown.
    """

    name: str
    title: str
    command: tuple[str, ...]
    about: str
    table: Callable[[list[dict[str, Any]]], str] | None = None


def ops_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| operation | call | peer | ours | peer's | speedup | median (quartiles) | promised |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        unit = "MiB" if "MiB" in row["name"] else "ms"
        median, low, high = charts.speedups(row)
        promised = "–" if row["limit"] is None else f"≥ {1 / row['limit']:.2f}"
        if row["verdict"] not in ("", "kept"):
            promised += f", **{row['verdict']}**"
        lines.append(
            f"| {row['operation']} | {row['name']} | {row['peer']} | {row['ours_ms']:.2f} {unit} "
            f"| {row['peer_ms']:.2f} {unit} | {1 / row['best']:.2f} | {median:.2f} "
            f"({low:.2f}–{high:.2f}) | {promised} |"
        )
    return "\n".join(lines)


def ops_section(rows: list[dict[str, Any]]) -> str:
    """A chart of each operation, and then all rows."""
    shown = [
        f"### {name}\n\n![{name}: speedup over each peer](images/results/{name}.svg)\n"
        for name in charts.write(rows, CHARTS)
    ]
    return "\n".join([*shown, "### The rows behind the charts\n", ops_table(rows)])


def heuristics_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| operation | calls | mean | worst | within 1.15 | tuned slower (below 0.97) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for operation in dict.fromkeys(row["operation"] for row in rows):
        found = [row["ratio"] for row in rows if row["operation"] == operation]
        lines.append(
            f"| {operation} | {len(found)} | {sum(found) / len(found):.3f} | {max(found):.3f} | "
            f"{sum(r <= 1.15 for r in found)} | {sum(r < 0.97 for r in found)} |"
        )
    beyond = sorted((row for row in rows if row["ratio"] > 1.15), key=lambda row: -row["ratio"])
    if beyond:
        lines += ["", "Beyond 1.15:", ""]
    lines += [
        f"- {row['operation']} {row['name']}: {row['ratio']:.2f} "
        f"({row['quartiles'][0]:.2f}–{row['quartiles'][1]:.2f})"
        for row in beyond
    ]
    return "\n".join(lines)


def benchmarks(public: str | None) -> list[Benchmark]:
    listed = [
        Benchmark(
            "ops",
            "Operations versus their peers",
            ("benchmarks/ops.py", "--seconds", "2"),
            "Speedups are the peer's time over ours: above 1 we are faster. In a chart, a mark is "
            "the median of the rounds and its line their middle half; calls that are not timed "
            "(memory, the time of tracing) are among the rows. Results are compared first. "
            "A promise is kept by the best or by the median of the rounds; it is in doubt if only "
            "the fastest quarter of the rounds keeps it; `same program` means that the compiler "
            "made the same of both, so that any difference is noise.",
            ops_section,
        ),
        Benchmark(
            "heuristics",
            "Heuristics versus tuned configs",
            ("benchmarks/heuristics.py",),
            "The heuristic's time over the tuned one's, for every call of a grid.",
            heuristics_table,
        ),
        Benchmark(
            "heuristics_backward",
            "Heuristics versus tuned configs, forward and backward",
            ("benchmarks/heuristics.py", "--backward"),
            "The same for gradients: both passes together.",
            heuristics_table,
        ),
        Benchmark(
            "heuristics_xla",
            "Heuristics of flash_attention without the C++ kernel",
            ("benchmarks/heuristics.py", "flash_attention", "--xla"),
            "The same for XLA, which serves where there is no C++ compiler.",
            heuristics_table,
        ),
        Benchmark(
            "heuristics_xla_backward",
            "Heuristics of flash_attention without the C++ kernel, forward and backward",
            ("benchmarks/heuristics.py", "flash_attention", "--xla", "--backward"),
            "And for its gradients.",
            heuristics_table,
        ),
        Benchmark(
            "tuner",
            "The tuner versus others",
            ("benchmarks/tuner.py", "--repeats", "6"),
            "Regret: how much slower a pick is than the best candidate, by many more rounds, "
            "measured between the repeats.",
        ),
        Benchmark(
            "search",
            "Searching a large space",
            ("benchmarks/search.py", "--space", "recurrence"),
            "What a search finds with few evaluations, versus trying everything.",
        ),
        Benchmark(
            "search_replay",
            "Search strategies on recorded tables",
            ("benchmarks/search_replay.py",),
            "No device needed: times come from recorded tables.",
        ),
        Benchmark(
            "overhead",
            "The price of a call",
            ("benchmarks/overhead.py",),
            "A warm call through ejkernel over the same call under plain `jax.jit`.",
        ),
        Benchmark("store", "The store", ("benchmarks/store.py",), "Reading and writing entries."),
        Benchmark(
            "near_shapes",
            "Configs lent to near shapes",
            ("benchmarks/near_shapes.py",),
            "The time with a lent config over the time with the heuristic one.",
        ),
    ]
    if public:
        listed.append(
            Benchmark(
                "public_package",
                "flash_attention versus the public package",
                ("benchmarks/public_package.py", "--python", public),
                "Each package in its own environment, calls interleaved.",
            )
        )
    return listed


def machine() -> str:
    versions = []
    for name in ("jax", "jaxlib", "numpy", "scikit-learn", "torch", "tune-jax"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{cpu[1] if cpu else platform.processor()}, {os.cpu_count()} threads, {memory:.0f} GiB; "
        f"{platform.system()}, Python {platform.python_version()}; {', '.join(versions)}"
    )


def run(benchmark: Benchmark, seconds: float, folder: pathlib.Path) -> str:
    figures = folder / f"{benchmark.name}.json"
    command = [sys.executable, *benchmark.command]
    if benchmark.table is not None:
        command += ["--json", str(figures)]
    print(f"{benchmark.name} …", flush=True)
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
        output, ended = done.stdout, f"exit code {done.returncode}"
        if done.returncode:  # whatever it printed before, why it ended is said last
            output = "\n".join([output, *done.stderr.strip().splitlines()[-1:]])
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else ""
        ended = f"stopped after {seconds:.0f} s"
    took = time.perf_counter() - begin
    (folder / f"{benchmark.name}.txt").write_text(output)
    shown = f"```text\n{output.strip()}\n```"
    if benchmark.table is not None and figures.exists():
        rows = json.loads(figures.read_text())
        if benchmark.name == "ops":
            kept = {
                "date": datetime.date.today().isoformat(),
                "machine": machine(),
                "command": " ".join(benchmark.command),
                "ended": f"{took:.0f} s, {ended}",
                "remark": "",
                "rows": rows,
            }
            write_data(kept)
            return ops_part(kept, benchmark)
        shown = benchmark.table(rows)
    printed = " ".join(benchmark.command)
    return (
        f"## {benchmark.title}\n\n{benchmark.about}\n\n"
        f"`python {printed}`: {took:.0f} s, {ended}.\n\n{shown}\n\n"
        f"{datetime.date.today().isoformat()}, {machine()}.\n"
    )


def write_data(kept: dict[str, Any]) -> None:
    """The figures of the operations as JSON, a line for each row, so that git shows changes."""
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in kept["rows"])
    head = json.dumps({**kept, "rows": []}, indent=1, ensure_ascii=False)
    DATA.write_text(head.replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n", encoding="utf-8")


def ops_part(kept: dict[str, Any], benchmark: Benchmark) -> str:
    """The section about the operations, and the table in the page of each, from the data."""
    write_into_pages(kept["rows"], kept["machine"])
    remark = f"{kept['remark']}\n\n" if kept["remark"] else ""
    return (
        f"## {benchmark.title}\n\n{benchmark.about}\n\n`python {kept['command']}`: "
        f"{kept['ended']}.\n\n{ops_section(kept['rows'])}\n\n{remark}"
        f"{kept['date']}, {kept['machine']}.\n"
    )


def write_into_pages(rows: list[dict[str, Any]], measured_on: str) -> None:
    """The table of an operation, between the two marks in its page."""
    for page in (ROOT / "docs" / "operations").glob("*.md"):
        text = page.read_text(encoding="utf-8")

        def table(mark: re.Match[str]) -> str:
            names = mark[1].split()
            mine = [row for row in rows if row["operation"] in names]
            if not mine:
                return mark[0]
            source = f"`python benchmarks/ops.py {' '.join(names)}`, {measured_on}:"
            return (
                f"<!-- results: {mark[1]} -->\n\n{source}\n\n"
                + "".join(f"![speedup](../images/results/{name}.svg)\n\n" for name in names)
                + f"{ops_table(mine)}\n\n"
                "<!-- end of results -->"
            )

        pattern = r"<!-- results: ([\w ]+?) -->(?:.*?<!-- end of results -->)?"
        page.write_text(re.sub(pattern, table, text, flags=re.DOTALL), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--public", help="the Python of an environment with the public package")
    parser.add_argument("--only", nargs="*", help="names of benchmarks; the rest is left as it is")
    parser.add_argument("--seconds", type=float, default=1800.0, help="most time for each")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for figures and output")
    parser.add_argument("--draw", action="store_true", help="draw again what was measured before")
    options = parser.parse_args()
    if options.draw:
        (ops,) = (b for b in benchmarks(None) if b.name == "ops")
        parts = {**_old_parts(), ops.title: ops_part(json.loads(DATA.read_text("utf-8")), ops)}
        _write(parts, options.public)
        return
    folder = options.keep or ROOT / ".cache" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    parts = _old_parts()
    for benchmark in benchmarks(options.public):
        if options.only and benchmark.name not in options.only:
            continue
        parts[benchmark.title] = run(benchmark, options.seconds, folder)
        _write(parts, options.public)
    print(f"written: {PAGE.relative_to(ROOT)}")


def _old_parts() -> dict[str, str]:
    if not PAGE.exists():
        return {}
    pieces = re.split(r"(?m)^(?=## )", PAGE.read_text(encoding="utf-8"))[1:]
    return {piece.splitlines()[0].removeprefix("## "): piece.strip() + "\n" for piece in pieces}


def _write(parts: dict[str, str], public: str | None) -> None:
    order = [b.title for b in benchmarks(public or "-")]
    known = [parts[title] for title in order if title in parts]
    head = (
        "# Measured results\n\nWritten by `make bench`. Every figure comes from the command above "
        "it, run on the machine below it; candidates run interleaved. The machine is shared "
        "with others, so single figures are noisy: look at the spread.\n"
    )
    PAGE.write_text("\n".join([head, *known]), encoding="utf-8")


if __name__ == "__main__":
    main()
