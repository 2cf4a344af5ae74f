"""Two runs side by side: what became faster, which configs changed, what else was different."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Sequence

from ..formatting import counted, duration, shortened, times
from .formatting import Finding, Headline, interval, peaks
from .record import Gain, Operation, Run

CERTAINTY = 2.326  # standard deviations: 98 %, as in the reports of one run
MOST_SAMPLES = 300  # of either side; every one of one is compared with every one of the other

APART = (
    "The two runs were not interleaved: the confidence intervals hold the noise within each run, "
    "and not what changed about the machine between them."
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One operation as run A and run B have it; None where a run does not.

    Attributes:
      a: the operation in run A.
      b: the operation in run B.
      gain: the speedup of B over A; None if that cannot be told.
    """

    a: Operation | None
    b: Operation | None
    gain: Gain | None = None

    @property
    def shown(self) -> Operation:
        """The operation of either run: the newer one, if both have it."""
        found = self.b or self.a
        assert found is not None
        return found

    @property
    def call(self) -> str:
        """The call, and the versions of the operation where they differ."""
        words = shortened(self.shown.signature)
        if self.a is None or self.b is None or self.a.op_id == self.b.op_id:
            return words
        return f"{words}; {self.a.op_id} → {self.b.op_id}"

    @property
    def in_both(self) -> bool:
        """True if both runs have it."""
        return self.a is not None and self.b is not None

    @property
    def config_changed(self) -> bool:
        """True if both runs have it, with different configs."""
        return self.a is not None and self.b is not None and self.a.config != self.b.config

    @property
    def finding(self) -> Finding:
        """What the difference is, in a word and a sentence."""
        if not self.in_both:
            return Finding("unknown", f"only in {'A' if self.b is None else 'B'}", "")
        return _finding(self.gain)


@dataclasses.dataclass(frozen=True)
class Diff:
    """Run B compared with run A: times as speedups of B over A, above 1 is better.

    ::

        diff = Diff.of(Run.load("monday.json"), Run.load("friday.json"))
        write(diff, "diff.html")

    Attributes:
      a: the run that is compared with.
      b: the run that is compared.
      pairs: the operations of both, in the order of B, then those of A alone.
      model: the speedup of the whole function with tuned configs, if both runs have run it.
    """

    a: Run
    b: Run
    pairs: tuple[Pair, ...]
    model: Gain | None = None

    @classmethod
    def of(cls, a: Run, b: Run) -> Diff:
        """Compare two runs."""
        model = None
        if a.model is not None and b.model is not None:
            before, after = a.model.after, b.model.after
            model = _gain(before, after, statistics.median(before), statistics.median(after))
        return cls(a, b, tuple(_pairs(a.operations, b.operations)), model)

    @property
    def title(self) -> str:
        """What is compared."""
        return self.b.title if self.a.title == self.b.title else f"{self.a.title} → {self.b.title}"

    def facts(self) -> list[tuple[str, str, str]]:
        """Machines, versions, commits and so on: a name, the value in A, the value in B."""
        sides = [
            {
                "title": run.title,
                "created": run.created,
                "device": run.device,
                **run.environment,
                "command": run.command,
                "store": run.store,
                "peak of the machine": "" if run.roofline is None else peaks(run.roofline),
            }
            for run in (self.a, self.b)
        ]
        names = dict.fromkeys(name for side in sides for name in side)
        rows = [(name, sides[0].get(name, ""), sides[1].get(name, "")) for name in names]
        return [row for row in rows if row[1] or row[2]]

    def remarks(self) -> list[str]:
        """What a reader has to know before believing the figures."""
        remarks = [APART]
        if self.a.device != self.b.device:
            remarks.insert(
                0,
                f"The runs are of two machines, {self.a.device} and {self.b.device}: what is "
                "compared is the machines as well as the configs.",
            )
        versions = [
            f"{name} {_short(a)} → {_short(b)}"
            for name, a, b in self.facts()
            if name in ("ejkernel", "jax", "jaxlib", "backend", "commit") and a != b
        ]
        if versions:
            remarks.append(f"Between the runs changed: {', '.join(versions)}.")
        return remarks

    def headline(self) -> Headline:
        """The one thing to know: of the whole function, if both ran it, else of all operations."""
        if self.model is not None:
            assert self.a.model is not None
            assert self.b.model is not None
            old, new = (statistics.median(run.after) for run in (self.a.model, self.b.model))
            return self._said(self.model, self.b.model.what, "One run", old, new)
        both = [
            (pair.a.seconds, pair.b.seconds)
            for pair in self.pairs
            if pair.a is not None and pair.b is not None and pair.a.seconds and pair.b.seconds
        ]
        if not both:
            nothing = Finding("unknown", "not known", "No operation has a time in both runs.")
            return Headline("–", "Nothing can be compared", "No times in both runs.", nothing)
        old, new = (sum(pair[i] or 0.0 for pair in both) for i in (0, 1))
        gain = Gain(old / new, 0.0, 0.0)
        what = f"the {counted(len(both), 'operation')} that both runs have"
        return self._said(gain, what, "One call of each", old, new, plural=len(both) > 1)

    @staticmethod
    def _said(
        gain: Gain, what: str, one: str, old: float, new: float, plural: bool = False
    ) -> Headline:
        known = gain.high > 0
        finding = (
            _finding(gain)
            if known
            else Finding("unknown", "see each one", "Each operation has its confidence interval.")
        )
        same = (known and not gain.is_real) or abs(gain.times - 1) < 0.005
        change = (
            "as fast in B as in A, as far as can be measured"
            if same
            else f"{times(gain.times)} as fast in B as in A"
            if gain.times > 1
            else "slower in B than in A"
        )
        title = f"{what[:1].upper()}{what[1:]} {'are' if plural else 'is'} {change}"
        figure = "≈ 1×" if known and not gain.is_real else times(gain.times)
        return Headline(
            figure, title, f"{one} takes {duration(old)} in A and {duration(new)} in B.", finding
        )


