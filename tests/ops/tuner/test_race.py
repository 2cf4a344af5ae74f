"""The race: who wins, on machines whose speed changes, and how long it takes."""

from __future__ import annotations

import itertools
import random

import pytest

from ejkernel.ops.tuner.race import Race, Withdrawn
from ejkernel.speedup import Gain, gain_of


class Track:
    """Candidates with true times on one machine whose mood changes with its clock."""

    def __init__(self, times, mood=lambda now, runner, count: 1.0):
        self.times, self.mood = times, mood
        self.now = 0.0
        self.order = []

    def samplers(self):
        return [self._sampler(index) for index in range(len(self.times))]

    def _sampler(self, index):
        def sample():
            count = self.order.count(index)
            self.order.append(index)
            seconds = self.times[index] * self.mood(self.now, index, count)
            self.now += seconds
            return seconds

        return sample


def race(samplers, rounds, baseline=None, seed=0):
    contest = Race(samplers, screening=rounds, rounds=16 * rounds, baseline=baseline, seed=seed)
    return contest.run(), contest.samples


BEST_LAST = [1.3, 1.25, 1.2, 1.4, 1.5, 1.35, 1.45, 1.0]


@pytest.mark.parametrize("seed", range(10))
def test_the_fastest_wins_on_a_quiet_machine(seed):
    winner, samples = race(Track(BEST_LAST).samplers(), 5, seed=seed)
    assert winner == 7
    assert len(samples) == 8


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("slope", [0.01, -0.002])
def test_a_machine_that_drifts_does_not_change_the_winner(seed, slope):
    track = Track(BEST_LAST, lambda now, runner, count: max(0.3, 1 + slope * now))
    winner, _ = race(track.samplers(), 5, baseline=0, seed=seed)
    assert winner == 7


@pytest.mark.parametrize("seed", range(10))
def test_bursts_of_slowness_do_not_change_the_winner(seed):
    def mood(now, runner, count):
        return 4.0 if int(now / 20) % 4 == 0 else 1.0

    winner, _ = race(Track(BEST_LAST, mood).samplers(), 5, baseline=0, seed=seed)
    assert winner == 7


@pytest.mark.parametrize("seed", range(10))
def test_lucky_samples_do_not_make_a_slow_candidate_win(seed):
    luck = random.Random(seed)

    def mood(now, runner, count):
        return 0.5 if runner == 0 and luck.random() < 0.1 else 1.0

    winner, _ = race(Track(BEST_LAST, mood).samplers(), 5, baseline=1, seed=seed)
    assert winner == 7


@pytest.mark.parametrize("baseline", range(4))
def test_ties_go_to_the_baseline(baseline):
    winner, _ = race(Track([1.0] * 4).samplers(), 3, baseline=baseline)
    assert winner == baseline


def test_a_gain_within_the_noise_does_not_replace_the_baseline():
    winner, _ = race(Track([0.999, 1.0, 0.998]).samplers(), 3, baseline=1)
    assert winner == 1


def test_a_challenger_that_wins_by_a_few_lucky_rounds_does_not_replace_the_baseline():
    def mood(now, runner, count):
        return 0.1 if runner == 0 and count % 3 == 0 else 1.0

    winner, _ = race(Track([1.02, 1.0], mood).samplers(), 9, baseline=1)
    assert winner == 1


def test_a_clear_gain_replaces_the_baseline():
    winner, _ = race(Track([0.9, 1.0, 1.1]).samplers(), 3, baseline=1)
    assert winner == 0


def noisy(seed):
    """Samples that are up to a quarter too long, and now and then much longer."""
    luck = random.Random(seed)
    return lambda *_: (1 + abs(luck.gauss(0, 0.25))) * (2.0 if luck.random() < 0.05 else 1.0)


def short_race(times, seed, **options):
    """As `effort="quick"` for a kernel that compiles fast: a few rounds, then it must decide."""
    track = Track(times, noisy(seed))
    contest = Race(track.samplers(), screening=2, rounds=4, baseline=0, seed=seed, **options)
    return contest.run(), contest


def test_of_many_slower_candidates_hardly_ever_one_replaces_the_baseline():
    winners = [short_race([1.0] + 8 * [1.05], seed)[0] for seed in range(200)]
    assert sum(winner != 0 for winner in winners) <= 4  # without a duel: 16


def test_a_duel_finds_what_a_short_race_leaves_in_doubt():
    found = [short_race([1.0, 1.0, 0.75, 1.0], seed)[0] for seed in range(200)]
    assert sum(winner == 2 for winner in found) >= 150
    assert sum(winner not in (0, 2) for winner in found) <= 4


def test_only_the_two_of_a_duel_run_in_it():
    winner, contest = short_race([1.0, 0.5, 0.98], 3)
    counts = [len(samples) for samples in contest.samples]
    assert winner == 1
    assert counts[0] == counts[1] >= 6 + 2
    assert counts[2] <= 4


def test_a_second_duel_is_judged_by_its_own_rounds():
    """The machine is twice as fast then: beside the first duel everyone would look good."""
    contest = None

    def sampler(index, at_first, later):
        def sample():
            twice = len(contest.samples[1]) >= 4 + 6
            done = len(contest.samples[index])
            return (at_first if done < 4 else later) * (0.5 if twice else 1.0)

        return sample

    runners = [sampler(0, 1.0, 1.0), sampler(1, 0.8, 1.2), sampler(2, 0.8, 1.05)]
    contest = Race(runners, screening=2, rounds=4, baseline=0, margin=0.0)
    contest.stop = lambda: len(contest.samples[0]) >= 4
    assert contest.run() == 0
    assert len(contest.samples[0]) == 4 + 6 + 6
    assert not contest.sure


