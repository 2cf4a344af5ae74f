"""One run of a tuner over one tuning task: build, race or search, and the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...formatting import lasting
from ...speedup import PlainJax, compare
from ..config.outcome import Outcome, Trial, TuningFailed, TuningInterrupted, Verdict
from ..utils.fingerprint import stable_json
from .bench import Bench, BenchUnavailable, CandidateError
from .build import Builder, TuningTask, reason_of
from .clock import typical
from .plain import time_plain
from .progress import Progress
from .progress_file import Best
from .race import Race, Withdrawn, beats_the_noise
from .search.effort import DOUBT, PATIENCE, SETTLING, Budget

if TYPE_CHECKING:
    from .tuner import Tuner

RACE_AT_MOST = 64  # a longer list of candidates is searched instead of raced, unless told otherwise


class TuningRun:
    """One run of the tuner over one task: what was built, measured and refused so far."""

    def __init__(self, tuner: Tuner, task: TuningTask, bench: Bench, progress: Progress) -> None:
        self._start = time.monotonic()
        self.tuner = tuner
        self.task = task
        self.bench = bench
        self.progress = progress
        self.budget = Budget(tuner.seconds, tuner.evaluations)
        self.builder = Builder(bench, task, progress.refused)
        self._baseline = None if task.baseline is None else stable_json(task.baseline)
        self._racing_seconds: float | None = None  # most time for the race
        self.handles: dict[str, Any] = {}
        self.samples: dict[str, list[float]] = {}
        self.remarks: dict[str, str] = {}  # about candidates that were measured all the same
        self.sure = False
        self._configs: dict[str, Any] = {}  # by the names that handles and samples have
        self._order: dict[str, int] = {}  # of those that were to be built
        self._tried_before = max((trial.order or 0 for trial in task.known.values()), default=0)
        self._unrepeated: set[str] = set()  # ran once; a second run may give another output
        self._winner: str | None = None
        self._raced: tuple[list[str], Race] | None = None
        self._plain: PlainJax | None = None

    def run(self) -> Outcome[Any]:
        task, effort = self.task, self.tuner.effort
        # The baseline first: without a reference its output is what the others must equal.
        ordered = sorted(task.candidates, key=lambda cfg: stable_json(cfg) != self._baseline)
        fresh = [cfg for cfg in ordered if stable_json(cfg) not in task.known]
        if fresh:
            self._find_the_reference()
        try:
            if len(fresh) > RACE_AT_MOST and self.tuner.strategy != "exhaustive":
                self._search(fresh)
            else:
                self._racing_seconds = effort.share_of_build * self._build(fresh)
                if self.handles:
                    self._race(list(self.handles), effort.rounds)
            self._time_plain()
        except BenchUnavailable as error:
            raise TuningFailed(f"{task.name}: candidates cannot be run: {error}") from error
        except KeyboardInterrupt:
            raise TuningInterrupted(self._outcome("interrupted", strict=False)) from None
        finally:
            self.tuner.count_compilations(self.builder.compilations)
        outcome = self._outcome(self.budget.exhausted or "")
        assert outcome is not None
        return outcome

    def _find_the_reference(self) -> None:
        """Have something to compare with; a baseline that is yet to be built will be it."""
        reference = self.task.reference
        if reference is None and self._baseline in self.task.known:
            reference = self.task.make_function(self.task.baseline)
        if reference is None:
            return
        try:
            self.builder.use_as_reference(reference)
        except Exception as error:
            raise TuningFailed(
                f"{self.task.name}: the reference itself failed, so nothing can be checked: "
                f"{reason_of(error)}"
            ) from error

    # --- all of them -----------------------------------------------------------------------------

    def _build(self, configs: Sequence[Any]) -> float:
        """Have handles of the usable ones; how many seconds that took."""
        start = time.monotonic()
        self.progress.building(len(configs))
        for cfg in configs:
            self._order.setdefault(stable_json(cfg), self._tried_before + len(self._order) + 1)
        for cfg, handle in self.builder.build(configs):
            key = stable_json(cfg)
            self._configs[key] = cfg
            if self.builder.reference is None and key == self._baseline:
                self._trust_the_baseline(handle)
            with self.builder.blaming(cfg):
                self.bench.warm_up(handle, self.tuner.warmup)
                self.handles[key] = handle
                self.samples.setdefault(key, [])
                self._unrepeated.add(key)
                self.progress.built(cfg)
            self.budget.spend()
            if self.budget.exhausted:
                break
        return time.monotonic() - start

    def _trust_the_baseline(self, handle: Any) -> None:
        try:
            self.builder.trust(handle)
        except CandidateError as error:
            raise TuningFailed(
                f"{self.task.name}: the other candidates would be compared with the heuristic "
                f"config {lasting(str(self.task.baseline))}, but {error}. Give the kernel a "
                "`reference`."
            ) from error

    def _race(self, keys: list[str], rounds: int) -> None:
        baseline = self._baseline
        self.progress.racing(len(keys), rounds)
        start, least = time.monotonic(), 2 * self.tuner.iters

        def long_enough() -> bool:
            limit = self._racing_seconds
            done = max(len(samples) for samples in race.samples)
            if limit is None or done < least:
                return False
            spent = time.monotonic() - start
            return spent > PATIENCE * limit or (spent > limit and race.doubt() < DOUBT)

        race = Race(
            [functools.partial(self._sample, key) for key in keys],
            screening=self.tuner.iters,
            rounds=max(rounds, self.tuner.iters),
            baseline=keys.index(baseline) if baseline in keys else None,
            margin=self.tuner.effort.margin,
            seed=self.tuner.seed,
            on_round=self._round_is_over,
            stop=long_enough,
            out_of_time=self._out_of_time,
            settling=SETTLING,
        )
        # Before it runs: if it is interrupted, what was measured is here.
        self.samples.update(zip(keys, race.samples, strict=True))
        self._raced = (keys, race)
        winner = race.run()
        self.sure = race.sure
        self._winner = None if winner is None else keys[winner]

    def _round_is_over(self, running: int, done: int) -> None:
        best, speedup = None, None
        if self.progress.is_shown:
            known = {key: s for key in self.samples if (s := self._seconds(key)) is not None}
            best = min(known.values(), default=None)
            baseline = known.get(self._baseline or "")
            speedup = baseline / best if baseline and best else None
        self.progress.round(running, done, best, speedup)

    def _sample(self, key: str) -> float:
        """Seconds of one more run; a candidate that ran before may still fail, and withdraws."""
        with self.builder.blaming(self._configs[key]):
            seconds = self.bench.sample(self.handles[key])
            if key in self._unrepeated:
                self._unrepeated.remove(key)
                self._see_that_it_repeats(key)
        if key in self.builder.refused:
            raise Withdrawn
        return seconds

    def _see_that_it_repeats(self, key: str) -> None:
        handle = self.handles[key]
        if handle is self.builder.reference:
            return  # seen before it was trusted
        difference = self.bench.repeats(handle)
        self.bench.forget(handle)  # its output has been compared twice by now
        if difference is not None and difference.harmless:
            self.remarks[key] = difference.reason
        elif difference is not None:
            self.builder.refuse(self._configs[key], Verdict.NON_DETERMINISTIC, difference.reason)

    def _time_plain(self) -> None:
        """Have a time of plain JAX, if this run measured anything to compare it with."""
        measured = self._measured([self._trial(cfg) for cfg in self.task.candidates])
        if self._winner is None or not measured:
            return
        self.progress.timing_plain()
        best = self._best(measured)
        seconds = measured.get(self._baseline or "", best).seconds
        assert seconds is not None
        self._plain = time_plain(
            self.bench,
            self.task,
            self.builder,
            warmup=self.tuner.warmup,
            winner=self.handles.get(stable_json(best.cfg)),
            heuristic=seconds,
            limit=self.tuner.effort.share_of_build * (time.monotonic() - self._start),
            out_of_time=self._out_of_time,
        )

    def _out_of_time(self) -> bool:
        return self.tuner.seconds is not None and self.budget.exhausted is not None

    # --- a large space ---------------------------------------------------------------------------

    def _search(self, configs: list[Any]) -> None:
        from .search.strategies import BATCH, Candidates, strategy_of

        tuner, effort = self.tuner, self.tuner.effort
        strategy = strategy_of(tuner.strategy, seed=tuner.seed)
        candidates = Candidates(configs)
        limit = min(effort.most_evaluations, max(24, round(effort.share_of_space * len(configs))))
        if tuner.evaluations is not None:
            limit = min(limit, tuner.evaluations)
        history: dict[int, float | None] = {}
        self.progress.building(limit)
        while len(history) < min(limit, len(configs)) and not self.budget.exhausted:
            proposed = strategy.propose(candidates, history, min(BATCH, limit - len(history)))
            if not proposed:
                break
            self._evaluate([configs[index] for index in proposed])
            for index in proposed:
                history[index] = self._seconds(stable_json(configs[index]))
        times = self._times()
        best = sorted(times, key=times.__getitem__)[: effort.finalists]
        baseline = self._baseline
        if baseline in self.handles and baseline not in (*best, *self.builder.refused):
            best.append(baseline)
        if best:
            self._race(best, effort.rounds)

    def _evaluate(self, configs: list[Any]) -> None:
        """A first impression of some candidates, interleaved: a slow moment meets all of them.

        Compared with compiling, more samples of a short program cost nothing, and they outlast the
        moment.
        """
        effort, before = self.tuner.effort, set(self.handles)
        building = self._build(configs)
        until = time.monotonic() + effort.share_of_build * building
        new = [key for key in self.handles if key not in before]
        for done in range(max(effort.rounds, self.tuner.iters)):
            if done >= self.tuner.iters and time.monotonic() >= until:
                break
            for key in [key for key in new if key not in self.builder.refused]:
                with contextlib.suppress(Withdrawn):
                    self.samples[key].append(self._sample(key))

    def best_so_far(self) -> Best | None:
        """The fastest of what is measured by now; None before the first sample."""
        times = self._times()
        if not times:
            return None
        best = min(times, key=times.__getitem__)
        return Best(str(self._configs[best]), times[best], times.get(self._baseline or ""))

    def _times(self) -> dict[str, float]:
        """The typical times of all that are measured by now."""
        times = {key: self._seconds(key) for key in self.samples}
        return {key: seconds for key, seconds in times.items() if seconds is not None}

    def _seconds(self, key: str) -> float | None:
        """The typical time of a candidate; None if it was not measured, or refused since."""
        samples = None if key in self.builder.refused else self.samples.get(key)
        return typical(samples) if samples else None

    # --- the result ------------------------------------------------------------------------------

    def _outcome(self, incomplete: str, *, strict: bool = True) -> Outcome[Any] | None:
        task = self.task
        trials = [self._in_order(self._trial(cfg)) for cfg in task.candidates]
        measured = self._measured(trials)
        if not measured:
            if strict:
                lines = [
                    f"  {lasting(str(trial.cfg))}: {trial.verdict.value}: {trial.reason}"
                    for trial in trials
                ]
                head = f"{task.name}: none of the {len(lines)} candidates can be used:"
                raise TuningFailed("\n".join([head, *lines]))
            return None
        best = self._best(measured)
        trials = self._in_the_heuristics_time(trials, measured.get(self._baseline or ""))
        return Outcome(
            best=best.cfg,
            trials=tuple(trials),
            heuristic=task.baseline,
            measured=task.measured,
            notes=task.notes,
            clock=self.bench.clock,
            sure=self.sure,
            incomplete=incomplete if self._unfinished(trials) or not strict else "",
            took=time.monotonic() - self._start,
            work=task.work,
            plain=self._plain_like(next(t.seconds for t in trials if t.cfg is best.cfg)),
        )

    @staticmethod
    def _measured(trials: list[Trial[Any]]) -> dict[str, Trial[Any]]:
        return {
            stable_json(trial.cfg): trial for trial in trials if trial.verdict is Verdict.MEASURED
        }

    def _in_the_heuristics_time(
        self, trials: list[Trial[Any]], heuristic: Trial[Any] | None
    ) -> list[Trial[Any]]:
        """The trials of this run's race with their paired speedups, and times that agree with them.

        Candidates that left early have their samples from other moments than those that stayed:
        the ratio within rounds is what they have in common, and what decided.
        """
        if self._raced is None or heuristic is None or not heuristic.seconds:
            return trials
        keys, race = self._raced
        speedups = {key: race.speedup(index) for index, key in enumerate(keys)}
        changed = []
        for trial in trials:
            key = stable_json(trial.cfg)
            gain = speedups.get(self.builder.duplicates.get(key, key))
            if gain is not None and trial.seconds is not None:
                seconds = heuristic.seconds / gain.times
                trial = dataclasses.replace(trial, seconds=seconds, speedup=gain)
            changed.append(trial)
        return changed

    def _plain_like(self, tuned: float | None) -> PlainJax | None:
        """What is known of plain JAX, with the time that its speedup gives."""
        plain = self._plain
        if plain is None or plain.speedup is None or tuned is None:
            return plain
        return dataclasses.replace(plain, seconds=tuned * plain.speedup.times)

    def _unfinished(self, trials: list[Trial[Any]]) -> bool:
        searched = len(trials) > RACE_AT_MOST and self.tuner.strategy != "exhaustive"
        tried = [trial for trial in trials if trial.verdict is not Verdict.NOT_TRIED]
        return self._out_of_time() or (len(tried) < len(trials) and not searched)

    def _best(self, measured: dict[str, Trial[Any]]) -> Trial[Any]:
        """The race's winner; against what earlier runs measured, the faster by more than noise."""
        winner = measured.get(self._winner or "")
        if winner is None:
            fastest = min(measured.values(), key=lambda trial: trial.seconds or 0.0)
            baseline = measured.get(self._baseline or "")
            return fastest if baseline is None else _faster(fastest, baseline)
        earlier = [trial for key, trial in measured.items() if not self.samples.get(key)]
        fastest = min(earlier, key=lambda trial: trial.seconds or 0.0, default=winner)
        return _faster(winner, fastest)

    def _in_order(self, trial: Trial[Any]) -> Trial[Any]:
        place = self._order.get(stable_json(trial.cfg))
        if place is None or trial.verdict is Verdict.NOT_TRIED:
            return trial
        return dataclasses.replace(trial, order=place)

    def _trial(self, cfg: Any) -> Trial[Any]:
        key = stable_json(cfg)
        if key in self.builder.duplicates:  # the same program has the same fate
            seconds = self._seconds(self.builder.duplicates[key])
            return dataclasses.replace(self.builder.refused[key], seconds=seconds)
        if key in self.builder.refused:
            return self.builder.refused[key]
        samples = self.samples.get(key)
        if samples:
            remark = self.remarks.get(key, "")
            return Trial(cfg, Verdict.MEASURED, typical(samples), tuple(samples), remark)
        if key in self.task.known:
            return self.task.known[key]
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
        return challenger if beats_the_noise(gain, error) else holder
    return challenger if (challenger.seconds or 0.0) < 0.99 * (holder.seconds or 0.0) else holder
