"""The tuner: build the candidates, refuse the wrong ones, race the rest."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax

from ..core.partition import split
from ..utils.stable import stable_json
from .bench import Bench, BenchUnavailable, Function, LocalBench
from .build import Builder
from .clock import Stopwatch, typical
from .effort import Budget, Effort, effort_of
from .inputs import outside_trace, random_like
from .outcome import Outcome, Trial, TuningFailed, TuningInterrupted, Verdict
from .progress import Progress
from .race import Race, compare

logger = logging.getLogger(__name__)

RACE_AT_MOST = 64  # a longer list of candidates is searched instead of raced, unless told otherwise

Isolation = Literal["none", "process"]


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be tuned: a function for every config, and how to know whether it is right.

    Attributes:
      name: what it is, for messages.
      make_function: gives the function of a config; it takes `args` and `kwargs`.
      args, kwargs: the inputs to measure with.
      candidates: the configs to try.
      reference: the truth to compare outputs with; None compares with the favourite's output, or
        not at all without a favourite.
      favourite: the config that wins ties (the heuristic one).
      reasons_against: why a config is not supported, if so.
      known: what earlier runs found out, by the config's `stable_json`.
      guard: a context manager made for each candidate, entered around its first run.
      measured: what the functions compute, for the report.
      notes: remarks to keep with the outcome.
    """

    name: str
    make_function: Callable[[Any], Function]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    candidates: Sequence[Any]
    reference: Function | None = None
    favourite: Any = None
    reasons_against: Callable[[Any], Sequence[str]] | None = None
    known: Mapping[str, Trial[Any]] = dataclasses.field(default_factory=dict)
    guard: Callable[[Any], Any] | None = None
    measured: str = "forward"
    notes: tuple[str, ...] = ()


class Tuner:
    """Measures functions and picks the fastest config that is also right.

    Args:
      warmup: runs of each candidate before its first sample.
      iters: samples of each candidate before the first ones leave the race.
      effort: `"quick"`, `"standard"` or `"full"`: how long the finalists run, how much of a large
        space is searched.
      seconds: stop after this time; the result is kept, marked incomplete, and continued later.
      evaluations: measure at most this many candidates; likewise.
      strategy: how a large space is searched: `"auto"`, `"exhaustive"`, `"random"`, `"model"`, or
        an object with a `propose` method.
      isolation: `"process"` compiles and runs candidates in a worker process that may be killed.
      progress: show a progress bar; None: in a terminal only.
      seed: of the random inputs, the running order and the search.
      timer: a clock in seconds; tests give a fake one.

    >>> import jax.numpy as jnp
    >>> Tuner().measure(jnp.sin, jnp.ones(8)) > 0
    True
    """

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        *,
        effort: str | Effort = "standard",
        seconds: float | None = None,
        evaluations: int | None = None,
        strategy: Any = "auto",
        isolation: Isolation = "none",
        progress: bool | None = None,
        seed: int = 0,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.effort = effort_of(effort)
        for name, value, least in (("warmup", warmup, 0), ("iters", iters, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"Tuner: {name}={value!r} must be a whole number >= {least}")
        if isolation not in ("none", "process"):
            raise ValueError(f"Tuner: isolation={isolation!r} must be 'none' or 'process'")
        Budget(seconds, evaluations)  # refuse a budget of nothing here, where the caller sees it
        self.warmup = warmup
        self.iters = self.effort.screening if iters == 3 else iters
        self.seconds = seconds
        self.evaluations = evaluations
        self.strategy = strategy
        self.isolation = isolation
        self.progress = progress
        self.seed = seed
        self.timer = timer
        self.compilations = 0

    # --- the documented calls --------------------------------------------------------------------

    def measure(self, fn: Function, *args: Any, **kwargs: Any) -> float:
        """Seconds per call of `fn`, compiled.

        Array leaves are the program's inputs, everything else is built in. Tracers and abstract
        shapes are replaced by random arrays: under `jit` this times execution, not tracing.
        """
        with outside_trace():
            args, kwargs = random_like_if_abstract((args, kwargs), self.seed)
            arrays, rest = split((args, kwargs))
            compiled = jax.jit(lambda arrays: call_with(fn, rest, arrays)).lower(arrays).compile()
            watch = Stopwatch(lambda: compiled(arrays), self.timer)
            watch.warm_up(self.warmup)
            return typical([watch.sample() for _ in range(self.iters)])

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
            Work("autotune", make_fn, tuple(args), dict(kwargs), list(candidates))
        ).best

    def tune(self, work: Work) -> Outcome[Any]:
        """The winner among a work's candidates, with everything that was found."""
        if not work.candidates:
            raise TuningFailed(f"{work.name}: there are no candidates to tune")
        with outside_trace():
            args, kwargs = random_like_if_abstract((work.args, dict(work.kwargs)), self.seed)
            arrays, rest = split((args, kwargs))
            flat = dataclasses.replace(
                work,
                make_function=lambda cfg: _flat(work.make_function(cfg), rest),
                reference=None if work.reference is None else _flat(work.reference, rest),
            )
            bench = self._bench(arrays)
            with Progress(work.name, self.progress) as progress:
                return _Session(self, flat, bench, progress).run()

    def _bench(self, arrays: list[Any]) -> Bench:
        if self.isolation == "process":
            from .isolation import WorkerBench

            return WorkerBench(arrays)
        return LocalBench(arrays, self.timer)


