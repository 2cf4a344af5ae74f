"""What was found, as text: the same in every format of a report, and on the command line."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from ..formatting import counted, duration, times
from .record import BeforeAfter, Gain, Operation, Run

Level = Literal["sure", "likely", "open", "unknown"]

# Earlier stores and records say "not deterministic".
REJECTED = ("wrong", "non-deterministic", "not deterministic", "failed", "unsupported")


def rounded(seconds: float) -> str:
    """A round time, for the marks of an axis.

    >>> rounded(0.002), rounded(0.0025)
    ('2 ms', '2.5 ms')
    """
    number, _, unit = duration(seconds).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def interval(gain: Gain, word: str = "to") -> str:
    """The confidence interval of a speedup: `1.20× to 1.30×`."""
    return f"{times(gain.low)} {word} {times(gain.high)}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """How sure something is: a level, a word for it, and a sentence."""

    level: Level
    word: str
    sentence: str


def how_sure(operation: Operation) -> Finding:
    """How sure it is that an operation's config is the best one."""
    gain = operation.gain
    measured = operation.with_verdict("measured")
    if operation.seconds is None and not measured:
        return Finding("unknown", "not measured", "Nothing was measured for it in this run.")
    if operation.incomplete:
        return Finding(
            "open",
            "interrupted",
            f"The run ended early ({operation.incomplete}); the best so far is used, and the next "
            "run goes on where this one stopped.",
        )
    if operation.heuristic_stays:
        words = (
            "No other config was faster by more than the noise, so the heuristic one stays."
            if len(measured) > 1
            else "The heuristic config is the only one that could be used."
        )
        return Finding("sure" if operation.sure else "likely", "heuristic stays", words)
    if operation.sure:
        return Finding(
            "sure",
            "sure",
            "The race ended because nobody left could be faster by more than the margin.",
        )
    if gain is not None and gain.is_real:
        return Finding(
            "likely",
            "likely the best",
            "It is faster than the heuristic config by more than the noise; another config may be "
            "as good.",
        )
    if gain is not None:
        return Finding(
            "open", "close", "It won, and the difference is within what the machine's noise does."
        )
    return Finding("unknown", "not known", "The samples behind it are not at hand.")


@dataclasses.dataclass(frozen=True)
class Headline:
    """What a manager reads: a figure, what it is of, and how sure it is."""

    figure: str
    title: str
    sentence: str
    finding: Finding


def headline(run: Run) -> Headline:
    """The one thing to know about a run: the whole model if it was run, else all operations."""
    if run.model is not None:
        return _of_model(run.model)
    both = [
        (operation.heuristic_seconds, operation.seconds)
        for operation in run.operations
        if operation.heuristic_seconds and operation.seconds
    ]
    before, after = sum(h for h, _ in both if h), sum(s for _, s in both if s)
    if not after:
        unknown = Finding("unknown", "not measured", "Nothing was measured in this run.")
        return Headline("–", "Nothing was measured", "There are no times to compare.", unknown)
    factor, count = before / after, counted(len(both), "tuned operation")
    return Headline(
        times(factor),
        _faster_title(factor, f"the {count}", plural=len(both) != 1),
        f"One call of each took {duration(before)} before tuning and takes {duration(after)} now"
        f"{_percent_less(before, after)}. The whole model was not run.",
        _together([how_sure(operation) for operation in run.operations]),
    )


def _of_model(model: BeforeAfter) -> Headline:
    before, after = statistics.median(model.before), statistics.median(model.after)
    gain = model.gain
    known = gain.high > 0
    title = _faster_title(gain.times, model.what)
    if not known:
        finding = Finding(
            "unknown", "one run only", "It was run once, so nothing is known of the noise."
        )
    elif gain.is_real:
        finding = Finding(
            "sure",
            "sure",
            f"The speedup lies between {interval(gain, 'and')}, by {len(model.before)} runs of "
            "each interleaved.",
        )
    else:
        finding = Finding(
            "open",
            "no difference",
            f"The change lies between {interval(gain, 'and')}: within the noise of this machine.",
        )
        title = f"{_capital(model.what)} is as fast as before, as far as can be measured"
    return Headline(
        times(gain.times) if gain.is_real or not known else "≈ 1×",
        title,
        f"One run took {duration(before)} before tuning and takes {duration(after)} now"
        f"{_percent_less(before, after) if gain.is_real else ''}.",
        finding,
    )


def time_spent(run: Run) -> tuple[float | None, bool]:
    """How long the tuning took, and whether that was all in earlier runs.

    A run that found everything in the store took no time to speak of; what it stands on did.
    """
    earlier = [operation.took for operation in run.operations if operation.earlier]
    if earlier and len(earlier) == len(run.operations):
        known = [took for took in earlier if took is not None]
        return (sum(known) if known else None), True
    return run.seconds, False


def _faster_title(factor: float, what: str, plural: bool = False) -> str:
    same = abs(factor - 1) < 0.005
    change = (
        "as fast as" if same else "slower than" if factor < 1 else f"{times(factor)} as fast as"
    )
    return f"{_capital(what)} {'are' if plural else 'is'} {change} before"


def _percent_less(before: float, after: float) -> str:
    percent = round(100 * (1 - after / before))
    return f", {abs(percent)} % {'less' if percent > 0 else 'more'} time" if percent else ""


def _together(findings: Sequence[Finding]) -> Finding:
    """The least sure of several decides."""
    order: list[Level] = ["sure", "likely", "open", "unknown"]
    worst = max(findings, key=lambda finding: order.index(finding.level))
    number = sum(finding.level == "sure" for finding in findings)
    words = f"{number} of {counted(len(findings), 'result')} {'is' if number == 1 else 'are'} sure."
    return Finding(worst.level, worst.word, words)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
