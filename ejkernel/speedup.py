"""Speedups: old time / new time, with a confidence interval, from samples taken interleaved.

Here because the tuner decides by them and reports show them: the same figure in both places.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .formatting import times

SURE = 2.5  # standard errors
CERTAINTY = 0.98  # that the confidence interval of a speedup holds it


@dataclasses.dataclass(frozen=True)
class Gain:
    """A speedup, how many times faster one thing is than another, with its confidence interval.

    >>> Gain(1.25, 1.2, 1.3).is_real, Gain(1.02, 0.97, 1.08).is_real
    (True, False)
    """

    times: float
    low: float
    high: float

    def __post_init__(self) -> None:
        for ratio in (self.times, self.low, self.high):
            if math.isfinite(ratio) and ratio != 0 and not 1e-30 <= ratio <= 1e30:
                raise ValueError(f"Gain: {ratio!r} is no ratio of two times")

    @property
    def is_real(self) -> bool:
        """True if "no difference" lies outside the confidence interval."""
        return self.low > 1.0 or self.high < 1.0

    def to_plain(self) -> list[float]:
        """The figure and its interval, as they are stored."""
        return [self.times, self.low, self.high]

    @classmethod
    def from_plain(cls, plain: Any) -> Gain | None:
        """What `to_plain` wrote; None for anything else: a store may hold what it likes.

        >>> Gain.from_plain([2.0, 1.9, 2.1]), Gain.from_plain([2.0, 3.0, 4.0])
        (Gain(times=2.0, low=1.9, high=2.1), None)
        """
        if not isinstance(plain, (list, tuple)) or len(plain) != 3:
            return None
        if not all(type(x) in (int, float) and 1e-30 <= x <= 1e30 for x in plain):
            return None
        times, low, high = map(float, plain)
        return cls(times, low, high) if low <= times <= high else None


@dataclasses.dataclass(frozen=True)
class PlainJax:
    """The same call in plain JAX, timed with the candidates: what users have without the kernel.

    Attributes:
      name: the function that was timed.
      seconds: its time per call; None if it was not timed.
      speedup: how many times faster the tuned config is; None if they did not run interleaved.
      more_than: it was stopped because it takes more than this many times as long as the heuristic
        config.
      reason: why it has no time, or was stopped.
    """

    name: str = ""
    seconds: float | None = None
    speedup: Gain | None = None
    more_than: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        for value in (self.seconds, self.more_than):
            if value is not None and math.isfinite(value) and not 1e-15 <= value <= 1e12:
                raise ValueError(f"PlainJax: {value!r} is no time in seconds, and no factor")

    def faster(self, tuned: float | None) -> str:
        """How many times faster the tuned config is, whose time this is: `2.10×`, `> 20×`.

        >>> PlainJax("naive", 2e-3).faster(1e-3), PlainJax("naive", more_than=20.0).faster(1e-3)
        ('2.00×', '> 20×')
        """
        if self.more_than is not None:
            return f"> {self.more_than:g}×"
        if self.speedup is not None:
            return times(self.speedup.times)
        return times(self.seconds / tuned) if self.seconds and tuned else "–"

    def sentence(self, tuned: float | None, duration: Callable[[float], str]) -> str:
        """All about it in a line, with times as `duration` writes them."""
        time = "not timed" if self.seconds is None else duration(self.seconds)
        words = f"plain JAX{f' ({self.name})' if self.name else ''}: {time}"
        if (factor := self.faster(tuned)) != "–":
            words += f"; speedup of tuned {factor}"
            if self.speedup is not None and self.speedup.high > 0:
                words += f" ({interval(self.speedup)})"
        return f"{words}; {self.reason}" if self.reason else words

    def to_plain(self) -> dict[str, Any]:
        """The measurement as it is stored with an entry."""
        return {
            **dataclasses.asdict(self),
            "speedup": None if self.speedup is None else self.speedup.to_plain(),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> PlainJax | None:
        """What `to_plain` wrote; None for anything else: entries of earlier versions have none."""
        if not isinstance(plain, Mapping):
            return None
        name, reason = plain.get("name") or "", plain.get("reason") or ""
        seconds, more_than = plain.get("seconds"), plain.get("more_than")
        if not isinstance(name, str) or not isinstance(reason, str):
            return None
        if not all(
            value is None or (type(value) in (int, float) and 1e-15 <= value <= 1e12)
            for value in (seconds, more_than)
        ):
            return None
        return cls(name, seconds, Gain.from_plain(plain.get("speedup")), more_than, reason)


def compare(slower: Sequence[float], faster: Sequence[float]) -> tuple[float, float]:
    """How much slower the first is, as a logarithm, and the standard error of that.

    Only rounds that both ran are compared. Median and median deviation, because a burst of load or
    one outlier must not decide.
    """
    together = min(len(slower), len(faster))
    ratios = [math.log(a / b) for a, b in zip(slower[:together], faster[:together], strict=True)]
    middle = statistics.median(ratios)
    if together < 2:
        return middle, math.inf
    spread = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    # The deviation itself is uncertain: with few rounds it says little, and below half a percent
    # nothing.
    uncertain = 1 + 3 / (together - 1) ** 2
    return middle, uncertain * max(1.2533 * spread, 0.005) / math.sqrt(together)


def gain_of(slower: Sequence[float], faster: Sequence[float]) -> Gain:
    """How many times faster the second is, by the samples that both took interleaved.

    The confidence interval holds the median of the ratios with 98 % certainty, however the noise is
    distributed, and is never narrower than the race's own standard errors; of fewer than seven
    rounds it is all that was seen. A single round has no interval: its limits are 0.
    """
    middle, error = compare(slower, faster)
    if not math.isfinite(error):
        return Gain(math.exp(middle), 0.0, 0.0)
    ratios = sorted(a / b for a, b in zip(slower, faster, strict=False))
    left_out = _left_out(len(ratios))
    low = min(ratios[left_out], math.exp(middle - SURE * error))
    high = max(ratios[-1 - left_out], math.exp(middle + SURE * error))
    return Gain(math.exp(middle), low, high)


def _left_out(count: int) -> int:
    """How many sorted values the confidence interval of their median leaves out at each end."""
    outside, number = 0.0, 0
    while True:
        outside += 2 * math.comb(count, number) / 2**count
        if outside > 1 - CERTAINTY or 2 * (number + 1) >= count:
            return number
        number += 1


# --- as text -------------------------------------------------------------------------------------


def interval(gain: Gain, word: str = "to") -> str:
    """The confidence interval of a speedup: `1.20× to 1.30×`."""
    return f"{times(gain.low)} {word} {times(gain.high)}"


def against_heuristic(gain: Gain | None, ratio: float | None, chosen: bool) -> tuple[str, str]:
    """A candidate's speedup over the heuristic config, and its interval, for a row of a table.

    The figure is the one that decided in the race. Where none did, it is the ratio of two times,
    and `undecided` says so, as it does where "no difference" lies within the interval; of the
    config that was chosen all the same, that is `likely`.

    >>> against_heuristic(Gain(1.25, 1.2, 1.3), 1.25, chosen=False)
    ('1.25×', '1.20× to 1.30×')
    >>> against_heuristic(Gain(1.02, 0.97, 1.08), 1.02, chosen=False)
    ('1.02×', '0.97× to 1.08×, undecided')
    >>> against_heuristic(None, 1.5, chosen=False), against_heuristic(None, None, chosen=False)
    (('1.50×', 'undecided'), ('–', ''))
    """
    if gain is None or gain.high <= 0:
        return ("–", "") if ratio is None else (times(ratio), "" if chosen else "undecided")
    if gain.low == gain.high:  # the heuristic config itself
        return times(gain.times), ""
    doubt = "" if gain.is_real else ", likely" if chosen else ", undecided"
    return times(gain.times), interval(gain) + doubt