class _Session:
    """One run of the tuner over one work: what was built, measured and refused so far."""

    def __init__(self, tuner: Tuner, work: Work, bench: Bench, progress: Progress) -> None:
        self.tuner = tuner
        self.work = work
        self.bench = bench
        self.progress = progress
        self.budget = Budget(tuner.seconds, tuner.evaluations)
        self.builder = Builder(
            bench, work.make_function, reasons_against=work.reasons_against, guard=work.guard
        )
        self._racing_seconds: float | None = None  # most time for the race
        self.handles: dict[str, Any] = {}
        self.samples: dict[str, list[float]] = {}
        self.sure = False

    def run(self) -> Outcome[Any]:
        work = self.work
        self._find_the_truth()
        fresh = [cfg for cfg in self._favourite_first() if stable_json(cfg) not in work.known]
        try:
            if len(fresh) > RACE_AT_MOST and self.tuner.strategy != "exhaustive":
                self._search(fresh)
            else:
                self._race_all(fresh)
        except BenchUnavailable as error:
            raise TuningFailed(f"{work.name}: candidates cannot be run: {error}") from error
        except KeyboardInterrupt:
            raise TuningInterrupted(self._outcome("interrupted", strict=False)) from None
        finally:
            self.tuner.compilations += self.builder.compilations
        outcome = self._outcome(self.budget.exhausted or "")
        assert outcome is not None
        return outcome

    def _find_the_truth(self) -> None:
        if self.work.reference is None:
            return
        try:
            self.builder.use_as_truth(self.work.reference)
        except Exception as error:
            raise TuningFailed(
                f"{self.work.name}: the reference itself failed, so nothing can be checked: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _favourite_first(self) -> list[Any]:
        """The favourite first: without a reference its output is what the others must equal."""
        favourite = self._favourite_key
        return sorted(self.work.candidates, key=lambda cfg: stable_json(cfg) != favourite)

    @property
    def _favourite_key(self) -> str | None:
        return None if self.work.favourite is None else stable_json(self.work.favourite)

    # --- all of them -----------------------------------------------------------------------------

    def _race_all(self, configs: list[Any]) -> None:
        start = time.monotonic()
        self._build(configs)
        self._racing_seconds = self.tuner.effort.share_of_build * (time.monotonic() - start)
        if self.handles:
            self._race(list(self.handles), self.tuner.effort.rounds)

    def _build(self, configs: Sequence[Any]) -> None:
        self.progress.building(len(configs))
        for cfg, handle in self.builder.build(configs):
            key = stable_json(cfg)
            if self.builder.truth is None and key == self._favourite_key:
                self.builder.truth = handle
            self.bench.warm_up(handle, self.tuner.warmup)
            self.handles[key] = handle
            self.samples.setdefault(key, [])
            self.progress.built(cfg)
            self.budget.spend()
            if self.budget.exhausted:
                break

    def _race(self, keys: list[str], rounds: int) -> None:
        favourite = self._favourite_key
        self.progress.racing(len(keys), rounds)
        start, least = time.monotonic(), 2 * self.tuner.iters

        def long_enough() -> bool:
            if self._out_of_time():
                return True
            limit = self._racing_seconds
            done = max(len(samples) for samples in race.samples)
            return limit is not None and done >= least and time.monotonic() - start > limit

        race = Race(
            [functools.partial(self._sample, key) for key in keys],
            screening=self.tuner.iters,
            rounds=max(rounds, self.tuner.iters),
            favourite=keys.index(favourite) if favourite in keys else None,
            margin=self.tuner.effort.margin,
            seed=self.tuner.seed,
            on_round=self.progress.round,
            stop=long_enough,
        )
        # Before it runs: if it is interrupted, what was measured is here.
        self.samples.update(zip(keys, race.samples, strict=True))
        winner = race.run()
        self.sure = race.sure
        self._winner = keys[winner]

    def _sample(self, key: str) -> float:
        return self.bench.sample(self.handles[key])

    def _out_of_time(self) -> bool:
        return self.tuner.seconds is not None and self.budget.exhausted is not None

    # --- a large space ---------------------------------------------------------------------------

    def _search(self, configs: list[Any]) -> None:
        from .search import Candidates, strategy_of

        tuner, effort = self.tuner, self.tuner.effort
        strategy = strategy_of(tuner.strategy, seed=tuner.seed)
        candidates = Candidates(configs)
        limit = min(effort.most_evaluations, max(24, round(effort.share_of_space * len(configs))))
        if tuner.evaluations is not None:
            limit = min(limit, tuner.evaluations)
        history: dict[int, float | None] = {}
        self.progress.building(limit)
        while len(history) < min(limit, len(configs)) and not self.budget.exhausted:
            proposed = strategy.propose(candidates, history, min(4, limit - len(history)))
            if not proposed:
                break
            self._evaluate([configs[index] for index in proposed])
            for index in proposed:
                samples = self.samples.get(stable_json(configs[index]))
                history[index] = typical(samples) if samples else None
        best = sorted(
            (key for key, taken in self.samples.items() if taken),
            key=lambda key: typical(self.samples[key]),
        )[: effort.finalists]
        favourite = self._favourite_key
        if favourite in self.handles and favourite not in best:
            best.append(favourite)
        if best:
            self._race(best, effort.rounds)

    def _evaluate(self, configs: list[Any]) -> None:
        """A first impression of some candidates, in the machine's speed of the favourite's time."""
        before = set(self.handles)
        self._build(configs)
        for key in [key for key in self.handles if key not in before]:
            self.samples[key] = [self._sample(key) for _ in range(self.tuner.iters)]

    # --- the result ------------------------------------------------------------------------------

    def _outcome(self, incomplete: str, *, strict: bool = True) -> Outcome[Any] | None:
        work = self.work
        trials = [self._trial(cfg) for cfg in work.candidates]
        measured = {
            stable_json(trial.cfg): trial for trial in trials if trial.verdict is Verdict.MEASURED
        }
        if not measured:
            if strict:
                raise TuningFailed(_all_failed(work.name, trials))
            return None
        best = self._best(measured)
        return Outcome(
            best=best.cfg,
            trials=tuple(trials),
            heuristic=work.favourite,
            measured=work.measured,
            notes=work.notes,
            sure=self.sure,
            incomplete=incomplete if self._unfinished(trials) or not strict else "",
        )

    def _unfinished(self, trials: list[Trial[Any]]) -> bool:
        searched = len(trials) > RACE_AT_MOST and self.tuner.strategy != "exhaustive"
        tried = [trial for trial in trials if trial.verdict is not Verdict.NOT_TRIED]
        return self._out_of_time() or (len(tried) < len(trials) and not searched)

    def _best(self, measured: dict[str, Trial[Any]]) -> Trial[Any]:
        """The race's winner; against what earlier runs measured, the faster by more than noise."""
        winner = measured.get(getattr(self, "_winner", ""))
        earlier = [trial for key, trial in measured.items() if not self.samples.get(key)]
        if winner is None:
            fastest = min(measured.values(), key=lambda trial: trial.seconds or 0.0)
            favourite = measured.get(self._favourite_key or "")
            return fastest if favourite is None else _faster(fastest, favourite)
        for trial in sorted(earlier, key=lambda trial: trial.seconds or 0.0)[:1]:
            winner = _faster(winner, trial)
        return winner

    def _trial(self, cfg: Any) -> Trial[Any]:
        key = stable_json(cfg)
        samples = self.samples.get(key)
        if samples:
            return Trial(cfg, Verdict.MEASURED, typical(samples), tuple(samples))
        if key in self.builder.twins:  # the same program takes the same time
            taken = self.samples.get(self.builder.twins[key])
            seconds = typical(taken) if taken else None
            return dataclasses.replace(self.builder.refused[key], seconds=seconds)
        if key in self.builder.refused:
            return self.builder.refused[key]
        if key in self.work.known:
            return self.work.known[key]
        return Trial(cfg, Verdict.NOT_TRIED, reason=self.budget.exhausted or "not proposed")


def _faster(challenger: Trial[Any], holder: Trial[Any]) -> Trial[Any]:
    """The challenger if it beats the holder by more than the noise of both, else the holder."""
    if challenger is holder:
        return holder
    if challenger.samples and holder.samples:
        gain, error = compare(
            sorted(holder.samples)[: len(challenger.samples)],
            sorted(challenger.samples)[: len(holder.samples)],
        )
        return challenger if gain > max(0.01, error) else holder
    return challenger if (challenger.seconds or 0.0) < 0.99 * (holder.seconds or 0.0) else holder


def call_with(function: Function, rest: Any, arrays: Sequence[Any]) -> Any:
    """Call a function with arrays put back among its other arguments."""
    args, kwargs = rest.merge(arrays)
    return function(*args, **kwargs)


def _flat(function: Function, rest: Any) -> Function:
    return lambda *arrays: call_with(function, rest, arrays)


def random_like_if_abstract(tree: Any, seed: int) -> Any:
    """Replace tracers and abstract shapes by random arrays; keep real arrays."""

    def real(leaf: Any) -> Any:
        abstract = isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))
        return random_like(leaf, seed) if abstract else leaf

    return jax.tree.map(real, tree)


def _all_failed(name: str, trials: list[Trial[Any]]) -> str:
    lines = [f"  {trial.cfg}: {trial.verdict.value}: {trial.reason}" for trial in trials]
    return f"{name}: none of the {len(lines)} candidates can be used:\n" + "\n".join(lines)
