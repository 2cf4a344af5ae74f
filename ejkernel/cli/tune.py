"""`ejkernel tune`: tune every operation of a function, or of a program of another run."""

from __future__ import annotations

import dataclasses
import re
import socket
import time
from typing import TYPE_CHECKING, Any

import click

from . import options
from .exits import Exit, Failure, in_one_line
from .loading import HOW, Subject, import_modules, load, theirs
from .output import State, note
from .programs import Found, invocations_of, operations_of, read_program, stored_result
from .progress import Watch
from .records import answer, record_of, save_record
from .stores import open_place, open_store

if TYPE_CHECKING:
    from ..ops import AutotuningResult, ConfigSelectorChain, PersistentCache
    from ..report import BeforeAfter


@dataclasses.dataclass(frozen=True)
class Ray:
    """Where to tune, if not in this process."""

    address: str | None
    workers: int | None


@click.command(
    help=f"""Tune every operation of a function, and keep the result in the store.

    MODULE:FUNCTION (or FILE.py:FUNCTION) is a function of yours without arguments: {HOW}.

    What is tuned already is not measured again, and a run that was interrupted, by a limit or by
    Ctrl-C, goes on where it stopped when the same command is typed again."""
)
@click.argument("name", metavar="[MODULE:FUNCTION]", required=False)
@click.option(
    "--hlo", metavar="FILE", help="Tune the program in this file: StableHLO or HLO text of any run."
)
@options.store
@click.option(
    "--effort",
    type=click.Choice(["quick", "standard", "full"]),
    default="standard",
    show_default=True,
    help="How long finalists run, how much of a large space is searched.",
)
@click.option("--seconds", type=float, metavar="N", help="Stop after about this time.")
@click.option("--evaluations", type=int, metavar="N", help="Most candidates per operation.")
@click.option(
    "--strategy",
    type=click.Choice(["auto", "exhaustive", "random", "model"]),
    default="auto",
    show_default=True,
    help="How a large space is searched.",
)
@click.option(
    "--isolation",
    type=click.Choice(["none", "process"]),
    default="none",
    show_default=True,
    help="'process': candidates run where they may crash or hang.",
)
@click.option(
    "--backward", is_flag=True, help="Time every call forward and backward, as in training."
)
@click.option("--ray", is_flag=True, help="Spread the operations over a Ray cluster.")
@click.option("--ray-address", metavar="ADDRESS", help="Of the cluster.  [default: a new one here]")
@click.option("--workers", type=int, metavar="N", help="Most Ray tasks at the same time.")
@options.imports
@click.option(
    "--bench/--no-bench",
    default=True,
    help="Run the whole function before and after.  [default: on]",
)
@click.option("--record", metavar="FILE", help="Where the record of the run is written.")
@click.option("--report", "page", metavar="FILE", help="Write a report too: .html, .md or .json.")
@click.option("--progress/--no-progress", default=None, help="A bar.  [default: in a terminal]")
@options.common
@options.with_state
def tune(
    state: State,
    name: str | None,
    hlo: str | None,
    source: str | None,
    effort: str,
    seconds: float | None,
    evaluations: int | None,
    strategy: str,
    isolation: str,
    backward: bool,
    ray: bool,
    ray_address: str | None,
    workers: int | None,
    modules: tuple[str, ...],
    bench: bool,
    record: str | None,
    page: str | None,
    progress: bool | None,
) -> int:
    """Tune, keep, compare, record, answer."""
    if (name is None) == (hlo is None):
        raise click.UsageError("give either MODULE:FUNCTION or --hlo FILE")
    for option, value in (
        ("seconds", seconds),
        ("evaluations", evaluations),
        ("workers", workers),
    ):
        if value is not None and not value > 0:
            raise click.UsageError(f"--{option} {value} must be more than 0")
    text = None if hlo is None else read_program(hlo)
    opened = open_place(source, must_exist=False)  # what cannot be read is said before all else
    import_modules(modules)
    subject = None if name is None else load(name)
    program = text if subject is None else subject.lower()
    title = name or str(hlo)
    found = operations_of(program, title)
    store = open_store(source, opened)

    from ..ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Tuner

    keys = {inv.key for inv in invocations_of(found)}
    watch = Watch(len(keys))
    if seconds is not None:  # of the whole run; the tuner's are those of one operation
        seconds /= max(1, len([key for key in keys if not _is_finished(store, key)]))
    tuner = Tuner(
        effort=effort,
        seconds=seconds,
        evaluations=evaluations,
        strategy=strategy,
        isolation=isolation,  # type: ignore[arg-type]
        progress=progress,
    )
    policy = AutotunePolicy(validate_backward=backward, strict=False)
    selector = ConfigSelectorChain(ConfigCache(), policy, tuner, store, on_event=watch.on_event)
    cluster = Ray(ray_address, workers) if ray or ray_address else None
    model, trouble, interrupted = None, "", False
    start = time.perf_counter()
    try:
        result = _tuned(selector, found, program, cluster, progress)
        took = time.perf_counter() - start
        if bench and subject is not None and result.entries:
            model, trouble = _before_and_after(subject, result)
    except KeyboardInterrupt:  # what was learned is in the store already
        interrupted, took = True, time.perf_counter() - start
        result = stored_result(selector, invocations_of(found))
    notes = tuple(filter(None, ("interrupted by Ctrl-C" if interrupted else "", trouble)))
    run = record_of(result, title, took, store, model, notes)
    file = save_record(run, title, record)
    if page is not None:
        from ..report import write as write_report

        write_report(run, page)
    missing = _not_kept(store, result)
    answer(state, result, run, store, file, page, watch, interrupted)
    if interrupted:
        return Exit.INTERRUPTED
    if missing:
        note(
            f"ejkernel: tuned, but not kept: {store.path} does not hold {', '.join(missing)}; see "
            f"the warnings above{f'. The record {file} has the configs' if file else ''}"
        )
        return Exit.STORE
    return Exit.NOT_WELL if result.skipped else Exit.OK


