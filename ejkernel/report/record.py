"""What a tuning run left behind, as plain values: what a report is made of.

Nothing here needs JAX: a run that was saved on a cluster can be read and shown anywhere.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..formatting import is_time
from ..speedup import Gain as Gain
from ..speedup import PlainJax, against_heuristic
from .plain import NotARun, as_text, from_text

if TYPE_CHECKING:
    from ..ops import AutotuningResult, PersistentCache

SCHEMA = 1


class _Timed:
    """A record whose times are checked when it is made."""

    def __post_init__(self) -> None:
        names = ("seconds", "heuristic_seconds", "took", "samples", "before", "after")
        for name in (*names, "step_seconds"):
            value = getattr(self, name, None)
            for seconds in value if isinstance(value, Sequence) else (value,):
                # A number that JSON lacks is none, and is written as that.
                if seconds is not None and math.isfinite(seconds) and not is_time(seconds):
                    kind = type(self).__name__
                    raise ValueError(f"{kind}: {name} has {seconds!r}, which is no time in seconds")


@dataclasses.dataclass(frozen=True)
class CountedWork:
    """What one call has to do, as its kernel counts it (see `ejkernel.ops.Work`).

    Attributes:
      flops: floating-point operations.
      bytes: read from memory and written to it.
      dtype: that of the numbers.
    """

    flops: float | None = None
    bytes: float | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        for value in (self.flops, self.bytes):
            if value is not None and math.isfinite(value) and not 0 <= value <= 1e30:
                raise ValueError(f"CountedWork: {value!r} is no count of operations or bytes")


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The most that a machine can do, as plain large programs measured it there.

    Attributes:
      device: the device's fingerprint.
      flops: operations per second of large matrix products, by dtype.
      bytes: bytes per second that go from memory and to it.
      when: the moment it was measured, UTC.
    """

    device: str
    flops: dict[str, float]
    bytes: float
    when: str = ""

    def __post_init__(self) -> None:
        for value in (self.bytes, *self.flops.values()):
            if not 1.0 <= value <= 1e30:
                raise ValueError(f"Roofline: {value!r} is nothing that a machine does per second")

    def peak(self, dtype: str) -> float | None:
        """Operations per second with numbers of a dtype.

        Short ones may be computed as float32, where that is faster.
        """
        known = [self.flops.get(dtype)]
        if dtype in ("bfloat16", "float16"):
            known.append(self.flops.get("float32"))
        return max((value for value in known if value is not None), default=None)

    def least_seconds(self, work: CountedWork) -> tuple[float, str] | None:
        """The least time that work can take here, and what limits it: `compute` or `memory`.

        >>> machine = Roofline("cpu", {"float32": 1e11}, 1e10)
        >>> machine.least_seconds(CountedWork(flops=2e9, bytes=1e6, dtype="float32"))
        (0.02, 'compute')
        """
        limits = []
        peak = self.peak(work.dtype)
        if work.flops is not None and peak is not None:
            limits.append((work.flops / peak, "compute"))
        if work.bytes is not None:
            limits.append((work.bytes / self.bytes, "memory"))
        if work.flops is not None and peak is None:
            return None  # memory alone says too little about what computes
        return max(limits, default=None)


@dataclasses.dataclass(frozen=True)
class Candidate(_Timed):
    """One config that was considered.

    Attributes:
      config: the config as plain data.
      verdict: `measured`, `wrong`, `failed`, …: the values of `Verdict`.
      seconds: its time per call.
      samples: the samples behind that, in the order in which they were taken.
      reason: why it has no time, or a remark.
      order: its place among those that were tried; None if it was not, or nobody knows.
      speedup: how many times faster it is than the heuristic config, by the rounds that decided
        about it; None if they did not run interleaved.
    """

    config: Any
    verdict: str
    seconds: float | None = None
    samples: tuple[float, ...] = ()
    reason: str = ""
    order: int | None = None
    speedup: Gain | None = None