def _short(version: str) -> str:
    """A version, or a commit by its first digits."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", version) or "unknown"


def _pairs(a: Sequence[Operation], b: Sequence[Operation]) -> Iterable[Pair]:
    """Operations of both: by their key, else by name and call; another device has other keys."""
    left = list(a)

    def taken(wanted: Operation) -> Operation | None:
        for same in (_key, _call):
            for operation in left:
                if same(operation) == same(wanted):
                    left.remove(operation)
                    return operation
        return None

    # Those with the very same key first: another call of the same shapes must not take them.
    exact = {_key(operation) for operation in a} & {_key(operation) for operation in b}
    order = sorted(range(len(b)), key=lambda i: _key(b[i]) not in exact)
    found = {i: taken(b[i]) for i in order}
    for i, operation in enumerate(b):
        yield Pair(found[i], operation, _gain_of(found[i], operation))
    for operation in left:
        yield Pair(operation, None)


def _key(operation: Operation) -> tuple[str, str]:
    return operation.op_id, operation.call_key


def _call(operation: Operation) -> tuple[str, str]:
    return operation.name, operation.signature or operation.call_key


def _gain_of(a: Operation | None, b: Operation) -> Gain | None:
    if a is None or not a.seconds or not b.seconds:
        return None
    chosen = [operation.of(operation.config) for operation in (a, b)]
    samples = [() if candidate is None else candidate.samples for candidate in chosen]
    return _gain(samples[0], samples[1], a.seconds, b.seconds)


def _gain(a: Sequence[float], b: Sequence[float], old: float, new: float) -> Gain | None:
    """The speedup of one time over another, by samples that were not taken together.

    The confidence interval is that of the rank-sum test: between ordered ratios of each sample of
    one with each of the other. Without enough samples it is empty, 0 to 0.
    """
    if not old or not new:
        return None
    olds, news = ([sample for sample in side[:MOST_SAMPLES] if sample > 0] for side in (a, b))
    if min(len(olds), len(news)) < 3:
        return Gain(old / new, 0.0, 0.0)
    ratios = sorted(x / y for x in olds for y in news)
    count, spread = len(ratios), math.sqrt(len(olds) * len(news) * (len(olds) + len(news) + 1) / 12)
    left_out = max(0, math.floor(count / 2 - CERTAINTY * spread) - 1)
    low, high = ratios[left_out], ratios[-1 - left_out]
    return Gain(old / new, min(low, old / new), max(high, old / new))


def _finding(gain: Gain | None) -> Finding:
    if gain is None or gain.high <= 0:
        return Finding("unknown", "not known", "There are too few samples to know the noise.")
    if not gain.is_real:
        return Finding(
            "open",
            "no difference",
            f"The speedup lies between {interval(gain, 'and')}: within the noise.",
        )
    words = f"The speedup lies between {interval(gain, 'and')}."
    return Finding("sure", "faster", words) if gain.low > 1 else Finding("open", "slower", words)
