"""What the scripts of a job share: joining it, its kernels, and how to report."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
import traceback

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, Tuner

RANK, PROCESSES, ADDRESS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
FOLDER = pathlib.Path(FOLDER)

report: dict = {}


def join() -> None:
    jax.distributed.initialize(ADDRESS, PROCESSES, RANK)


def write_report() -> None:
    unfinished = FOLDER / f"unfinished-{RANK}.json"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(FOLDER / f"report-{RANK}.json")


def scenario(function):
    """Run now; keep what it returns, or the error it raised, under its name in the report."""
    start = time.monotonic()
    try:
        result = function()
    except Exception as error:  # noqa: BLE001  reported, and looked at by the test
        traceback.print_exc()
        result = {"error": type(error).__name__, "message": str(error)}
    if isinstance(result, dict):
        result["seconds"] = time.monotonic() - start
    report[function.__name__] = result
    print(function.__name__, f"{time.monotonic() - start:.2f} s", flush=True)
    return function


def tell(name: str) -> None:
    (FOLDER / f"told-{name}").touch()


def await_word(name: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not (FOLDER / f"told-{name}").exists():
        assert time.monotonic() < deadline, f"nobody told {name}"
        time.sleep(0.01)


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 1


class Rows(Kernel[Config, jax.Array]):
    """A different program for every config."""

    def run(self, x, *, cfg):
        blocks = x.reshape(cfg.rows, -1)
        return jnp.concatenate([jnp.tanh(blocks[i]) for i in range(cfg.rows)])

    def candidate_cfgs(self, inv):
        return [Config(rows) for rows in (1, 2, 4, 8)]


class OwnTaste(Tuner):
    """Measures nothing: every process has another best config, and another one for every shape."""

    def autotune(self, make_fn, args, kwargs, candidates):
        return candidates[(RANK + args[0].size // 8) % len(candidates)]


def tuning(**changes) -> tuple[Executor, list]:
    """An executor that tunes, and the events of its selector."""
    events: list = []
    selector = ConfigSelectorChain(
        ConfigCache(),
        **{"tuner": OwnTaste(), **changes},
        on_event=lambda event, **data: events.append((event, data)),
    )
    return Executor(selector), events
