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
from .plain import NotARun, as_text, from_text

if TYPE_CHECKING:
    from ..ops import AutotuningResult, PersistentCache

SCHEMA = 1


class _Timed:
    """A record whose times are checked when it is made."""

    def __post_init__(self) -> None:
        for name in ("seconds", "heuristic_seconds", "took", "samples", "before", "after"):
            value = getattr(self, name, None)
            for seconds in value if isinstance(value, Sequence) else (value,):
                # A number that JSON lacks is none, and is written as that.
                if seconds is not None and math.isfinite(seconds) and not is_time(seconds):
                    kind = type(self).__name__
                    raise ValueError(f"{kind}: {name} has {seconds!r}, which is no time in seconds")


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


@dataclasses.dataclass(frozen=True)
class Candidate(_Timed):
    """One config that was considered.

    Attributes:
      config: the config as plain data.
      verdict: `measured`, `wrong`, `failed`, …: the values of `Verdict`.
      seconds: its time per call.
      samples: the samples behind that, in the order in which they were taken.
      reason: why it has no time, or a remark.
    """

    config: Any
    verdict: str
    seconds: float | None = None
    samples: tuple[float, ...] = ()
    reason: str = ""


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
    """The whole function with the heuristic configs and with the tuned ones, interleaved.

    Attributes:
      what: what was run.
      before: seconds of each run with the heuristic configs.
      after: seconds of each run with the tuned ones, run `i` right next to run `i` before.
      gain: how many times faster it became.
      difference: the largest difference between the outputs, relative to their size.
      notes: remarks.
    """

    what: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    gain: Gain
    difference: float | None = None
    notes: tuple[str, ...] = ()

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
