"""What a tuning run leaves behind: its record, and the answer of the command."""

from __future__ import annotations

import contextlib
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Any

from ..formatting import counted
from ..markup import one_line
from ..report import summary
from .exits import os_reason
from .output import State, fields_of, note, table

if TYPE_CHECKING:
    from ..ops import PersistentCache
    from ..report import Run


def typed_command() -> str:
    """The command of this process, as a record shows it."""
    return shlex.join(["ejkernel", *_without_password(sys.argv[1:])])


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


def save_record(run: Run, given: str | None) -> pathlib.Path | None:
    """Write the record of a run: to the file that was given, else to a new one in `runs_folder`.

    The run is over and its configs are stored: without such a folder, a note says why, and None.
    """
    if given is not None:
        return run.save(given)
    from ..report.runs import save_run

    try:
        return save_run(run)
    except OSError as error:
        note(f"the record of the run is not stored: {os_reason(error)} (--record FILE)")
        return None


def answer(
    state: State,
    run: Run,
    store: PersistentCache,
    file: pathlib.Path | None,
    page: str | None,
    total: int,
    interrupted: bool,
) -> None:
    """Say what came of a run of `total` operations."""
    header, rows, right, details = summary.table(run)
    shown: list[Any] = [table(header, rows, right=right, details=details)]
    stored = f"{len(run.operations)} of {counted(total, 'operation')} stored in {store.path}"
    if interrupted:
        shown.append(f"interrupted: {stored}; the same command goes on where it stopped")
    elif not run.rejected:
        shown.append(stored)
    if any(operation.incomplete for operation in run.operations) and not interrupted:
        shown.append("interrupted by a limit; the same command goes on where it stopped")
    written = [f"{what}: {path}" for what, path in (("record", file), ("report", page)) if path]
    shown.append(", ".join(written) or None)
    if page is None and file is not None:
        shown.append("see it with `ejkernel report`")
    shown += map(one_line, summary.sentences(run))
    data = {
        "store": store.path,
        "record": file,
        "report": page,
        "interrupted": interrupted,
        "device": run.device,
        "seconds": run.seconds,
        "operations": fields_of(
            run.operations,
            "op_id",
            "call_key",
            "signature",
            "config",
            "seconds",
            "heuristic_seconds",
            "gain",
            "plain",
            "incomplete",
            "origin",
            "calls",
            "share",
            "most_gain",
        ),
        "not_tuned": fields_of(run.not_tuned, "label", "reason"),
        "model": run.model,
        "plain": run.plain,
        "step_seconds": run.step_seconds,
        "rejected": run.rejected,
        "notes": run.notes,
        "verdict": summary.verdict(run),
    }
    state.result(data, *shown)