def _tuned(
    selector: ConfigSelectorChain,
    found: list[Found],
    program: Any,
    cluster: Ray | None,
    progress: bool | None,
) -> AutotuningResult:
    from ..ops import device_fingerprint
    from ..ops.execution.tuning import tune_invocations

    if cluster is None:
        calls = [call for pair in found for call in pair if call is not None]
        return tune_invocations(selector, device_fingerprint(), calls)
    from ..fleet import tune_on_cluster

    _check_address(cluster.address)
    try:
        return tune_on_cluster(
            selector,
            program,
            address=cluster.address,
            workers=cluster.workers,
            progress=progress,
        )
    except ImportError as error:
        raise Failure(str(error), Exit.MISSING) from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise Failure(f"--ray: {in_one_line(error)}") from error


def _check_address(address: str | None) -> None:
    """Refuse a cluster that does not answer: Ray itself would try for many minutes."""
    match = re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address or "")
    if match is None:
        return  # `auto`, or nothing: Ray looks for it
    try:
        socket.create_connection((match[1], int(match[2])), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise Failure(f"--ray-address {address}: no cluster answers there: {error}") from error


def _before_and_after(subject: Subject, result: AutotuningResult) -> tuple[BeforeAfter | None, str]:
    """The whole function with both sets of configs; or why it could not be run."""
    from ..report import before_and_after

    try:
        with theirs(f"{subject.name}: running it"):
            function, arguments, keywords = subject.runnable()
            return (
                before_and_after(
                    function, arguments, keywords, result=result, seconds=20.0, what=subject.name
                ),
                "",
            )
    except Failure as error:  # the configs are tuned and kept all the same
        note(f"not compared before and after: {error}")
        return None, f"not compared before and after: {error}"


def _is_finished(store: PersistentCache, key: Any) -> bool:
    entry = store.entry(key)
    return entry is not None and not entry["about"].get("incomplete")


def _not_kept(store: PersistentCache, result: AutotuningResult) -> list[str]:
    """Operations whose config is not in the store, nor in a bundle that it need not be."""
    return [
        key.op_id
        for key, entry in zip(result.as_mapping(), result.entries, strict=True)
        if entry.outcome is not None and store.entry(key) is None
    ]
