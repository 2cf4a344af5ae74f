"""What was found, as text: the same in every format of a report, and on the command line."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from ..formatting import counted, duration, three_digits, times
from ..speedup import interval as interval
from .record import BeforeAfter, CountedWork, Operation, Roofline, Run

Level = Literal["sure", "likely", "open", "unknown"]

# Earlier stores and records say "not deterministic".
REJECTED = ("wrong", "non-deterministic", "not deterministic", "failed", "unsupported")


FEW_ROUNDS = 7  # of fewer, a confidence interval is only what was seen


def rounded(seconds: float) -> str:
    """A round time, for the marks of an axis.

    >>> rounded(0.002), rounded(0.0025)
    ('2 ms', '2.5 ms')
    """
    number, _, unit = duration(seconds).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def per_second(number: float, unit: str) -> str:
    """A rate in the size that fits it.

    >>> per_second(1.234e11, "FLOP/s"), per_second(5.6e9, "B/s"), per_second(2e13, "FLOP/s")
    ('123 GFLOP/s', '5.60 GB/s', '20.0 TFLOP/s')
    """
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{three_digits(number / size)} {prefix}{unit}"
    return f"{three_digits(number / 1e3)} k{unit}"


def rate(work: CountedWork | None, seconds: float | None) -> str:
    """Operations and bytes per second, as far as they are counted; else nothing.

    >>> rate(CountedWork(flops=2e9, bytes=5e7), 0.01)
    '200 GFLOP/s, 5.00 GB/s'
    """
    if work is None or not seconds:
        return ""
    counts = ((work.flops, "FLOP/s"), (work.bytes, "B/s"))
    return ", ".join(per_second(count / seconds, unit) for count, unit in counts if count)


def share_of_peak(
    roofline: Roofline | None, work: CountedWork | None, seconds: float | None, short: bool = False
) -> str:
    """How close a time is to the least that its machine allows; nothing if that is not known.

    >>> machine = Roofline("cpu", {"float32": 1e11}, 1e10)
    >>> share_of_peak(machine, CountedWork(2e9, 1e6, "float32"), 0.04)
    '50 % of this machine’s peak, limited by compute'
    """
    least = None if roofline is None or work is None else roofline.least_seconds(work)
    if least is None or not seconds or not least[0]:
        return ""
    share = 100 * least[0] / seconds
    percent = f"{share:.0f} %" if share >= 1 else "under 1 %"
    if short:
        return f"{percent} of peak"
    words = f"{percent} of this machine’s peak, limited by {least[1]}"
    if share <= 105:
        return words
    if least[1] == "memory":
        return f"{words}; its data stays in the caches"
    return f"{words}; more than plain matrix products reach"


def peaks(roofline: Roofline) -> str:
    """The most that a machine can do, in words."""
    flops = [f"{per_second(peak, 'FLOP/s')} ({dtype})" for dtype, peak in roofline.flops.items()]
    return f"{', '.join([*flops, per_second(roofline.bytes, 'B/s')])} to and from memory"


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
    compared = run.plain or run.model
    if compared is not None:
        return _of_model(compared)
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
        f"{_percent_less(before, after)}. {_model_not_compared(run)}",
        _together([how_sure(operation) for operation in run.operations]),
    )


def _model_not_compared(run: Run) -> str:
    if run.step_seconds is None:
        return "The whole model was not run."
    return f"One run of {run.title} takes {duration(run.step_seconds)}; it was not compared."


def _of_model(model: BeforeAfter) -> Headline:
    gain, before = model.gain, statistics.median(model.before)
    after = before / gain.times if gain.times else before
    known = gain.high > 0
    of_plain = model.baseline == "plain JAX"
    title = _faster_title(gain.times, model.what, other=model.baseline if of_plain else "before")
    if not known:
        finding = Finding(
            "unknown", "one run only", "It was run once, so nothing is known of the noise."
        )
    elif gain.is_real:
        few = len(model.before) < FEW_ROUNDS
        finding = Finding(
            "likely" if few else "sure",
            "few runs" if few else "sure",
            f"The speedup lies between {interval(gain, 'and')}, by {len(model.before)} runs of "
            "each interleaved.",
        )
    else:
        finding = Finding(
            "open",
            "no difference",
            f"The change lies between {interval(gain, 'and')}: within the noise of this machine.",
        )
        other = model.baseline if of_plain else "before"
        title = f"{_capital(model.what)} is as fast as {other}, as far as can be measured"
    return Headline(
        times(gain.times) if gain.is_real or not known else "≈ 1×",
        title,
        f"One run {'takes' if of_plain else 'took'} {duration(before)} "
        f"{'in plain JAX' if of_plain else 'before tuning'} and {'' if of_plain else 'takes '}"
        f"{duration(after)} {'tuned' if of_plain else 'now'}"
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


def _faster_title(factor: float, what: str, plural: bool = False, other: str = "before") -> str:
    same = abs(factor - 1) < 0.005
    change = (
        "as fast as" if same else "slower than" if factor < 1 else f"{times(factor)} as fast as"
    )
    return f"{_capital(what)} {'are' if plural else 'is'} {change} {other}"


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
