"""Who wins: candidates run interleaved, the surely slower ones leave, the rest run longer.

Interleaving them in a shuffled order spreads a slow moment of the machine over all candidates
instead of charging it to one, so two candidates are compared by the ratio of their times *within*
rounds. A candidate leaves when it is surely slower than the leader, or so much slower that two
rounds show it; in any case the slowest third leaves each time the number of rounds has doubled. The
baseline (the heuristic config) stays to the end. A challenger takes its place only by more than the
noise, and only after a duel: of many candidates, the one that leads was also favoured by noise, and
in rounds of which nothing was chosen that does not happen again.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Container, Sequence

from ...speedup import SURE, Gain, compare, gain_of
from .clock import typical

LEAST_GAIN = 0.01  # a challenger within one percent of the baseline does not replace it
CLEARLY = 1.25  # slower at its best than the leader at its worst by this factor: no doubt is left
DUEL = (6, 24)  # fewest and most rounds of challenger against baseline
LIKELY = 1.5  # standard errors that are enough at the end of a duel


class Withdrawn(Exception):
    """Raised by a sampler whose candidate can no longer run; the race goes on without it."""


@dataclasses.dataclass
class Race:
    """The state of a race: everyone's samples, round by round, and who is still running.

    Args:
      samplers: one per candidate, each giving seconds per call or raising `Withdrawn`.
      screening: rounds that everyone runs before the first may leave.
      rounds: most rounds of those who stay.
      baseline: a candidate that never leaves and that wins ties.
      margin: the race ends when the leader is surely within this share of everyone left.
      seed: of the running order.
      on_round: told how many candidates are running and how many rounds they have run.
      stop: asked after each round; a true answer ends the race, and a duel may follow.
      out_of_time: asked after each round; a true answer ends everything.
      settling: seconds in which nobody leaves: whatever takes a core for a moment makes programs
        of several threads look slow, in every round of that moment.
      timer: a clock in seconds.
    """

    samplers: Sequence[Callable[[], float]]
    screening: int = 3
    rounds: int = 40
    baseline: int | None = None
    margin: float = 0.01
    seed: int = 0
    on_round: Callable[[int, int], None] = lambda running, done: None
    stop: Callable[[], bool] = lambda: False
    out_of_time: Callable[[], bool] = lambda: False
    settling: float = 0.0
    timer: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not self.samplers:
            raise ValueError("race: there are no candidates")
        self.samples: list[list[float]] = [[] for _ in self.samplers]
        self._order = random.Random(self.seed)
        self.running = list(range(len(self.samplers)))
        self.withdrawn: set[int] = set()
        self.sure = False
        self._duels: dict[int, tuple[list[float], list[float]]] = {}  # challenger -> both samples

    def run(self) -> int | None:
        """Run it; the winner's index, or None if all had to withdraw."""
        next_cut = self.screening
        start = self.timer()
        for done in range(1, self.rounds + 1):
            self._round(self.running)
            if not self.running:
                return None
            self.on_round(len(self.running), done)
            has_settled = self.timer() - start >= self.settling
            if has_settled and done >= 2:
                self._drop_the_clearly_slower()
            if has_settled and done >= self.screening:
                self._drop_the_surely_slower()
                if done >= next_cut:
                    self._drop_the_slowest_third()
                    next_cut = 2 * done
                if self._settled():
                    self.sure = True
                    break
            if self.out_of_time() or self.stop():
                break
        return self._winner()

    def _round(self, candidates: Sequence[int]) -> None:
        turn = list(candidates)
        self._order.shuffle(turn)
        for index in turn:
            try:
                self.samples[index].append(self.samplers[index]())
            except Withdrawn:
                self._withdraw(index)

    def doubt(self) -> float:
        """By how much somebody else may yet turn out faster than the leader, as a share."""
        return max([0.0, *(error - ratio for ratio, error in self._behind().values())])

    def speedup(self, index: int) -> Gain | None:
        """How many times faster than the baseline one is, by the rounds that decided about it.

        Those are the rounds of its duel, if it had one, else all that both ran. None without a
        baseline, and of what was sampled once.
        """
        if self.baseline is None or self.baseline in self.withdrawn:
            return None
        if index == self.baseline:
            return Gain(1.0, 1.0, 1.0) if self.samples[index] else None
        both = self._duels.get(index, (self.samples[self.baseline], self.samples[index]))
        return gain_of(*both) if min(map(len, both)) >= 2 else None

    def _behind(self) -> dict[int, tuple[float, float]]:
        """How much slower than the leader each of the others is, with the standard error."""
        leader, *others = self._ranked()
        return {index: compare(self.samples[index], self.samples[leader]) for index in others}

    def _withdraw(self, index: int) -> None:
        """Go on without it; if it was the last one running, with those it had outrun."""
        self.withdrawn.add(index)
        self.running.remove(index)
        if not self.running:
            self.running = [i for i in range(len(self.samplers)) if i not in self.withdrawn]
            least = min((len(self.samples[i]) for i in self.running), default=0)
            for i in self.running:  # again in step with each other, however far they had come
                del self.samples[i][least:]

    def _ranked(self) -> list[int]:
        """Those that are running, the leader first."""
        return sorted(self.running, key=lambda index: (typical(self.samples[index]), index))

    def _drop(self, slower: Container[int]) -> None:
        self.running = [i for i in self.running if i == self.baseline or i not in slower]

    def _drop_the_clearly_slower(self) -> None:
        limit = CLEARLY * max(self.samples[self._ranked()[0]])
        self._drop({index for index in self.running if min(self.samples[index]) > limit})

    def _drop_the_surely_slower(self) -> None:
        behind = self._behind().items()
        self._drop({i for i, (ratio, error) in behind if ratio - SURE * error > self.margin})

    def _drop_the_slowest_third(self) -> None:
        self._drop(self._ranked()[max(2, math.ceil(len(self.running) * 2 / 3)) :])

    def _settled(self) -> bool:
        """True if nobody left can be faster than the leader by more than the margin."""
        behind = self._behind().values()
        return all(ratio - SURE * error >= -self.margin for ratio, error in behind)

    def _winner(self) -> int | None:
        """The fastest that also wins its duel with the baseline; else the baseline."""
        baseline = self.baseline
        while self.running:
            leader = self._ranked()[0]
            if baseline not in self.running or leader == baseline:
                return leader
            assert baseline is not None
            gain, error = compare(self.samples[baseline], self.samples[leader])
            if not beats_the_noise(gain, error, 1):
                return baseline
            # So much faster in so many rounds that noise cannot have done it.
            beyond_doubt = gain > max(0.1, 2 * SURE * error)
            if beyond_doubt and len(self.samples[leader]) >= DUEL[0]:
                return leader
            if self._wins_a_duel(leader, baseline):
                return leader
            self.running = [index for index in self.running if index != leader]
            self.sure = False
        return None

    def _wins_a_duel(self, challenger: int, baseline: int) -> bool:
        """Whether it is faster by more than the noise in rounds of their own.

        With simulated noise, 300 runs each: something slower replaced the baseline in at most 3,
        without duels in up to 25; what is 10 % faster was found in 261, without duels in 195.
        """
        pair = (challenger, baseline)
        before = [len(self.samples[index]) for index in pair]  # the baseline may have had another
        for done in range(1, DUEL[1] + 1):
            if self.out_of_time():  # all that was measured so far must do
                self._duels.pop(challenger, None)
                gain, error = compare(self.samples[baseline], self.samples[challenger])
                return beats_the_noise(gain, error)
            self._round(pair)
            if not self.withdrawn.isdisjoint(pair):
                return challenger not in self.withdrawn
            mine, other = (self.samples[i][n:] for i, n in zip(pair, before, strict=True))
            self._duels[challenger] = (other, mine)
            gain, error = compare(other, mine)
            if done >= DUEL[0] and (gain <= 0 or beats_the_noise(gain, error)):
                break
        return beats_the_noise(gain, error, LIKELY)


def beats_the_noise(gain: float, error: float, errors: float = SURE) -> bool:
    """Whether a result of `compare` is more than a percent, and than so many standard errors."""
    return gain > max(LEAST_GAIN, errors * error)
