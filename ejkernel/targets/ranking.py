"""An estimated cost of a compiled program. An estimate, never a measurement.

**TPU.** A bundle is a cycle. The bundles of a kernel's grid loop times the grid's steps, with loops
inside times their trip counts, are the cycles that its instructions take; the bytes of the blocks
that the grid copies, divided by the memory's bandwidth, are what the copies take. They overlap, so
the larger one counts.

**CUDA.** Machine instructions of a thread (loops times their trip counts) times warps, over what
all multiprocessors can issue, in waves of as many blocks as registers, shared memory and threads
allow at a time; few resident warps cannot hide latency, and wait. Again the larger of this and the
memory's time: arrays once over its bandwidth, or the blocks of all steps over that of the cache.

**CPU.** Flops, and bytes that each operation as written reads and writes, over round numbers. XLA's
own `cost_analysis` is not used: it counts the body of a loop once, so it ranks blocked programs the
wrong way round (`benchmarks/static_ranking.py`).

**A program without Pallas kernels** on a TPU: the seconds that libtpu's cost model says. On CUDA
there is no estimate.

Not seen: stalls on copies within a step, cache hits, bank conflicts, how long a multiplication on
a matrix unit takes, two cores of one TPU chip. `docs/targets.md` says how far that goes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from .catalog import GpuLimits, Target
from .figures import Loop, loop_from_plain
from .lowering import UNKNOWN, Launch, Program, Trips

ISSUED_PER_CYCLE = 4  # warps, by one multiprocessor
LATENCY = 8  # a warp issues at most every so many cycles
CACHE_FACTOR = 2.5  # so much faster than its memory is a GPU's second-level cache, about
CPU_FLOPS = 1e11  # per second; only the ratio to the bandwidth matters for an order
CPU_BANDWIDTH = 2e10


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimated cost.

    Attributes:
      seconds: estimated time; good for comparing configs of one call on one target only.
      bound: what it is made of: `"schedule"`, `"memory"`, `"cost model"`.
      cycles: estimated cycles of instructions.
      occupancy: of a CUDA multiprocessor's warps, the share that is resident.
      notes: what was left out, in words.
    """

    seconds: float
    bound: str
    cycles: float | None = None
    occupancy: float | None = None
    notes: tuple[str, ...] = ()


def estimate(target: Target, program: Program, answer: dict[str, Any]) -> Estimate | None:
    """The cost of what a compiler answered; None if it told too little."""
    if program.launches and target.platform != "cpu":
        return _of_kernels(target, program.launches, answer["kernels"])
    return _of_cost_model(target, program, answer.get("cost", {}))


# --- Pallas --------------------------------------------------------------------------------------


def _of_kernels(
    target: Target, launches: Sequence[Launch], kernels: Sequence[dict[str, Any]]
) -> Estimate | None:
    notes: list[str] = []
    cycles = seconds = memory = 0.0
    occupancies: list[float] = []
    for launch, kernel in _paired(launches, kernels):
        if kernel is None:
            return None  # half a cost is no cost
        times = launch.times
        if times is None:
            notes.append(f"{launch.name} is launched an unknown number of times, counted once")
            times = 1
        if target.gpu is None:
            took = _tpu_cycles(launch, kernel, notes)
        else:
            took, occupancy = _cuda_cycles(target.gpu, launch, kernel, notes)
            occupancies.append(occupancy)
        if took is None:
            return None
        moving = times * _memory_seconds(target, launch)
        working = times * took / (target.clock_ghz * 1e9)
        cycles += times * took
        memory += moving
        seconds += max(working, moving)
    bound = "memory" if memory > cycles / (target.clock_ghz * 1e9) else "schedule"
    return Estimate(
        seconds, bound, cycles, min(occupancies, default=None), tuple(dict.fromkeys(notes))
    )


def _memory_seconds(target: Target, launch: Launch) -> float:
    if target.gpu is None:
        return (launch.moved or 0) / target.bandwidth
    again = (launch.loaded or 0) / (CACHE_FACTOR * target.bandwidth)
    return max((launch.unique or 0) / target.bandwidth, again)


