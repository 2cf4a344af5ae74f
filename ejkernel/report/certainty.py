"""The part of the page that says how sure it is, and why."""

from __future__ import annotations

from ..markup import Markup, joined, tag
from .formatting import Finding, headline, how_sure, interval, times
from .plots import axis_line, gain_axis, gain_row, gain_ticks
from .record import Gain, Operation, Run
from .widgets import card, chip, notes


def certainty(run: Run) -> Markup:
    """The part as a whole."""
    shown: list[tuple[str, Gain | None, Finding]] = []
    if run.model is not None and run.model.gain.high > 0:
        shown.append((run.model.what, run.model.gain, headline(run).finding))
    shown += [(o.name, o.gain, how_sure(o)) for o in run.operations]
    axis = gain_axis([gain for _, gain, _ in shown if gain is not None])
    rows = [
        gain_row(name, gain, axis, chip(finding), _gain_tip(name, gain, finding), i == 0)
        for i, (name, gain, finding) in enumerate(shown)
    ]
    marks = [(tick, "as before" if tick == 1 else times(tick)) for tick in gain_ticks(axis)]
    plot = tag(
        "div",
        axis_line(axis, marks, "times faster"),
        tag(
            "ul",
            *rows,
            class_="rows",
            aria_label="How many times faster, with confidence intervals",
        ),
        class_="plot wide",
    )
    sentences = tag(
        "dl",
        *(
            joined([tag("dt", o.name, " ", chip(how_sure(o))), tag("dd", _why_sure(o))])
            for o in run.operations
        ),
    )
    return joined(
        [
            card("The speedup, and its confidence interval", plot),
            card("Is the chosen config the best one?", sentences),
            card("How it was measured", notes(_method(run))),
        ]
    )


def _gain_tip(name: str, gain: Gain | None, finding: Finding) -> str:
    if gain is None:
        return f"{name}: {finding.sentence}"
    if gain.high <= gain.low:
        return f"{name}: the heuristic config was chosen\n{finding.sentence}"
    return f"{name}: {times(gain.times)}, between {interval(gain, 'and')}\n{finding.sentence}"


def _why_sure(operation: Operation) -> str:
    words = how_sure(operation).sentence
    lead = operation.lead
    if lead is not None and lead.times >= 1:
        words += f" The best other candidate takes {times(lead.times)} its time ({interval(lead)})."
    if operation.measured:
        clock = "the device’s own" if operation.clock == "device" else "wall"
        words += f" Timed: {operation.measured}, {clock} clock."
    if operation.notes:
        words += f" {'; '.join(operation.notes)}."
    return words


def _method(run: Run) -> list[str]:
    method = [
        "Every config was compiled, run, and its output compared with the reference before its "
        "time counted; one that is wrong, fails or is non-deterministic is never chosen.",
        "The rest ran interleaved, in a changing order, so that a slow moment of the machine hits "
        "all of them alike. A time is the mean of the fastest two thirds of the samples.",
        "“Before” is the heuristic config, the one used without tuning. It ran in the same race to "
        "its end, and is replaced only by one that is faster by more than the noise.",
        "The confidence interval holds the ratio of times within rounds with 98 % certainty, "
        "whatever the noise is like; of fewer than seven rounds it is all that was seen.",
    ]
    if run.model is not None:
        method.append(
            "The whole model ran with the heuristic configs and with the tuned ones, "
            f"interleaved, {len(run.model.before)} times each, on the wall clock."
        )
    return method
