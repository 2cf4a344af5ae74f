"""What the dashboard shows: the records of runs, what a store holds, and the runs under way."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ops.tuner.progress_file import TuningProgress, running
from ..ops.utils.fingerprint import short_hash
from ..report import NotARun, Run
from ..report.formatting import Finding, headline
from ..report.runs import load_record, record_names, runs_folder

if TYPE_CHECKING:
    from ..ops import PersistentCache

MOST_RUNS = 100  # of the index, the newest


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A record in the runs folder, as the index shows it.

    Attributes:
      name: the record's name, without its ending.
      title: what was tuned.
      device: the device's fingerprint.
      created: when, UTC.
      operations: how many were tuned.
      speedup: as the report's headline says it.
      how_sure: how sure that is.
      error: why it cannot be shown; then there is nothing else.
    """

    name: str
    title: str = ""
    device: str = ""
    created: str = ""
    operations: int = 0
    speedup: str = ""
    how_sure: Finding | None = None
    error: str = ""

    @property
    def url(self) -> str:
        """Where its page is."""
        return f"/runs/{urllib.parse.quote(self.name, safe='')}"


@dataclasses.dataclass(frozen=True)
class StoredDevice:
    """What a store holds for one device."""

    device: str
    configs: int
    operations: tuple[str, ...]


class NothingThere(LookupError):
    """There is no such record, or no such device in the store."""


class Contents:
    """Reads what there is, each time that it is asked.

    Args:
      store: the store; None for a user who has none.
    """

    def __init__(self, store: PersistentCache | None) -> None:
        self.store = store
        self._recorded = functools.lru_cache(maxsize=4 * MOST_RUNS)(_recorded)

    # --- runs ------------------------------------------------------------------------------------

    def runs(self) -> list[RecordedRun]:
        """The records of earlier runs, the newest first."""
        newest = sorted(record_names(), reverse=True)[:MOST_RUNS]
        return [self._recorded(name, _state(name)) for name in newest]

    def run(self, name: str) -> Run:
        """One record by its name; `NothingThere`, or `NotARun` if it is damaged."""
        file = f"{name}.json"
        if file not in record_names():  # so that a name is never a path
            raise NothingThere(f"There is no record {name!r} in {runs_folder()}.")
        return load_record(file)

    # --- the store -------------------------------------------------------------------------------

    def devices(self) -> list[StoredDevice]:
        """What the store holds, device by device; the one that was tuned last comes first."""
        if self.store is None:
            return []
        self.store.check()
        operations: collections.OrderedDict[str, list[str]] = collections.OrderedDict()
        for device, op_id, _ in self.store:  # the oldest first
            operations.setdefault(device, []).append(op_id.partition("@v")[0])
            operations.move_to_end(device)
        return [
            StoredDevice(device, len(names), tuple(dict.fromkeys(sorted(names))))
            for device, names in reversed(operations.items())
        ]

    def stored(self, device: str | None) -> Run:
        """All that is stored for a device; None: for the one that was tuned last."""
        known = [found.device for found in self.devices()]
        if self.store is None or not known:
            raise NothingThere("Nothing is stored yet; `ejkernel tune` stores configs.")
        if device is not None and device not in known:
            raise NothingThere(f"The store has nothing for the device {device!r}.")
        device = known[0] if device is None else device
        run = Run.of_store(self.store, device=device)
        # The dashboard runs on the CPU whatever was tuned: its backend tells nothing.
        about = {name: value for name, value in run.environment.items() if name != "backend"}
        return dataclasses.replace(run, environment=about)

    # --- now -------------------------------------------------------------------------------------

    def running(self) -> list[TuningProgress]:
        """The tuning runs that are under way."""
        return running()

    def version(self) -> str:
        """Another text whenever `runs` or `devices` may give something else."""
        records = [(name, _state(name)) for name in record_names()]
        return short_hash([records, 0 if self.store is None else len(self.store)], 16)


def _state(name: str) -> tuple[int, int]:
    """When a record was written, and its size: the same as long as it is the same."""
    try:
        status = os.stat(runs_folder() / name, follow_symlinks=False)
    except OSError:  # removed just now
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _recorded(name: str, state: tuple[int, int]) -> RecordedRun:
    short = name.removesuffix(".json")
    try:
        run = load_record(name)
    except NotARun as error:
        return RecordedRun(short, error=str(error))
    top = headline(run)
    return RecordedRun(
        short,
        title=run.title,
        device=run.device,
        created=run.created,
        operations=len(run.operations),
        speedup=top.figure,
        how_sure=top.finding,
    )


def progress_as_plain(progress: TuningProgress) -> dict[str, Any]:
    """A run under way for JSON, with what is told of the time left."""
    return {**dataclasses.asdict(progress), "seconds_left": progress.seconds_left()}


def attempt(read: Callable[[], list[Any]]) -> tuple[list[Any], str]:
    """What can be read, or nothing and why not: one part of a page must not take the others."""
    from ..store import StoreError

    try:
        return read(), ""
    except (StoreError, OSError) as error:
        return [], str(error)