def failing_in_a_duel(seconds):
    """A sampler that has run four rounds, and no more."""
    runs = itertools.count()

    def sample():
        if next(runs) >= 4:
            raise Withdrawn
        return seconds

    return sample


def test_a_challenger_that_fails_in_its_duel_leaves_the_baseline():
    runners = [lambda: 1.0, failing_in_a_duel(0.5)]
    contest = Race(runners, screening=2, rounds=4, baseline=0, margin=0.0)
    assert contest.run() == 0
    assert contest.withdrawn == {1}


def test_a_baseline_that_fails_in_the_duel_leaves_the_challenger():
    runners = [failing_in_a_duel(1.0), lambda: 0.5]
    contest = Race(runners, screening=2, rounds=4, baseline=0, margin=0.0)
    assert contest.run() == 1


def test_without_time_left_a_duel_is_decided_by_what_was_measured():
    rounds = itertools.count(1)
    late = Race([lambda: 1.0, lambda: 0.5], baseline=0, out_of_time=lambda: next(rounds) >= 4)
    assert late.run() == 1
    assert len(late.samples[0]) < 6  # as many as a duel has at least
    at_once = Race([lambda: 1.0, lambda: 0.5], baseline=0, out_of_time=lambda: True)
    assert at_once.run() == 0  # one round proves nothing
    assert [len(samples) for samples in at_once.samples] == [1, 1]


def test_a_moment_of_slowness_at_the_start_makes_nobody_leave():
    """Programs of two threads take twice as long while something else has one of the cores."""
    threads = [1, 2, 2, 1]

    def mood(now, runner, count):
        return 2.0 if now < 7.0 and threads[runner] == 2 else 1.0

    for settling, wanted in ((0.0, {0, 3}), (20.0, {1})):
        track = Track([0.7, 0.5, 0.6, 0.8], mood)
        contest = Race(
            track.samplers(), screening=2, settling=settling, timer=lambda track=track: track.now
        )
        assert contest.run() in wanted


def test_what_is_beyond_doubt_needs_no_duel():
    contest = Race([lambda: 1.0, lambda: 0.5], screening=6, rounds=8, baseline=0)
    assert contest.run() == 1
    assert len(contest.samples[0]) == 6


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
def test_the_baseline_always_reaches_the_final(count):
    times = [1.0 + index / 10 for index in range(count)]
    winner, samples = race(Track(times).samplers(), 2, baseline=count - 1)
    assert winner == 0
    assert len(samples[count - 1]) == len(samples[0]) == max(map(len, samples))


def test_slow_candidates_leave_early_and_finalists_run_longer():
    _, samples = race(Track([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).samplers(), 2)
    counts = [len(taken) for taken in samples]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 2


def test_finalists_that_are_close_run_longer_than_the_others():
    noise = random.Random(0)
    track = Track([1.0, 1.01, 3.0, 4.0], lambda *_: noise.lognormvariate(0, 0.1))
    _, samples = race(track.samplers(), 3)
    assert len(samples[0]) > 2 * len(samples[3])


def test_candidates_take_turns_in_a_changing_order():
    track = Track([1.0, 1.05, 1.1, 1.15])
    race(track.samplers(), 6)
    rounds = [tuple(track.order[start : start + 4]) for start in range(0, 24, 4)]
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in rounds)
    assert len(set(rounds)) > 1


def test_the_same_seed_gives_the_same_order():
    first, second = Track(BEST_LAST), Track(BEST_LAST)
    race(first.samplers(), 3, seed=5)
    race(second.samplers(), 3, seed=5)
    assert first.order == second.order


def test_a_race_without_a_baseline_is_won_by_the_fastest():
    assert race(Track([2.0, 1.0]).samplers(), 1)[0] == 1
    assert race(Track([2.0]).samplers(), 1)[0] == 0


def test_a_race_without_candidates_is_refused():
    with pytest.raises(ValueError, match="no candidates"):
        race([], 3)


def test_the_speedup_that_is_shown_is_the_one_that_decided():
    """Of who had a duel, that of its rounds: they were not used to choose it for the duel."""
    noise = random.Random(0)
    track = Track([1.05, 1.0], lambda now, runner, count: 1 + 0.02 * noise.random())
    contest = Race(track.samplers(), screening=3, rounds=3, baseline=0)
    assert contest.run() == 1
    assert len(contest.samples[1]) >= 3 + 6  # the fewest rounds of a duel
    duel = gain_of(contest.samples[0][3:], contest.samples[1][3:])
    assert contest.speedup(1) == duel
    assert duel.times != gain_of(contest.samples[0], contest.samples[1]).times
    assert contest.speedup(0) == Gain(1.0, 1.0, 1.0)


def test_who_left_early_is_compared_within_its_own_rounds():
    """The machine becomes faster: whole samples would favour those that stayed."""
    track = Track([1.0, 2.0, 0.5], lambda now, runner, count: 1 / (1 + 0.5 * count))
    contest = Race(track.samplers(), screening=2, rounds=20, baseline=0, settling=0.0)
    contest.run()
    assert len(contest.samples[1]) < len(contest.samples[0])
    assert contest.speedup(1).times == pytest.approx(0.5)
    assert contest.speedup(2).times == pytest.approx(2.0)


def test_without_a_baseline_or_a_second_sample_there_is_no_speedup():
    contest = Race(Track([1.0, 2.0]).samplers())
    contest.run()
    assert contest.speedup(1) is None
    short = Race(Track([1.0, 2.0]).samplers(), rounds=1, baseline=0)
    short.run()
    assert short.speedup(1) is None