@dataclasses.dataclass(frozen=True)
class Operation(_Timed):
    """One tuned call of one operation.

    Attributes:
      op_id: the operation with its version.
      call_key: the call's key.
      signature: the call, readable.
      config: the winner, as plain data.
      heuristic: the config without tuning; None if nobody knows it any more.
      seconds: the winner's time per call.
      heuristic_seconds: that of the heuristic config.
      gain: how many times faster the winner is than the heuristic config.
      lead: how many times faster it is than the best other candidate.
      measured: what was timed, `forward` or `forward and backward`.
      clock: whose time that is, the `device`'s or the `wall` clock's.
      sure: the race ended because the winner was sure; None if that is not known.
      incomplete: why the run was interrupted, or nothing.
      took: seconds that tuning it took.
      origin: where the config comes from, in words.
      when: the moment it was stored.
      where: the host it was measured on.
      versions: those of everything between the kernel and the running program.
      notes: remarks of the tuner.
      candidates: everything that was considered.
      calls: how often one run of the whole function calls it; None if that is not known.
      share: its part of the whole function's time: the winner's time × calls / the time of a run.
      work: what one call has to do, if its kernel counts it.
      plain: the same call in plain JAX; None if that was not timed.
    """

    op_id: str
    call_key: str
    signature: str
    config: Any
    heuristic: Any = None
    seconds: float | None = None
    heuristic_seconds: float | None = None
    gain: Gain | None = None
    lead: Gain | None = None
    measured: str = ""
    clock: str = ""
    sure: bool | None = None
    incomplete: str = ""
    took: float | None = None
    origin: str = ""
    when: str = ""
    where: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    plain: PlainJax | None = None
    calls: int | None = None
    share: float | None = None

    @property
    def most_gain(self) -> float | None:
        """The speedup of the whole function if this operation took no time: no tuning gives more.

        None if its share is not known, or is everything.
        """
        return None if self.share is None or self.share >= 1 else 1 / (1 - self.share)

    work: CountedWork | None = None

    @property
    def name(self) -> str:
        """The operation without its version."""
        return self.op_id.partition("@v")[0]

    @property
    def earlier(self) -> bool:
        """True if it was tuned in an earlier run and comes from a store."""
        return bool(self.when)

    @property
    def heuristic_stays(self) -> bool:
        """True if the heuristic config won: nothing beat it by more than the noise."""
        return self.heuristic is not None and self.heuristic == self.config

    def of(self, config: Any) -> Candidate | None:
        """The candidate of a config."""
        return next((c for c in self.candidates if c.config == config), None)

    def against_heuristic(self, candidate: Candidate) -> tuple[str, str]:
        """A candidate's speedup over the heuristic config, and its interval, as text."""
        chosen, base = candidate.config == self.config, self.heuristic_seconds
        if candidate.config == self.heuristic:
            return against_heuristic(Gain(1.0, 1.0, 1.0), None, chosen)
        ratio = base / candidate.seconds if base and candidate.seconds else None
        return against_heuristic(candidate.speedup, ratio, chosen)

    def with_verdict(self, *verdicts: str) -> tuple[Candidate, ...]:
        """The candidates with one of these verdicts, the fastest first."""
        found = [c for c in self.candidates if c.verdict in verdicts]
        return tuple(sorted(found, key=lambda c: float("inf") if c.seconds is None else c.seconds))


@dataclasses.dataclass(frozen=True)
class NotTuned:
    """An operation that could not be tuned, and why."""

    label: str
    reason: str


