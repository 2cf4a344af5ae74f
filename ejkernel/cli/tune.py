"""`ejkernel tune`: tune every operation of a function, or of a program of another run."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..formatting import duration, times
from ..markup import one_line
from ..report import write as write_report
from . import options
from .exits import Exit, Failure, in_one_line
from .loading import HOW, import_modules, load
from .output import State, end_line, note, working
from .programs import invocations_of, operations_of, read_program
from .records import answer, save_record, typed_command
from .stores import open_place, open_store

if TYPE_CHECKING:
    from ..ops import AutotuningResult, ConfigSelectorChain


def _listener(total: int) -> Callable[..., None]:
    """What a selector calls with its events: it says which operations are finished.

    The tuner itself shows a bar for each operation.
    """
    done: set[tuple[str, str]] = set()

    def on_event(event: str, *, op_id: str, call_key: str, **data: Any) -> None:
        if event == "cache_hit":
            line = f"known already ({data.get('level')})"
        elif event == "autotune_finish":
            from ..ops.config.outcome import Verdict

            outcome = data["outcome"]
            gained = "" if outcome.speedup is None else f", speedup {times(outcome.speedup)}"
            measured = f"{outcome.count(Verdict.MEASURED)} of {len(outcome.trials)} measured"
            remarks = "; ".join(filter(None, (outcome.incomplete, *outcome.notes)))
            line = f"{duration(outcome.seconds(outcome.best))}{gained} ({measured}, "
            line += f"{duration(outcome.took)}){f'; {remarks}' if remarks else ''}"
        else:
            return
        done.add((op_id, call_key))
        note(f"[{len(done)}/{total}] {one_line(f'{op_id}: {line}')}")

    return on_event


@click.command(
    short_help="Tune every operation of a function, and store the result.",
    help=f"""Tune every operation of a function, and store the result.

    MODULE:FUNCTION (or FILE.py:FUNCTION) is a function of yours without arguments: {HOW}.

    What is tuned already is not measured again unless --force is given. A run that was interrupted,
    by a limit or by Ctrl-C, goes on where it stopped when the same command is typed again.""",
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
@click.option("--force", is_flag=True, help="Measure again what the store knows.")
@click.option(
    "--against",
    metavar="MODULE:FUNCTION",
    help="Time this too: the same function in plain JAX, named in the same way.",
)
@click.option("--record", metavar="FILE", help="Where the record of the run is written.")
@click.option("--report", "page", metavar="FILE", help="Write a report too: .html, .md or .json.")
@click.option("--progress/--no-progress", default=None, help="A bar.  [default: in a terminal]")
@options.with_state
def tune(
    state: State,
    name: str | None,
    hlo: str | None,
    source: str | None,
    seconds: float | None,
    evaluations: int | None,
    backward: bool,
    ray: bool,
    ray_address: str | None,
    workers: int | None,
    modules: tuple[str, ...],
    bench: bool,
    force: bool,
    against: str | None,
    record: str | None,
    page: str | None,
    progress: bool | None,
    **search: Any,
) -> int:
    """Tune, store, compare, record, answer."""
    if (name is None) == (hlo is None):
        raise click.UsageError("give either MODULE:FUNCTION or --hlo FILE")
    if against is not None and (hlo is not None or not bench):
        other = "--hlo" if hlo is not None else "--no-bench"
        raise click.UsageError(f"--against compares whole functions, and {other} runs none")
    limits = {"seconds": seconds, "evaluations": evaluations, "workers": workers}
    for option, value in limits.items():
        if value is not None and not value > 0:
            raise click.UsageError(f"--{option} {value} must be more than 0")
    text = None if hlo is None else read_program(hlo)
    title = name or str(hlo)
    with working(f"loading {title}", progress):
        opened = open_place(source, must_exist=False)  # its errors come before the work
        import_modules(modules)
        subject = None if name is None else load(name)
        plain = None if against is None else load(against)
    for given in filter(None, (subject, plain) if plain is not None else ()):
        if given.whole is None:
            raise Failure(
                f"{given.name} returns a lowered computation, which --against cannot run; return "
                "(function, arguments) instead"
            )
    with working(f"lowering {title}", progress):
        program = text if subject is None else subject.lower()
        calls = operations_of(program, title)
        store = open_store(source, opened)

        from ..ops import Tuner
        from ..tuning.pipeline import Interrupted, Order, tune_calls
        from ..tuning.whole_model import COMPARE_SECONDS

    total = len({inv.key for inv in invocations_of(calls)})
    cluster = functools.partial(_tuned_on_cluster, program, ray_address, workers, progress, force)
    order = Order(
        store,
        Tuner(seconds=seconds, evaluations=evaluations, progress=progress, **search),
        force=force,
        backward=backward,
        install=False,
        compare_seconds=COMPARE_SECONDS if bench else None,
        on_event=_listener(total),
        tune=cluster if ray or ray_address else None,
        again="--force",
    )
    interrupted = False
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what their code prints is no answer of ours
            result = tune_calls(
                calls,
                order,
                title=title,
                whole=None if subject is None else subject.whole,
                against=None if plain is None else plain.whole,
                command=typed_command(),
            )
    except Interrupted as error:  # what was learned is in the store already
        interrupted, result = True, error.result
        end_line()
    run = result.run
    file = save_record(run, record)
    if page is not None:
        write_report(run, page)
    answer(state, run, store, file, page, total, interrupted)
    if interrupted:
        return Exit.INTERRUPTED
    if result.not_stored:
        missing = ", ".join(result.not_stored)
        note(
            f"ejkernel: tuned, but not stored: {store.path} does not hold {missing}; "
            f"see the warnings above{f'. The record {file} has the configs' if file else ''}"
        )
        return Exit.STORE
    return Exit.NOT_WELL if result.skipped else Exit.OK


def _tuned_on_cluster(
    program: Any,
    address: str | None,
    workers: int | None,
    progress: bool | None,
    force: bool,
    selector: ConfigSelectorChain,
) -> AutotuningResult:
    from ..fleet import tune_on_cluster

    _check_address(address)
    try:
        return tune_on_cluster(
            selector, program, address=address, workers=workers, progress=progress, force=force
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
