"""What a tuning run leaves behind: its record, and what is said about it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import pathlib
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

from ..markup import one_line
from .output import State, brief, counted, milliseconds, note, plain, ratio, table

if TYPE_CHECKING:
    from ..ops import AutotuningResult, PersistentCache
    from ..report import BeforeAfter, Run
    from .progress import Watch


def record_of(
    result: AutotuningResult,
    title: str,
    took: float,
    store: PersistentCache,
    model: BeforeAfter | None,
    notes: tuple[str, ...],
) -> Run:
    """What `ejkernel report` makes a page of."""
    from ..report import Run

    command = shlex.join(["ejkernel", *_without_password(sys.argv[1:])])
    return Run.of(
        result, title=title, seconds=took, store=store, model=model, command=command, notes=notes
    )


def _without_password(arguments: list[str]) -> list[str]:
    """What was typed, with URLs as the store shows them: a record is passed on."""
    from ..store import locate

    shown = []
    for argument in arguments:
        option, equals, value = argument.rpartition("=") if argument[:2] == "--" else ("", "", "")
        url = value if equals and "://" in value else argument
        if "://" in url:
            with contextlib.suppress(ValueError, OSError, ImportError):
                argument = f"{option}{equals}{locate(url).shown}"
        shown.append(argument)
    return shown


def runs_folder() -> pathlib.Path:
    """Where records go unless a file is named, and where `ejkernel report` finds the newest."""
    from ..ops.utils import environment

    return environment.cache_folder("runs")


def save_record(run: Run, title: str, given: str | None) -> pathlib.Path | None:
    """Write the record of a run: to the file that was given, else to a new one in `runs_folder`.

    The run is over and its configs are kept: if there is no such folder, that is said, and None.
    """
    if given is not None:
        return run.save(given)
    from ..store.private import PrivateFolder

    # Names sort by time.
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    slug = re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-")[-60:]
    name = f"{moment}-{slug}.json"
    try:
        with PrivateFolder.open(runs_folder(), create=True) as folder:
            folder.write(name, run.dumps().encode())
            return folder.path / name
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        note(f"the record of the run is not kept: {error.strerror or error}{where} (--record FILE)")
        return None


def record_names() -> list[str]:
    """The records of earlier runs in `runs_folder`, the newest last."""
    from ..store.private import PrivateFolder

    try:
        with PrivateFolder.open(runs_folder()) as folder:
            return [name for name in folder.names() if name.endswith(".json")]
    except FileNotFoundError:
        return []


def load_record(name: str) -> Run:
    """One of `record_names`; a `NotARun` error if it is none, or not this user's own."""
    from ..report import NotARun, Run
    from ..store.private import PrivateFolder

    file = runs_folder() / name
    try:
        with PrivateFolder.open(file.parent) as folder:
            data = folder.read(name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NotARun(f"{file} cannot be read: {reason}") from error
    return Run.loads(data, str(file))


def answer(
    state: State,
    result: AutotuningResult,
    run: Run,
    store: PersistentCache,
    file: pathlib.Path | None,
    page: str | None,
    watch: Watch,
    interrupted: bool,
) -> None:
    """Say what came of a run."""
    rows = [
        (
            operation.op_id,
            operation.signature or operation.call_key,
            milliseconds(operation.heuristic_seconds),
            milliseconds(operation.seconds),
            ratio(operation.seconds, operation.heuristic_seconds),
            brief(operation.config),
            "interrupted" if operation.incomplete else "",
        )
        for operation in run.operations
    ]
    header = ("operation", "call", "heuristic", "tuned", "speedup", "config", "")
    shown: list[Any] = [table(header, rows, right=(2, 3, 4))] if rows else []
    shown += [f"not tuned: {skip.label}: {one_line(skip.reason)}" for skip in result.skipped]
    if run.model is not None:
        gain, rounds = run.model.gain, len(run.model.before)
        faster = f"{gain.times:.2f}x as fast" if gain.is_real else "about as fast"
        shown.append(
            f"{run.model.what}: {faster} as with heuristic configs "
            f"(between {gain.low:.2f}x and {gain.high:.2f}x, {counted(rounds, 'round')})"
        )
    kept = f"{len(run.operations)} of {counted(watch.total, 'operation')} stored in {store.path}"
    if interrupted:
        shown.append(f"interrupted: {kept}; the same command goes on where it stopped")
    else:
        shown.append(kept)
    if any(operation.incomplete for operation in run.operations) and not interrupted:
        shown.append("interrupted by a limit; the same command goes on where it stopped")
    written = (("record", file), ("report", page))
    if file is not None or page is not None:
        shown.append(", ".join(f"{what}: {path}" for what, path in written if path))
    if page is None and file is not None:
        shown.append("see it with `ejkernel report`")
    data = {
        "store": str(store.path),
        "record": None if file is None else str(file),
        "report": page,
        "interrupted": interrupted,
        "device": run.device,
        "seconds": run.seconds,
        "operations": [
            {
                "op_id": operation.op_id,
                "call_key": operation.call_key,
                "signature": operation.signature,
                "config": operation.config,
                "seconds": operation.seconds,
                "heuristic_seconds": operation.heuristic_seconds,
                "incomplete": operation.incomplete,
                "origin": operation.origin,
            }
            for operation in run.operations
        ],
        "not_tuned": [{"label": skip.label, "reason": skip.reason} for skip in result.skipped],
        "model": None if run.model is None else dataclasses.asdict(run.model),
    }
    state.result(plain(data), *shown)