@dataclasses.dataclass(frozen=True)
class BeforeAfter(_Timed):
    """The whole function with other configs, or in plain JAX, and with the tuned ones, interleaved.

    Attributes:
      what: what was run.
      before: seconds of each run with the others.
      after: seconds of each run with the tuned ones, run `i` right next to run `i` before.
      gain: how many times faster it became.
      difference: the largest difference between the outputs, relative to their size.
      notes: remarks.
      baseline: what it ran with before.
    """

    what: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    gain: Gain
    difference: float | None = None
    notes: tuple[str, ...] = ()
    baseline: str = "default configs"

    def __post_init__(self) -> None:
        if not self.before or not self.after:
            raise ValueError("BeforeAfter: before and after need a run each")
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Run(_Timed):
    """A tuning run: what was tuned, how fast it became, how sure that is, and where it was done.

    Attributes:
      title: what was tuned, for the head of the report.
      device: the device's fingerprint.
      created: when this record was made, UTC.
      seconds: how long the tuning took.
      operations: what was tuned.
      not_tuned: what could not be tuned.
      model: the whole function before and after, if it was run.
      store: where the configs are stored.
      command: what was typed.
      environment: versions, host and so on, in the order in which they are shown.
      notes: remarks.
      plain: the whole function in plain JAX and with the tuned configs, if both were run.
      step_seconds: the time of one run of the whole function with the tuned configs.
      rejected: the whole function was slower with the tuned configs: they were not put in force,
        and the store was left as it was.
      roofline: the most that the device can do, if any operation counts its work.
    """

    title: str
    device: str
    created: str
    seconds: float | None = None
    operations: tuple[Operation, ...] = ()
    not_tuned: tuple[NotTuned, ...] = ()
    model: BeforeAfter | None = None
    store: str = ""
    command: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    plain: BeforeAfter | None = None
    step_seconds: float | None = None
    rejected: bool = False
    roofline: Roofline | None = None

    @classmethod
    def of(
        cls,
        result: AutotuningResult,
        *,
        title: str = "",
        seconds: float | None = None,
        store: PersistentCache | str | os.PathLike[str] | None = None,
        model: BeforeAfter | None = None,
        command: str = "",
        environment: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
    ) -> Run:
        """The record of what `autotune`, `autotune_recorded` or `autotune_lowered` gave.

        Operations that were tuned in an earlier run have their candidates in the store: give
        `store=`, and they are in the record too. `environment` is shown with the usual facts.
        """
        from .collect import fields_of_result

        fields = fields_of_result(result, store, title, environment or {})
        return cls(**fields, seconds=seconds, model=model, command=command, notes=notes)

    @classmethod
    def of_store(
        cls,
        store: PersistentCache | str | os.PathLike[str],
        *,
        device: str | None = None,
        title: str = "",
        limit: int = 200,
    ) -> Run:
        """The record of all that a store holds for a device (default: this one)."""
        from .collect import fields_of_store

        return cls(**fields_of_store(store, device, title, limit))

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write it as a JSON file, whole or not at all; `load` reads it."""
        from ..store.private import write_whole

        file = pathlib.Path(path)
        write_whole(file, self.dumps())
        return file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """Read what `save` wrote. A file that is something else is a `NotARun` error."""
        from ..store.reading import read_regular

        try:
            data = read_regular(path)
        except OSError as error:
            raise NotARun(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise NotARun(f"{path} is not the record of a tuning run: {error}") from error
        return cls.loads(data, os.fspath(path))

    def _repr_html_(self) -> str:
        """The whole report in a notebook's cell, apart from the notebook's own page."""
        from ..markup import tag
        from .html import page

        return tag(
            "iframe",
            srcdoc=page(self),
            sandbox="allow-scripts",
            title=f"Tuning report: {self.title}",
            style="width:100%;height:800px;border:0",
        )

    def _repr_markdown_(self) -> str:
        from .markdown import page

        return page(self)

    def dumps(self) -> str:
        """The record as JSON text."""
        return as_text(self, SCHEMA)

    @classmethod
    def loads(cls, text: str | bytes, where: str = "the text") -> Run:
        """Read what `dumps` gave; `where` is what errors call it."""
        return from_text(cls, text, SCHEMA, where)
