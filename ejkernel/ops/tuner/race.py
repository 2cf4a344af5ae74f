"""Who wins: candidates run in turns, the slower half leaves, the rest run longer.

Taking turns in a shuffled order spreads a slow moment of the machine over all candidates instead of
charging it to one. The favourite (the heuristic config) stays to the end, and a challenger takes
its place only by more than the noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .clock import typical

LEAST_GAIN = 0.01  # a challenger within one percent of the favourite does not replace it


def race(
    samplers: Sequence[Callable[[], float]],
    rounds: int,
    favourite: int | None = None,
    seed: int = 0,
    on_round: Callable[[int, int], None] | None = None,
) -> tuple[int, list[list[float]]]:
    """Run the candidates against each other; return the winner's index and everyone's samples.

    Args:
      samplers: one per candidate, each giving seconds per call.
      rounds: samples of each candidate in the first heat; doubled in every heat after it.
      favourite: a candidate that never leaves and that wins ties.
      seed: of the running order.
      on_round: told how many candidates are left and how many rounds they have run.
    """
    if not samplers:
        raise ValueError("race: there are no candidates")
    samples: list[list[float]] = [[] for _ in samplers]
    order = random.Random(seed)
    running = list(range(len(samplers)))
    while True:
        for done in range(rounds):
            order.shuffle(running)
            for index in running:
                samples[index].append(samplers[index]())
            if on_round is not None:
                on_round(len(running), done + 1)
        running.sort(key=lambda index: (typical(samples[index]), index))
        if len(running) <= 2 + (favourite is not None):
            break
        keep = running[: max(2, (len(running) + 1) // 2)]
        if favourite in running and favourite not in keep:
            keep.append(favourite)
        running = keep
        rounds *= 2
    winner = running[0]
    if favourite in running and not _clearly_faster(samples[winner], samples[favourite]):
        winner = favourite
    return winner, samples


def _clearly_faster(challenger: list[float], favourite: list[float]) -> bool:
    """True if the challenger gains at least one percent and wins most rounds they ran together."""
    together = min(len(challenger), len(favourite))
    pairs = list(zip(challenger[-together:], favourite[-together:], strict=True))
    wins = sum(fast < slow for fast, slow in pairs)
    gain = 1 - typical(challenger) / typical(favourite)
    return gain > LEAST_GAIN and wins > together / 2
