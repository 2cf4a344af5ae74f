"""A search of a large space versus trying everything: how good is the pick, how long does it take.

    python benchmarks/search.py [--space recurrence] [--repeats 3] [--json]

The spaces are those of `record_table.py`, each of more than 250 candidates. Interleaved:

- 24 evaluations and 20 % of the space, chosen by the model-guided search;
- the same numbers of candidates, chosen at random;
- everything: all candidates compiled, checked and raced. It runs once, it takes long.

The reference times (`reference_times.py`) are measured afterwards: all picks and the twenty that
"everything" found fastest, compiled once, in many interleaved rounds. Outputs are checked by the
tuner against the plain reference before a time counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from record_table import Experiment, experiments
from reference_times import ReferenceTimes

from ejkernel.ops.config.outcome import Outcome, Verdict
from ejkernel.ops.tuner.build import TuningTask
from ejkernel.ops.tuner.tuner import Tuner

REFERENCE_ROUNDS = 200


def work_of(experiment: Experiment) -> TuningTask:
    """The experiment as the tuner takes it, the heuristic config first."""
    configs = [cfg for cfg in experiment.space if cfg != experiment.heuristic]
    return TuningTask(
        experiment.title,
        lambda cfg: lambda *args: experiment.kernel(*args, cfg),
        tuple(map(jnp.asarray, experiment.inputs)),
        {},
        [experiment.heuristic, *configs],
        reference=experiment.reference,
        baseline=experiment.heuristic,
    )


def timed(work: TuningTask, **options: Any) -> tuple[Outcome[Any], float]:
    """What a tuner with these options finds, and how long it takes from nothing."""
    jax.clear_caches()
    start = time.perf_counter()
    outcome = Tuner(progress=False, **options).tune(work)
    return outcome, time.perf_counter() - start


def reference_times_of(experiment: Experiment, configs: Iterable[Any]) -> ReferenceTimes:
    """Careful times of some configs, by their names."""
    inputs = tuple(map(jnp.asarray, experiment.inputs))
    calls = {}
    for cfg in configs:
        program = jax.jit(lambda *args, cfg=cfg: experiment.kernel(*args, cfg))
        compiled = program.lower(*inputs).compile()
        calls[str(cfg)] = lambda compiled=compiled: compiled(*inputs)
    times = ReferenceTimes(calls)
    times.measure(REFERENCE_ROUNDS)
    return times


def main() -> None:
    known = experiments()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--space", choices=list(known), default="recurrence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    experiment = known[options.space]
    work = work_of(experiment)
    count = len(work.candidates)
    everything, all_seconds = timed(work, strategy="exhaustive")
    runs: dict[str, list[tuple[Any, float]]] = {}
    for seed in range(options.repeats):
        for evaluations in (24, round(0.2 * count)):
            for strategy in ("model", "random"):
                outcome, seconds = timed(
                    work, strategy=strategy, evaluations=evaluations, seed=seed
                )
                name = f"{strategy}, {evaluations} evaluations"
                runs.setdefault(name, []).append((outcome.best, seconds))
    measured = [trial for trial in everything.trials if trial.verdict is Verdict.MEASURED]
    fastest = sorted(measured, key=lambda trial: trial.seconds or 0.0)[:20]
    picks = [cfg for found in runs.values() for cfg, _ in found]
    wanted = {str(c): c for c in [everything.best, *(t.cfg for t in fastest), *picks]}
    times = reference_times_of(experiment, wanted.values())
    everything_versus_best = times.versus_the_best(str(everything.best))
    rows = [
        {
            "tuner": "everything",
            "chosen / best": everything_versus_best,
            "worst": everything_versus_best,
            "seconds": all_seconds,
            "wall / everything": 1.0,
        }
    ]
    for name, found in runs.items():
        ratios = [times.versus_the_best(str(cfg)) for cfg, _ in found]
        seconds = statistics.median(taken for _, taken in found)
        rows.append(
            {
                "tuner": name,
                "chosen / best": statistics.fmean(ratios),
                "worst": max(ratios),
                "seconds": seconds,
                "wall / everything": seconds / all_seconds,
            }
        )
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(
        f"{experiment.title}: {count} candidates, {options.repeats} repeats, "
        f"jax {jax.__version__}, Python {platform.python_version()}"
    )
    names = ("tuner", "chosen/best", "worst", "seconds", "wall/everything")
    print("{:28} {:>11} {:>7} {:>8} {:>16}".format(*names))
    for row in rows:
        print(
            f"{row['tuner']:28} {row['chosen / best']:11.3f} {row['worst']:7.3f} "
            f"{row['seconds']:8.1f} {row['wall / everything']:16.2f}"
        )


if __name__ == "__main__":
    main()
