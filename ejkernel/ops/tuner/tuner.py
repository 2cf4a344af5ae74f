"""The tuner: how candidates are measured, and the documented ways to ask for it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import jax

from ..config.functions import Function, call_with
from ..config.outcome import Outcome, TuningFailed
from ..core.invocation import StaticPart, split
from .bench import Bench, Clock, LocalBench
from .build import TuningTask
from .clock import Stopwatch
from .inputs import outside_trace, random_like
from .progress import Progress
from .progress_file import progress_file
from .run import TuningRun
from .search.effort import Budget, Effort, effort_of
from .search.pruning import Pruner

Isolation = Literal["none", "process"]


class Tuner:
    """Measures functions and picks the fastest config that is also right.

    Args:
      warmup: runs of each candidate before its first sample.
      iters: samples of each candidate before the first ones leave the race; None: as many as the
        effort says (3 by default).
      effort: `"quick"`, `"standard"` or `"full"`: how long the finalists run, how much of a large
        space is searched.
      seconds: stop after this time; the result is stored, marked incomplete, and continued later.
      evaluations: measure at most this many candidates; likewise.
      strategy: how a large space is searched: `"auto"`, `"exhaustive"`, `"random"`, `"model"`, or
        an object with a `propose` method.
      isolation: `"process"` compiles and runs candidates in a worker process that may be killed.
      clock: `"device"` ranks by the time that the profiler says the device worked, where it says
        that; `"wall"` by the wall clock; `"auto"` by the device's on GPU and TPU.
      prune: what to leave out before anything is measured: a function
        `(kernel, inv, candidates) -> Pruned` such as `ejkernel.targets.StaticPruner()`; None: what
        a bundle of ranked candidates says, if there is one for the call; False: nothing.
      progress: show a progress bar; None: in a terminal and in a notebook.
      on_step: called as `on_step(step, name=, **data)` at each step of a run; `step` is `"build"`
        (`candidates`), `"candidate"` (`cfg`, `verdict`, `reason`), `"race"` (`candidates`,
        `rounds`) or `"round"` (`running`, `done`).
      seed: of the random inputs, the running order and the search.
      timer: a clock in seconds; tests give a fake one.

    >>> import jax.numpy as jnp
    >>> Tuner().measure(jnp.sin, jnp.ones(8)) > 0
    True
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int | None = None,
        *,
        effort: str | Effort = "standard",
        seconds: float | None = None,
        evaluations: int | None = None,
        strategy: Any = "auto",
        isolation: Isolation = "none",
        clock: Clock = "auto",
        prune: Pruner | Literal[False] | None = None,
        progress: bool | None = None,
        on_step: Callable[..., None] | None = None,
        seed: int = 0,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.effort = effort_of(effort)
        self._iters_given = iters is not None
        iters = self.effort.screening if iters is None else iters
        for name, value, least in (("warmup", warmup, 0), ("iters", iters, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"Tuner: {name}={value!r} must be a whole number >= {least}")
        if isolation not in ("none", "process"):
            raise ValueError(f"Tuner: isolation={isolation!r} must be 'none' or 'process'")
        if clock not in ("auto", "device", "wall"):
            raise ValueError(f"Tuner: clock={clock!r} must be 'auto', 'device' or 'wall'")
        if prune not in (None, False) and not callable(prune):
            raise TypeError(
                f"Tuner: prune={prune!r} must be a function of kernel, inv and candidates, None or "
                "False"
            )
        Budget(seconds, evaluations)  # refuse a budget of nothing here, where the caller sees it
        self.warmup = warmup
        self.iters = iters
        self.seconds = seconds
        self.evaluations = evaluations
        self.strategy = strategy
        self.isolation = isolation
        self.clock: Clock = clock
        self.prune = prune
        self.progress = progress
        self.on_step = on_step
        self.seed = seed
        self.timer = timer
        self._counts = collections.Counter[str]()  # shared with what `changed` makes of it

    def changed(self, *, effort: str | Effort | None = None, seconds: float | None = None) -> Self:
        """A tuner like this one, with another effort or limit."""
        other = copy.copy(self)
        if effort is not None:
            other.effort = effort_of(effort)
            other.iters = self.iters if self._iters_given else other.effort.screening
        if seconds is not None:
            Budget(seconds)
            other.seconds = seconds
        return other

    @property
    def compilations(self) -> int:
        """How many programs were compiled so far."""
        return self._counts["compilations"]

    def count_compilations(self, number: int) -> None:
        """So many more programs were compiled."""
        self._counts["compilations"] += number

    # --- the documented calls --------------------------------------------------------------------

    def measure(self, fn: Function, *args: Any, **kwargs: Any) -> float:
        """Seconds per call of `fn`, compiled.

        Array leaves are the program's inputs, everything else is built in. Tracers and abstract
        shapes are replaced by random arrays: under `jit` this times execution, not tracing.
        """
        with outside_trace():
            arrays, rest = split(random_like((args, kwargs), self.seed, only_abstract=True))
            compiled = jax.jit(lambda arrays: call_with(fn, rest, arrays)).lower(arrays).compile()
            watch = Stopwatch(lambda: compiled(arrays), self.timer)
            return watch.measure(self.warmup, self.iters)

    def autotune(
        self,
        make_fn: Callable[[Any], Function],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Any],
    ) -> Any:
        """The fastest of the candidates; `make_fn(cfg)` gives the function to measure.

        No candidates is a `RuntimeError`, and so is "all failed", which lists each one's error.
        """
        return self.tune(
            TuningTask("autotune", make_fn, tuple(args), dict(kwargs), list(candidates))
        ).best

    def tune(self, task: TuningTask) -> Outcome[Any]:
        """The winner among a task's candidates, with everything that was learned."""
        if not task.candidates:
            raise TuningFailed(f"{task.name}: there are no candidates to tune")
        with outside_trace():
            inputs = (task.args, dict(task.kwargs))
            arrays, rest = split(random_like(inputs, self.seed, only_abstract=True))
            flat = dataclasses.replace(
                task,
                make_function=lambda cfg: _flat(task.make_function(cfg), rest),
                reference=None if task.reference is None else _flat(task.reference, rest),
                plain=None if task.plain is None else _flat(task.plain, rest),
            )
            bench = self.bench(arrays)
            with (
                progress_file() as file,
                Progress(task.name, self.progress, self.on_step) as progress,
            ):
                run = TuningRun(self, flat, bench, progress)
                operation = file.operation(task.name, run.best_so_far, self.seconds)
                progress.listeners.append(operation.step)
                return run.run()

    def bench(self, arrays: list[Any]) -> Bench:
        """Where programs of these inputs are compiled, run and timed."""
        if self.isolation == "process":
            from .isolation.worker_bench import WorkerBench

            return WorkerBench(arrays, clock=self.clock)
        return LocalBench(arrays, self.timer, self.clock)


def _flat(function: Function, rest: StaticPart) -> Function:
    return lambda *arrays: call_with(function, rest, arrays)