def _paired(
    launches: Sequence[Launch], kernels: Sequence[dict[str, Any]]
) -> list[tuple[Launch, dict[str, Any] | None]]:
    """Each launch with its kernel: by name, and kernels of one name in order."""
    left = list(kernels)
    pairs: list[tuple[Launch, dict[str, Any] | None]] = []
    for launch in launches:
        wanted = re.sub(r"[^\w]", "_", launch.name)
        # `mm.1` is the compiler's name for a kernel called `mm`.
        names = [re.sub(r"[^\w]", "_", re.sub(r"\.\d+$", "", k["name"])) for k in left]
        if wanted in names:
            pairs.append((launch, left.pop(names.index(wanted))))
        else:
            pairs.append((launch, kernels[0] if len(launches) == len(kernels) == 1 else None))
    return pairs


def _tpu_cycles(launch: Launch, kernel: dict[str, Any], notes: list[str]) -> float | None:
    code = loop_from_plain(kernel["code"])
    if launch.steps is None:
        return None
    if launch.steps <= 1:
        return code.own + _weighted(code.inner, launch.loops, notes)
    if not code.inner:  # the compiler unrolled the grid
        return float(code.total)
    # The grid is the largest outermost loop; what stands next to it runs once.
    grid = max(code.inner, key=lambda loop: loop.total)
    once = code.own + sum(loop.total for loop in code.inner if loop is not grid)
    return once + launch.steps * (grid.own + _weighted(grid.inner, launch.loops, notes))


def _weighted(loops: Sequence[Loop], trips: Sequence[Trips], notes: list[str]) -> float:
    """Instructions of loops, each as often as it runs."""
    if len(loops) != len(trips):
        if loops:
            notes.append("loops of the compiled code are not those of the source, counted once")
        return float(sum(loop.total for loop in loops))
    total = 0.0
    for loop, trip in zip(loops, trips, strict=True):
        count = trip.count
        if count == UNKNOWN:
            notes.append("a loop runs an unknown number of times, counted once")
            count = 1
        total += count * (loop.own + _weighted(loop.inner, trip.inner, notes))
    return total


def _cuda_cycles(
    gpu: GpuLimits, launch: Launch, kernel: dict[str, Any], notes: list[str]
) -> tuple[float, float]:
    code = loop_from_plain(kernel["code"])
    run = code.own + _weighted(code.inner, launch.loops, notes)
    # PTX shows the loops, the machine code the number of instructions: scale one by the other.
    instructions = run * kernel["instructions"] / max(1, code.total)
    threads, blocks = kernel["threads"], kernel["blocks"]
    warps = math.ceil(threads / 32)
    resident = resident_blocks(gpu, threads, kernel["registers"], kernel["shared_bytes"])
    waves = math.ceil(blocks / (gpu.cores * resident))
    at_once = min(resident, math.ceil(blocks / gpu.cores)) * warps
    cycles = waves * instructions * max(at_once / ISSUED_PER_CYCLE, LATENCY)
    return cycles, min(1.0, resident * warps * 32 / gpu.threads_per_core)


def resident_blocks(
    gpu: GpuLimits, threads: int, registers: int | None, shared_bytes: int | None
) -> int:
    """How many blocks of a kernel one multiprocessor holds at a time; at least one."""
    limits = [32, gpu.threads_per_core // max(1, threads)]
    if registers:
        # Registers are given out to warps in portions of 256.
        per_warp = math.ceil(registers * 32 / 256) * 256
        limits.append(gpu.registers_per_core // (per_warp * math.ceil(threads / 32)))
    if shared_bytes:
        limits.append(gpu.shared_per_core // (shared_bytes + 1024))  # 1 KiB is the system's
    return max(1, min(limits))


# --- without Pallas ---------------------------------------------------------------------


def _of_cost_model(target: Target, program: Program, cost: dict[str, float]) -> Estimate | None:
    if target.platform == "cpu":
        seconds = program.flops / CPU_FLOPS + program.touched / CPU_BANDWIDTH
        notes = ("a loop runs an unknown number of times, counted once",) if program.dynamic else ()
        return Estimate(seconds, "cost model", notes=notes)
    seconds = cost.get("optimal_seconds", 0.0)
    return Estimate(seconds, "cost model") if seconds > 0 else None
